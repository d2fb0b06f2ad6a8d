"""The whole method: the plan, what is refused at once, resuming per stage, and the tables by hand."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import common
import pytest
from safetensors.torch import load_file

import hat
from options import BadInput

ROOT = Path(__file__).parent.parent


def config(*words):
    return hat.parse(hat.Config, hat.PRESETS, list(words))


# ---------------------------------------------------------------------------------------------------------------------
# the plan


def test_hat_alone():
    steps = hat.plan(config())
    assert list(steps) == ["hsa-sft", "hsa-opd", "hat"]
    assert [(s.stage, s.after) for s in steps.values()] == [("sft", "base"), ("opd", "hsa-sft"), ("rl", "hsa-opd")]
    assert hat.tables(config()) == {"HAT": {"Base": "base", "+HSA-RL (HAT)": "hat"}}


def test_the_ablation_shares_what_its_rows_have_in_common():
    cfg = config("--ablate", "--leave-out", "tool,hook")
    steps = hat.plan(cfg)
    assert len(steps) == 8
    for number, (name, step) in enumerate(steps.items()):
        assert step.after == "base" or step.after in list(steps)[:number], name
    after = {name: step.after for name, step in steps.items()}
    assert after["fixed-opd"] == "fixed-sft" and after["fixed-rl"] == after["hat"] == "hsa-opd"
    ablation, second = hat.tables(cfg).values()
    labels = "Base Fixed-SFT Fixed-SFT+OPD HSA-SFT HSA-SFT+OPD +Fixed-RL +HSA-RL_(HAT)".replace("_", " ").split(" ")
    assert " ".join(ablation) == " ".join(labels)
    assert second == {"HSA-SFT": "hsa-sft", "without tool": "hsa-sft-no-tool", "without hook": "hsa-sft-no-hook"}
    assert {*ablation.values(), *second.values()} <= {"base", *steps}


def test_words_of_each_stage():
    """The mode reaches SFT and RL, what is left out SFT, the base is OPD's teacher, options of the user come last."""
    cfg = config("--config", "tiny", "--model", "B", "--ablate", "--leave-out", "tool", "--sft=--lr 1 --epochs 3")
    steps, place = hat.plan(cfg), Path("P")
    line = {name: hat.words(cfg, 7, name, step, place) for name, step in steps.items()}
    parsed = {}
    for name in ("hsa-sft", "fixed-sft", "hsa-sft-no-tool"):
        parsed[name] = hat.parse(hat.sft.Config, hat.sft.PRESETS, line[name])
    modes = {name: (c.harness_mode, c.leave_out) for name, c in parsed.items()}
    assert modes == {
        "hsa-sft": ("hsa", "none"),
        "fixed-sft": ("fixed", "none"),
        "hsa-sft-no-tool": ("hsa", "tool"),
    }
    c = parsed["fixed-sft"]
    assert (c.model, c.out, c.seed, c.lr, c.epochs, c.batch) == ("B", str(place / "fixed-sft"), 7, 1.0, 3, 2)
    c = hat.parse(hat.opd.Config, hat.opd.PRESETS, line["fixed-opd"])
    assert (c.model, c.teacher, c.out) == (str(place / "fixed-sft" / "model"), "B", str(place / "fixed-opd"))
    for name, mode in (("hat", "hsa"), ("fixed-rl", "fixed")):
        assert line[name][line[name].index("--harness-mode") + 1] == mode


# ---------------------------------------------------------------------------------------------------------------------
# stages that do as if: each leaves a run directory with a model, or is interrupted on the way

SCORES = {"base": 50.0, "fixed-sft": 80.0, "fixed-opd": 81.0, "hsa-sft": 82.0, "hsa-opd": 83.0, "fixed-rl": 84.0}


