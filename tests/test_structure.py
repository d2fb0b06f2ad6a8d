"""The shape of the house: which room may lean on which, and what each has at its door."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A file imports only files that stand before it.
ORDER = "options common curves chat parts checks harness reword envelope augment sim oracle facts samples model fsdp"
ORDER = f"{ORDER} mtp verify delta rows graphs infer browse ifeval eval replay sft opd objective rl hat"
ORDER = ORDER.split()
STAGES = {"sft", "opd", "rl", "hat"}  # never import each other; hat alone puts them together
TORCH_FREE = [
    "options",
    "chat",
    "parts",
    "checks",
    "harness",
    "reword",
    "envelope",
    "augment",
    "sim",
    "oracle",
    "facts",
    "samples",
    "ifeval",
]
SHADOWS = {"utils.py", "types.py", "trace.py", "tokenize.py"}  # one says nothing, the others hide the standard library

here = [name for name in ORDER if (ROOT / f"{name}.py").exists()]
each_room = pytest.mark.parametrize("name", here)


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def imports(nodes: list[ast.AST]) -> set[str]:
    """First parts of all module names that are imported in `nodes`."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: the house is flat, no relative import"
            names.add(node.module.split(".")[0])
    return names


@each_room
def test_imports_only_files_above_it(name):
    above = set(ORDER[: ORDER.index(name)])
    nodes = list(ast.walk(tree(name)))
    if name in ("harness", "infer"):  # their commands (show, chat, replay) reach for rooms below when they run
        nodes = tree(name).body
    below = imports(nodes) & set(ORDER) - above
    assert not below, f"{name}.py imports {below}"


@each_room
def test_stages_do_not_import_each_other(name):
    if name != "hat":
        assert not imports(list(ast.walk(tree(name)))) & STAGES


@pytest.mark.parametrize("name", [name for name in TORCH_FREE if name in here])
def test_no_torch(name):
    assert not imports(list(ast.walk(tree(name)))) & {"torch", "transformers"}


def test_they_start_without_torch():
    names = [name for name in ORDER if name in ("common", *TORCH_FREE)]
    lines = "".join(f"import {name}\nassert 'torch' not in sys.modules, '{name}'\n" for name in names)
    done = subprocess.run([sys.executable, "-c", f"import sys\n{lines}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_at_the_root_is_in_the_order():
    assert {path.stem for path in ROOT.glob("*.py")} <= set(ORDER)


def test_no_file_has_a_name_that_shadows_or_says_nothing():
    found = [path for top in ("*.py", "bench/*.py", "data/**/*.py", "tests/*.py") for path in ROOT.glob(top)]
    assert not {path.name for path in found} & SHADOWS


@each_room
def test_header_says_what_it_is(name):
    header = ast.get_docstring(tree(name))
    assert header and len(header.splitlines()) >= 3, f"{name}.py needs a header: purpose, contract, how to run it"


def test_every_requirement_has_a_lower_bound_and_a_reason():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line.strip() and not line.startswith("#")]
    assert wanted
    for line in wanted:
        assert re.fullmatch(r"[\w-]+>=[\d.]+(,<[\d.]+)?(; sys_platform == 'linux')? +# \S.+", line), line
