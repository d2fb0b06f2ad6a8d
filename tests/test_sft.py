"""Supervised training: its loss by hand, one denominator, each token once, whole tiny runs, and the bench."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import common
import pytest
import torch

import sft
from chat import Trajectory
from options import BadInput
from model import load
from samples import trained

ROOT = Path(__file__).parent.parent


def config(**options):
    return sft.parse(sft.Config, sft.PRESETS, [f"--{k}={v}" for k, v in options.items()])


@pytest.fixture(scope="module")
def policy(model_dir):
    return load(model_dir)


def babble(lengths=(9, 140, 40, 7, 12), prompt=4):
    """Rows (ids, mask) in which two stretches are trained; id 0, with which rows are padded, is among them."""
    rows = []
    for i, n in enumerate(lengths):
        ids = [(17 * i + 5 * j) % 250 for j in range(prompt + n)]
        ids[-1] = 0
        rows.append((ids, [0] * prompt + [1] * (n // 3) + [0] * (n // 3) + [1] * (n - 2 * (n // 3))))
    return rows


SILENT = ([3, 1, 4, 1, 5], [0] * 5)


def gradient(policy, rows, **options):
    """Log of an update and its gradient; no weight moves."""
    optimizer = torch.optim.SGD(policy.model.parameters(), 0.0)
    optimizer.zero_grad = lambda: None
    policy.model.zero_grad()
    log = sft.update(policy, optimizer, rows, config(**{"grad_clip": 0} | options), common.ALONE)
    return log, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.model.parameters()]


# ---------------------------------------------------------------------------------------------------------------------
# the update


def test_loss_is_the_mean_over_all_trained_tokens(policy):
    """Against all logits of each row alone; long rows weigh by their tokens, each once (FAULTS 8)."""
    rows, total, tokens = babble(), 0.0, 0
    for ids, mask in rows:
        logits = policy.model(torch.tensor([ids])).logits[0, :, : policy.codec.vocab_size]
        logps = logits.log_softmax(-1)
        for t, m in enumerate(mask):
            total -= m * logps[t - 1, ids[t]].item()
            tokens += m
    log, whole = gradient(policy, rows)
    assert log["loss"] == pytest.approx(total / tokens, rel=1e-5) and log["tokens"] == tokens
    assert log["read"] == sum(len(ids) for ids, _ in rows) and log["skipped"] == 0
    norm = torch.stack([g.norm() for g in whole]).norm().item()
    assert log["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0


def test_the_step_does_not_depend_on_micro_batches_or_order(policy):
    """FAULTS 8, 16: other micro-batches mean other padding and other partial sums, and the same step."""
    log, whole = gradient(policy, babble(), micro=5)
    for micro in (1, 2):
        other, parts = gradient(policy, babble()[::-1], micro=micro)
        assert other == pytest.approx(log, rel=1e-4)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_row_of_which_nothing_is_trained_is_skipped_and_counted(policy):
    """FAULTS 7: it moves neither loss nor gradient; a whole batch of them is refused."""
    log, whole = gradient(policy, babble())
    other, parts = gradient(policy, [SILENT, *babble(), SILENT])
    assert other == log | {"skipped": 2} and all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    for rows in ([SILENT, SILENT], []):
        with pytest.raises(BadInput, match="a whole batch without a token to train"):
            gradient(policy, rows)


def test_only_trained_tokens_have_a_loss(policy):
    """Another token after the last trained one, or a longer prompt's worth of padding, changes nothing."""
    (ids, mask), *_ = babble((30,))
    log, whole = gradient(policy, [(ids, mask)])
    other, parts = gradient(policy, [(ids + [9, 9, 8], mask + [0, 0, 0])])
    assert other["loss"] == pytest.approx(log["loss"], rel=1e-5) and other["tokens"] == log["tokens"]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_clipped_and_zero_means_not_at_all(policy):
    (log, free), (_, cut) = (gradient(policy, babble(), grad_clip=limit) for limit in (0, 0.1))
    norms = [torch.stack([g.norm() for g in each]).norm().item() for each in (free, cut)]
    assert norms == pytest.approx([log["grad_norm"], 0.1], rel=1e-3) and norms[0] > 0.2