@dataclasses.dataclass
class RL:
    """The options of rl.py that hat.py sets."""

    config: str = "small"
    model: str = ""
    harness: str = ""
    world: str = ""
    out: str = ""
    seed: int = 0
    device: str = "auto"
    harness_mode: str = "hsa"
    lr: float = 0.0
    think_free: int = 0
    think_full: int = 1
    resume: bool = False


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for the stages; the list of (stage, name, seed, resumed) that were run. `calls.stop` interrupts one."""
    made = types.SimpleNamespace(seen=[], stop=None)

    def stage(kind, Config, presets, check):
        def main(argv):
            cfg = hat.parse(Config, presets, argv)
            out = Path(cfg.out)
            if kind == "eval":
                name = "base" if out.parent.name == "base" else out.parent.parent.name
                seed = 0 if name == "base" else int(out.parent.parent.parent.name.removeprefix("seed-"))
                assert name == "base" or out.parent == Path(cfg.model)
                made.seen.append(("eval", name, seed, False))
                mean = SCORES.get(name, 90.0) + 2 * seed
                scores = {"T1": {"mean": mean}, "T2": {"mean": mean - 1}, "T4-P": None}
                thought = {"T1": {"think/tool": 30.0, "think/reply": None}}
                result = {"scores": scores, "gap": {"mean": 1.0}, "details": thought, "code_version": "x"}
                result |= dict.fromkeys(("sets", "items", "config"), {})
                common.write_json(out, result)
                return
            assert (Path(cfg.model) / "weights").exists() or cfg.model == str(ROOT / "data/base-small")
            made.seen.append((kind, out.name, cfg.seed, cfg.resume))
            assert cfg.resume == (out / "config.json").exists()
            common.write_json(out / "config.json", common.settings(cfg) | {"code_version": "x"})
            if made.stop == out.name:
                raise KeyboardInterrupt(2)
            common.write_text(out / "model" / "weights", "x")

        return types.SimpleNamespace(Config=Config, PRESETS=presets, main=main, check=check)

    for name, module in hat.STAGES.items():
        Config, presets = (RL, {"tiny": {}, "small": {}}) if name == "rl" else (module.Config, module.PRESETS)
        check = getattr(module, "check", None) if Config is module.Config else lambda *_: None
        monkeypatch.setitem(hat.STAGES, name, stage(name, Config, presets, check))
    monkeypatch.setattr(hat.evaluation, "main", hat.STAGES["eval"].main)
    return made


FLAGS = ["--config", "tiny", "--device", "cpu", "--model", str(ROOT / "data/base-small")]


def run(tmp_path, *words):
    hat.main([*FLAGS, "--out", str(tmp_path / "run"), *words])


def test_each_stage_is_run_once_and_only_what_stands_in_a_table_is_evaluated(tmp_path, calls, capsys):
    run(tmp_path)
    assert [seen[:2] for seen in calls.seen] == [
        ("eval", "base"),
        ("sft", "hsa-sft"),
        ("opd", "hsa-opd"),
        ("rl", "hat"),
        ("eval", "hat"),
    ]
    out = capsys.readouterr().out
    assert "50.0" in out and "90.0" in out and "| Base | 50.0 | 49.0 | 1.0 | 30.0 |" in out
    marked = (tmp_path / "run" / "table.md").read_text()
    assert "| +HSA-RL (HAT) | 90.0 | 89.0 | 1.0 | 30.0 |" in marked and marked in out
    times = json.loads((tmp_path / "run" / "times.json").read_text())
    steps = ["seed 0, hsa-sft", "seed 0, hsa-opd", "seed 0, hat", "seed 0, hat, evaluation"]
    assert list(times) == ["base, evaluation", *steps] and "| all of it | 0.0 min |" in marked
    with pytest.raises(BadInput, match="is not empty; --resume continues"):
        run(tmp_path)


def test_an_interrupted_stage_goes_on_and_finished_ones_stay(tmp_path, calls):
    calls.stop = "hsa-opd"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert "seed 0, hsa-opd" in json.loads((tmp_path / "run" / "times.json").read_text())
    calls.stop = None
    calls.seen.clear()
    run(tmp_path, "--resume")
    assert calls.seen == [("opd", "hsa-opd", 0, True), ("rl", "hat", 0, False), ("eval", "hat", 0, False)]
    calls.seen.clear()
    run(tmp_path, "--resume")
    assert calls.seen == []


def test_stages_take_the_options_of_a_real_model(model_dir, tmp_path):
    """--config qwen3, but for its sizes, on a toy of that family, each stage in a process that it may shard."""
    cfg = hat.parse(hat.Config, hat.PRESETS, ["--config", "qwen3"])
    hat.refuse(cfg, 8)
    assert "--lr" not in hat.plan(cfg)["hat"].options
    words = ["--config", "qwen3", "--device", "cpu", "--model", str(model_dir), "--batch", "2", "--context", "1536"]
    stages = {"sft": ["--samples", "2", "--held-out", "1"]}
    stages["opd"] = ["--teacher", str(model_dir), "--steps", "1", "--reply-tokens", "8"]  # and rl in test_rl_run.py
    for stage, more in stages.items():
        command = [sys.executable, ROOT / f"{stage}.py", *words, *more, "--out", tmp_path / stage]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        new, old = (load_file(path / "model.safetensors") for path in (tmp_path / stage / "model", model_dir))
        assert new.keys() == old.keys() and all(tensor.dtype == old[name].dtype for name, tensor in new.items())


def test_a_finished_stage_of_other_options_is_no_row(tmp_path, calls):
    """An upgrade that changes a default must not put two methods into one table."""
    run(tmp_path)
    config = tmp_path / "run" / "seed-0" / "hsa-sft" / "config.json"
    old = json.loads(config.read_text())
    del old["recompute"], old["lr_end"]  # options that came later, at their defaults
    config.write_text(json.dumps(old))
    (tmp_path / "run").rename(tmp_path / "moved")
    calls.seen.clear()
    hat.main([*FLAGS, "--out", str(tmp_path / "moved"), "--resume"])
    assert calls.seen == []
    (tmp_path / "moved").rename(tmp_path / "run")
    config.write_text(json.dumps(old | {"lr": 12345.0}))
    with pytest.raises(BadInput, match="hsa-sft: lr was 12345.0 and is now"):
        run(tmp_path, "--resume")


def test_rows_and_seeds_are_added_to_what_is_there(tmp_path, calls):
    run(tmp_path)
    calls.seen.clear()
    run(tmp_path, "--resume", "--ablate", "--leave-out", "hook", "--seeds", "0,1")
    stages = [seen for seen in calls.seen if seen[0] != "eval"]
    assert len(stages) == 4 + 7 and not any(resumed for *_, resumed in stages)
    assert ("sft", "hsa-sft", 0, False) not in stages and ("sft", "hsa-sft", 1, False) in stages
    rated = [seen[1:3] for seen in calls.seen if seen[0] == "eval"]
    assert len(rated) == len(set(rated)) == 7 - 2 + 1 + 6 + 1 and ("base", 0) not in rated
    lines = (tmp_path / "run" / "table.md").read_text().splitlines()
    assert "| Fixed-SFT | 81.0 ± 1.4 | 80.0 ± 1.4 | 1.0 ± 0.0 | 30.0 ± 0.0 |" in lines
    assert "| Base | 50.0 | 49.0 | 1.0 | 30.0 |" in lines  # measured once
    assert "| without hook | 91.0 ± 1.4 | 90.0 ± 1.4 | 1.0 ± 0.0 | 30.0 ± 0.0 |" in lines
    assert "- no     +1.0 ± 0.0, expected at least +3.0: Fixed-SFT loses from T1 to T2" in lines
    assert "- yes    -1.0 ± 0.0, expected at least -1.0: HAT loses at most one: T2 less T1" in lines
    assert not any("T4" in line for line in lines)  # no such column was measured


@pytest.mark.parametrize(
    "words, message",
    [
        (["--leave-out", "tools"], "--leave-out: 'tools' is none of .*; did you mean tool"),
        (["--seeds", ""], "at least one seed, and each once"),
        (["--seeds", "0,1,0"], "at least one seed, and each once"),
        (["--sft=--harness-mode fixed"], "--sft: --harness-mode of a stage is set by hat.py"),
        (["--rl=--seed 3", "--eval=--seed 3"], "--rl: --seed of a stage is set by hat.py"),
        (["--harness", "nowhere"], "nowhere"),
        (["--eval=--manifest nowhere.json"], "nowhere.json"),
        (["--seeds", "a"], "--seeds"),
        (["--sft=--epoch 3"], "sft.py: unknown option --epoch; did you mean --epochs"),
        (["--opd=--lr x"], "opd.py: --lr: 'x' is not float"),
        (["--eval=--limit -1"], "eval.py: --limit: -1 is not within"),
        (["--rl=--out x"], "--rl: --out of a stage is set by hat.py"),
        (["--opd=--lr=1 --seed=3"], "--opd: --seed of a stage is set by hat.py"),
        (["--opd=--prompts nowhere.jsonl"], "opd.py: --prompts nowhere.jsonl: no such file"),
        (["--sft=--logs nowhere.jsonl"], "sft.py: --logs nowhere.jsonl: no such file"),
        (["--sft=--lr '1"], "--sft: .*No closing quotation"),
        (["--ablat"], "did you mean --ablate"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, calls, words, message):
    with pytest.raises(BadInput, match=message) as error:
        run(tmp_path, *words)
    assert not calls.seen and not (tmp_path / "run").exists() and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# tables


def test_numbers_and_cells_by_hand():
    result = {"scores": {"T1": {"mean": 90.0}, "T4-P": None}, "gap": None, "details": {"T1": {"think/tool": None}}}
    assert hat.numbers(result) == {"T1": 90.0} and hat.numbers(result | {"details": {}}) == {"T1": 90.0}
    assert [hat.cell(x) for x in ([1.0], [1.0, 2.0, 6.0], None, [])] == ["1.0", "3.0 ± 2.6", "-", "-"]
    found = {"a": {"T1": [90.0, 91.0]}, "b": {"T1": [1.0, 1.0], "T4-I": [2.0, 2.0]}}
    rows = hat.table(found)
    assert rows == [["", "T1", "T4-I"], ["a", "90.5 ± 0.7", "-"], ["b", "1.0 ± 0.0", "2.0 ± 0.0"]]
    assert hat.markdown(rows)[:2] == ["|  | T1 | T4-I |", "|---|---|---|"]


KEYS = ("T1", "T2", "T1 - T2", "T3-prompt", "T4-P", "T4-I", "think/tool", "think/reply")


def means(**rows):
    """Label -> column -> values of one seed, from rows (T1, T2, T3-prompt, T4-P, T4-I, think/tool, think/reply)."""
    whole = {label.replace("_", "+"): (t1, t2, t1 - t2, *rest) for label, (t1, t2, *rest) in rows.items()}
    return {label: dict(zip(KEYS, ([x] for x in row))) for label, row in whole.items()}


GOOD = means(
    Base=(60, 55, 50, 80, 90, 50, 40),
    **{"Fixed-SFT": (90, 80, 45, 70, 80, 50, 40), "Fixed-SFT_OPD": (90, 80, 45, 76, 86, 50, 40)},
    **{"HSA-SFT": (91, 90, 60, 78, 89, 50, 40), "HSA-SFT_OPD": (92, 91, 60, 80, 90, 50, 40)},
    **{"_Fixed-RL": (93, 90, 57, 80, 90, 40, 30), "_HSA-RL (HAT)": (94, 93.5, 61, 81, 90, 29, 20)},
)
BAD = means(
    Base=(60, 55, 47, 80, 90, 50, 40),
    **{"Fixed-SFT": (90, 88, 45, 79, 89, 50, 40), "Fixed-SFT_OPD": (90, 80, 45, 79, 89, 50, 40)},
    **{"HSA-SFT": (91, 89, 46, 78, 89, 50, 40), "HSA-SFT_OPD": (92, 91, 60, 80, 90, 50, 40)},
    **{"_Fixed-RL": (93, 90, 60, 80, 90, 40, 30), "_HSA-RL (HAT)": (91, 89, 59, 79, 90, 60, 40)},
)


def test_effects_by_hand():
    """All of the report's, appearing and not."""
    good, bad = hat.effects(GOOD), hat.effects(BAD)
    assert len(good) == len(bad) == 13
    assert all(line.startswith("yes") for line in good) and all(line.startswith("no ") for line in bad)
    assert "+0.6, expected at least +0.5: OPD gives it back, of that loss" in good[6]
    assert hat.effects({"Base": GOOD["Base"]}) == []


