"""Every command of the README as a newcomer types it, in small: it starts, ends with 0 and prints what it promises."""

import json
import os
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from options import BadInput
from harness import Harness
from model import MTP, load

ROOT = Path(__file__).parent.parent
BASE = ROOT / "data" / "base-small"


def command(line: str, *words, typed: str = "") -> str:
    """Standard output of a command, run in the repository's root."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    words = [sys.executable, *line.split(), *map(str, words)]
    done = subprocess.run(words, cwd=ROOT, env=env, input=typed, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_harness_show():
    out = command("harness.py show --seed 3")
    assert out.startswith("[system]\n") and "[user]\n" in out
    assert f"commit {Harness.load(ROOT / 'data/harness').commit}" in out.splitlines()[-1]


def test_sim_and_facts():
    out = command("oracle.py --seed 3")
    assert "truth: " in out and "\nreply   " in out
    again = command("facts.py --seed 3")
    assert again.startswith(out) and "rewards: {'accuracy': 1.0, 'effectiveness': 1.0" in again


def bench(name: str, words: str, capsys) -> tuple[str, dict]:
    """What a benchmark prints, and the JSON object in its last line."""
    runpy.run_path(str(ROOT / "bench" / f"{name}.py"))["main"](shlex.split(words))
    figures = json.loads((out := capsys.readouterr().out).splitlines()[-1])
    assert figures.pop("bench") == name
    return out, figures


def test_bench_rollout(model_dir, capsys):
    """The last line is one JSON object; a 4-rollout ratio itself says nothing."""
    _, figures = bench("rollout", f"--rollouts 4 --group 2 --repeats 1 --threads 1 --model {model_dir}", capsys)
    assert all(x > 0 for x in figures.values())
    assert set(figures) == {"ratio", "loop_ms_per_turn", "tokens_per_s", "generate_tokens_per_s"}


def test_bench_rl_step(model_dir, capsys):
    """Both sides hold the very same tokens, where TRL is there; where it is not, the ratio is null and the rest is."""
    out, figures = bench("rl_step", f"--config tiny --threads 1 --model {model_dir}", capsys)
    peer = bool(find_spec("trl") and find_spec("datasets"))
    assert figures["seconds"] > 0
    assert "for want of an advantage: 0 of 8\n" in out
    for name in ("ratio_vs_trl", "cpu_ratio", "trl_seconds"):
        assert figures[name] > 0 if peer else figures[name] is None
    if peer:
        counts = next(line for line in out.splitlines() if line.startswith("prompt and sampled tokens"))
        ours, theirs = (int(word.strip(",")) for word in counts.split() if word.strip(",").isdigit())
        assert "on both sides: 8 of 8\n" in out and ours == theirs > 0
    else:
        assert "TRL is not installed" in out
    for line in ("rollouts_fit", "tokens_fit"):
        assert set(figures[line]) == {"a", "b", "r2", "cpu_a", "cpu_b", "cpu_r2"}
        assert 0 <= figures[line]["r2"] <= 1 and figures[line]["cpu_b"] > 0  # more work costs more


@pytest.mark.parametrize("wrong", ["--micro 4 --group-size 3", "--sizes 1,2", "--stretch 2,2,2"])
def test_bench_rl_step_refuses(wrong):
    """Before anything is loaded."""
    main = runpy.run_path(str(ROOT / "bench/rl_step.py"))["main"]
    with pytest.raises(BadInput, match=wrong.split()[0]):
        main(["--config", "tiny", "--groups", "1", "--model", "none", *wrong.split()])


def test_bench_speculate(headed_dir, model_dir, capsys):
    """Three sides that answer the same requests; a new head drafts badly, and nothing changes but the time."""
    words = "--most 2 --requests 2 --new 6 --drafts 2 --repeats 1 --device cpu --model"
    out, figures = bench("speculate", f"{words} {headed_dir}", capsys)
    assert figures.pop("identical") is True and 1 <= figures.pop("accepted_length") <= 3
    assert set(figures) == {"ratio_vs_plain", "ratio_vs_generate"} and all(x > 0 for x in figures.values())
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" yes")] == ["1", "2"]
    with pytest.raises(BadInput, match="has no MTP head to draft with"):
        bench("speculate", f"{words} {model_dir}", capsys)
    with pytest.raises(BadInput, match="--context 100 is too short"):
        bench("speculate", f"{words} {headed_dir} --context 100", capsys)


def test_bench_verifier(capsys):
    """Without a GPU only the torch paths are measured."""
    words = "--device cpu --vocab 1000 --padding 24 --sequences 2 --repeats 3 --dtype float32"
    out, figures = bench("verifier", words, capsys)
    assert figures.pop("us_torch") > 0 and figures.pop("us_delta_torch") > 0
    assert figures == {"device": "cpu", "us": None, "us_empty_graph": None, "us_delta": None}
    assert "8 rows x 1000 logits in float32, 0.0 MB" in out and out.count("not measured") == 3
    with pytest.raises(BadInput, match="padding 1000: must be less than vocab 1000"):
        bench("verifier", f"{words} --padding 1000", capsys)


def test_rl_tiny_with_the_shipped_policy(tmp_path):
    out = command("rl.py --config tiny --steps 1 --eval-requests 1 --out", tmp_path / "run")
    assert "1 unseen requests" in out and (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_bench_study(model_dir, tmp_path, capsys):
    """Each variant and seed is one run of rl.py, made once; the table is put together from their metrics."""
    words = ["--config", "tiny", "--variants", "default,whole", "--seeds", "0", "--out", str(tmp_path / "study")]
    words.append(f"--rl=--model {model_dir} --steps 1 --eval-requests 2")
    study = runpy.run_path(str(ROOT / "bench" / "study.py"))["main"]
    outputs = [(study(words), capsys.readouterr().out)[1] for _ in range(2)]
    assert "a new run" in outputs[0] and "a new run" not in outputs[1]
    figures = json.loads(outputs[1].splitlines()[-1])
    assert figures == json.loads(outputs[0].splitlines()[-1]) and figures.pop("bench") == "study"
    assert list(figures) == ["default", "whole"] and all(len(x) == 1 for row in figures.values() for x in row.values())
    assert {"score", "T2", "fault_recovery", "think/reply"} <= figures["whole"].keys()
    assert (tmp_path / "study" / "table.md").read_text().count("\n") == 4
    with pytest.raises(BadInput, match="lr was 0.0002 and is now 0.1; resume with the same options"):
        study([*words[:-1], words[-1] + " --lr 0.1"])


@pytest.mark.filterwarnings("ignore:drafting does not pay")
def test_bench_heads(tmp_path, capsys):
    """The policies of two of its runs are one; the third run's has not moved, though its head has."""
    policy = load(BASE)
    policy.mtp = MTP(policy.model)
    policy.publish(tmp_path / "base")
    words = f"--config tiny --model {tmp_path / 'base'} --out {tmp_path / 'heads'}"
    out, figures = bench("heads", f"{words} --rl='--steps 1 --eval-requests 1'", capsys)
    assert set(figures) == {"accepted_length", "gain", "arms"} and 1 <= figures["accepted_length"] <= 4
    assert [line.split()[0] for line in out.splitlines()[-5:-2]] == list(figures["arms"]) == ["along", "left", "frozen"]
    assert (tmp_path / "heads" / "heads.png").read_bytes().startswith(b"\x89PNG")
    made = {name: load(tmp_path / "heads" / name / "model") for name in figures["arms"]} | {"base": policy}
    moved = [
        {name: not torch.equal(a, b) for name, part in parts.items() for a, b in [(part(made[x]), part(made[y]))]}
        for x, y in (("along", "left"), ("left", "base"), ("frozen", "base"))
        for parts in [
            {"model": lambda p: p.model.model.layers[0].mlp.up_proj.weight, "head": lambda p: p.mtp.fc.weight}
        ]
    ]
    assert moved == [{"model": False, "head": True}, {"model": True, "head": False}, {"model": False, "head": True}]