def test_bfloat16_is_near_float32_and_leaves_the_weights_alone(policy):
    (log, whole), (other, parts) = gradient(policy, babble()), gradient(policy, babble(), precision="bfloat16")
    assert other["loss"] == pytest.approx(log["loss"], rel=1e-2) and other["loss"] != log["loss"]
    assert {p.dtype for p in policy.model.parameters()} | {g.dtype for g in parts} == {torch.float32}
    assert sum((a - b).norm() for a, b in zip(whole, parts)) < 0.2 * sum(a.norm() for a in whole)


def test_held_out_loss_is_that_of_an_update_and_trains_nothing(policy):
    rows, before = babble(), [p.clone() for p in policy.model.parameters()]
    loss = sft.held_out_loss(policy, rows, config(), common.ALONE)
    assert loss == pytest.approx(gradient(policy, rows)[0]["loss"], rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# order and rate


@pytest.mark.parametrize("count, batch, epochs", [(10, 4, 1), (10, 4, 3), (3, 8, 2), (6, 2, 2)])
def test_each_epoch_trains_each_sample_once(count, batch, epochs):
    """FAULTS 8: in another order each time; the last step has what is left."""
    cfg = config(batch=batch, epochs=epochs)
    steps = -(-epochs * count // batch)
    taken = [i for step in range(1, steps + 1) for i in sft.rows_at(step, count, cfg)]
    assert sft.rows_at(steps, count, cfg) and not sft.rows_at(steps + 1, count, cfg)
    parts = [taken[e * count : (e + 1) * count] for e in range(epochs)]
    assert all(sorted(part) == list(range(count)) for part in parts) and len(taken) == epochs * count
    assert count < 4 or len(set(map(tuple, parts))) == epochs
    assert sft.rows_at(1, count, config(batch=batch, epochs=epochs, seed=1)) != sft.rows_at(1, count, cfg) or count < 4


def test_learning_rate_by_hand():
    """Of all stages."""
    cfg = config(lr=1.0, warmup=2, lr_end=0.2)
    assert [sft.learning_rate(step, 5, cfg) for step in range(1, 6)] == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])
    assert sft.learning_rate(1, 1, config(lr=1.0, warmup=0)) == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# whole runs


@pytest.fixture(scope="module")
def flags(model_dir):
    """Flags of a tiny run of three steps; with one held-out row, of two ranks one has none."""
    words = "--config tiny --held-out 1 --device cpu --lr 3e-3 --warmup 0 --model"
    return [*words.split(), str(model_dir)]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The directory of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    sft.main([*flags, "--out", str(out)])
    return out