def test_an_effect_within_the_spread_of_the_seeds_is_close():
    rows = {
        label: {c: [v[0], *more] for c, v in GOOD[label].items()}
        for label, more in (("Fixed-SFT", [0.0, 0.0]), ("Base", []))
    }
    rows["Fixed-SFT"] |= {"T1": [90.0, 90.0, 90.0], "T2": [80.0, 85.0, 92.0]}
    rows["Base"] |= {"T4-P": [60.0], "T4-I": [60.0]}
    rows["Fixed-SFT"] |= {"T4-P": [62.0] * 3, "T4-I": [62.0] * 3}
    assert hat.effects(rows)[0].startswith("close  +4.3 ± 6.0, expected at least +3.0")
    rows["Fixed-SFT+OPD"] = {"T4-P": [61.5] * 3, "T4-I": [61.5] * 3}
    lines = [line for line in hat.effects(rows) if "OPD" in line]
    assert lines == ["-      no share of nothing, in some seed: OPD gives it back, of that loss"]
    rows["HSA-SFT+OPD"], rows[hat.HAT] = ({c: [0.0] for c in KEYS} for _ in range(2))  # no reasoning at all
    lines = [line for line in hat.effects(rows) if "reasons shorter" in line]
    assert lines == ["-      no share of nothing, in some seed: HSA-RL reasons shorter in tool-call states, share"]