def rows_of(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def weights(out):
    return (out / "model" / "model.safetensors").read_bytes()


def test_run_leaves_its_files(whole, model_dir):
    log = rows_of(whole)
    assert [row["step"] for row in log] == [1, 2, 3] and all(row["grad_norm"] > 0 for row in log)
    assert log[-1]["epoch"] == 1 and log[-1]["held_out"] < log[0]["held_out"] < math.log(3000)
    told = [Trajectory.from_dict(json.loads(line)) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert len(told) == 7 and sum(row["tokens"] for row in log) == sum(sum(trained(t)) for t in told[:6])  # each once
    assert "7 samples; left out: none" in (whole / "log.txt").read_text()
    saved, last, first = (load(p) for p in (whole / "model", whole / "ckpt-000003" / "model", model_dir))
    pairs = zip(saved.model.parameters(), last.model.parameters(), first.model.parameters(), strict=True)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)


def test_stop_kill_and_resume_bit_for_bit(flags, whole, tmp_path, monkeypatch):
    """FAULTS 31: Ctrl-C in step 1, resume; then as if killed in step 3, and among the samples before step 1."""
    words, update = [*flags, "--out", str(out := tmp_path / "run")], sft.update

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return update(*args)

    monkeypatch.setattr(sft, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sft.main(words)
    assert (out / "ckpt-000001").exists() and len(rows_of(out)) == 1 and not (out / "model").exists()
    monkeypatch.setattr(sft, "update", update)
    sft.main([*words, "--resume"])
    assert rows_of(out) == rows_of(whole) and weights(out) == weights(whole)
    shutil.rmtree(out / "ckpt-000003")
    sft.main([*words, "--resume"])
    assert rows_of(out) == rows_of(whole) and weights(out) == weights(whole)
    for path in out.glob("ckpt-*"):
        shutil.rmtree(path)
    text = (out / "samples.jsonl").read_text()
    (out / "samples.jsonl").write_text(text[: len(text) // 2])
    sft.main([*words, "--resume"])
    assert (out / "samples.jsonl").read_text() == text == (whole / "samples.jsonl").read_text()
    assert rows_of(out) == rows_of(whole) and weights(out) == weights(whole)


def test_two_processes_take_the_same_steps(flags, whole, tmp_path):
    """FAULTS 16: batches sharded over ranks, one number of tokens, sums before the clip."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "sft.py"]
    out, env = tmp_path / "run", os.environ | {"OMP_NUM_THREADS": "1"}
    words = [*command, *flags, "--out", out]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for got, want in zip(rows_of(out), rows_of(whole), strict=True):
        assert got == pytest.approx(want, rel=1e-3, abs=1e-5)
    assert (out / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_the_control_takes_the_same_steps_on_the_same_requests(flags, whole, tmp_path):
    sft.main([*flags, "--harness-mode", "fixed", "--out", str(out := tmp_path / "run")])
    told = [[json.loads(line) for line in (d / "samples.jsonl").read_text().splitlines()] for d in (whole, out)]
    assert [t["events"][0] for t in told[0]] == [t["events"][0] for t in told[1]]
    assert len({t["harness_commit"] for t in told[1]}) == 1 < len({t["harness_commit"] for t in told[0]})
    assert len(rows_of(out)) == len(rows_of(whole)) and rows_of(out) != rows_of(whole)


def test_logs_of_ones_own(flags, tmp_path):
    room = {"context": {"links": [{"link_id": 1, "name": "茶"}]}}
    row = {"request": "在吗", "room": room, "skills": ["small_talk"], "reply": "欢迎来到直播间哦。"}
    (path := tmp_path / "logs.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    sft.main([*flags, "--logs", str(path), "--samples", "2", "--out", str(tmp_path / "run")])
    told = (tmp_path / "run" / "samples.jsonl").read_text()
    assert told.count("欢迎来到直播间哦。") >= 6 and len(rows_of(tmp_path / "run")) == 1
    sft.main([*flags, "--logs", str(path), "--harness-mode", "fixed", "--out", str(out := tmp_path / "fixed")])
    assert len((out / "samples.jsonl").read_text().splitlines()) == 3 and len(rows_of(out)) == 1
    assert "2 dialogues, each once, and 1 held out" in (out / "log.txt").read_text()


def test_a_server_may_reword_the_harness(flags, tmp_path, monkeypatch):
    asked = []

    def endpoint(url, llm):
        asked.append((url, llm))
        return lambda text, what, dice: text + "嘞"

    monkeypatch.setattr(sft, "Endpoint", endpoint)
    words = ["--rewriter", "http://x/v1", "--llm", "m", "--augmented", "1", "--samples", "2"]
    sft.main([*flags, *words, "--out", str(out := tmp_path / "run")])
    assert asked == [("http://x/v1", "m")] and "嘞" in (out / "samples.jsonl").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "nowhere"], "nowhere: no such model directory"),
        (["--logs", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--logs", "x", "--endpoint", "y"], "--logs and --endpoint"),
        (["--context", "5000"], "--context 5000 is beyond the 4096 positions"),
        (["--harness-mode", "fix"], "'fix' is not one of hsa|fixed; did you mean fixed"),
        (["--leave-out", "tools"], "did you mean tool"),
        (["--faults", "0.1"], "--faults: '0.1' is not 3 values"),
        (["--epoch", "3"], "did you mean --epochs"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_directory(flags, tmp_path, words, message):
    with pytest.raises(BadInput, match=message):
        sft.main([*flags, "--out", str(tmp_path / "run"), *words])
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_good_sample_says_why(flags, tmp_path):
    with pytest.raises(BadInput, match="nothing to train: 7 samples; left out: context 7"):
        sft.main([*flags, "--context", "100", "--out", str(tmp_path / "run")])


def test_bench_sft(model_dir, capsys, monkeypatch):
    """The last line is one JSON object; without TRL the ratio is null and TRL is named."""
    spec = importlib.util.spec_from_file_location("bench_sft", ROOT / "bench" / "sft.py")
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_sft", bench)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    words = [
        "--model",
        str(model_dir),
        "--steps",
        "2",
        "--batch",
        "2",
        "--micro",
        "1",
        "--repeats",
        "1",
        "--threads",
        "1",
    ]
    bench.main(words)
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert figures["bench"] == "sft" and figures["ratio_vs_trl"] is None and figures["tokens_per_s"] > 0
    assert "TRL is not installed" in out
    with pytest.raises(BadInput, match="--batch 3 must be a multiple of --micro 2"):
        bench.main(["--batch", "3", "--micro", "2"])