def test_rows_of_other_sets_or_of_another_base_are_refused(tmp_path, calls, monkeypatch):
    run(tmp_path)
    file = tmp_path / "run" / "base" / "eval.json"
    common.write_json(file, json.loads(file.read_text()) | {"sets": {"T1": {"sha256": "x"}}})
    with pytest.raises(BadInput, match="evaluated on other sets"):
        run(tmp_path, "--resume")
    monkeypatch.setattr(hat, "ingredients", lambda cfg: {"model": "new", "harness": "new", "world": "new"})
    with pytest.raises(BadInput, match="its rows are of another model, harness, world"):
        run(tmp_path, "--resume")


def test_a_number_of_processes_that_a_stage_cannot_share_is_refused():
    with pytest.raises(BadInput, match="rl.py: --groups must be a multiple of the 8 processes"):
        hat.refuse(config("--rl=--groups 12"), 8)
    with pytest.raises(BadInput, match="rl.py: --think-full 84 must be above --think-free 100"):
        hat.refuse(config("--rl=--think-free 100"))


# ---------------------------------------------------------------------------------------------------------------------
# the real stages


TINY = ["--config", "tiny", "--device", "cpu", "--rl=--steps 1 --eval-requests 2", "--opd=--steps 1"]
TINY += ["--eval=--sets T1,T4 --limit 2", "--sft=--samples 2 --held-out 1"]


def test_tiny_from_end_to_end(model_dir, tmp_path, capsys, monkeypatch):
    """An interrupted last stage goes on and ends with the same weights."""
    monkeypatch.chdir(ROOT)
    words = [*TINY, "--model", str(model_dir), "--out", str(tmp_path / "run")]
    hat.main(words)
    assert "| +HSA-RL (HAT) |" in capsys.readouterr().out
    weights = tmp_path / "run" / "seed-0" / "hat" / "model" / "model.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(weights.parent)  # as if killed after its last checkpoint
    hat.main([*words, "--resume"])
    assert weights.read_bytes() == before and "hsa-sft: sft.py" not in capsys.readouterr().out


def test_two_processes_go_from_stage_to_stage(model_dir, tmp_path):
    words = [*TINY, "--model", str(model_dir), "--out", str(tmp_path / "run")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, "hat.py", *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| +HSA-RL (HAT) |" in done.stdout and (tmp_path / "run" / "table.md").exists()
