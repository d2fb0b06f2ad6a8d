"""Latency of whole requests: the engine's clock, the figures that are made of it, the bounds, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import common
from options import BadInput
import numpy as np
import pytest

import infer
import replay
from chat import Turn
from data.make_sets import lines_of, make_row
from harness import Harness
from infer import Engine
from model import load
from sim import World

ROOT = Path(__file__).parent.parent
REQUESTS = 4

pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Flags of a manifest and of four rows under a harness that lets a new policy babble 8 tokens a state."""
    place = tmp_path_factory.mktemp("replay")
    shutil.copytree(ROOT / "data" / "harness", place / "harness")
    settings = common.read_json(place / "harness" / "harness.json")
    settings["limits"]["max_state_tokens"] = 8
    common.write_json(place / "harness" / "harness.json", settings)
    harness, world = Harness.load(place / "harness"), World.load(ROOT / "data/world/zh.json", "test")
    rows = [make_row("T1", i, harness, world) for i in range(REQUESTS - 1)] + [make_row("T2", 0, harness, world)]
    common.write_text(place / "rows.jsonl", lines_of(rows))
    about = {"harness": str(place / "harness"), "harness_commit": harness.commit, "seed": 0, "sets": {}}
    common.write_json(place / "manifest.json", about | {"world": str(ROOT / "data/world/zh.json")})
    words = ["--manifest", str(place / "manifest.json"), "--device", "cpu", "--bandwidth", "10"]
    return place / "rows.jsonl", words


# ---------------------------------------------------------------------------------------------------------------------
# the clock


def test_the_engine_tells_when_each_rollout_began_spoke_and_ended(model_dir):
    """At most `slots` are in flight; the next one starts when one ends; who never samples has no first token."""

    def ask(n, new):
        yield Turn([5, 6, 7] * n, [], new)
        return n

    engine = Engine(load(model_dir), slots=2)
    engine.run([ask(n, 0 if n == 3 else 4) for n in range(1, 7)], list(range(6)))
    start, first, end = engine.times.T
    assert np.isnan(first).tolist() == [n == 3 for n in range(1, 7)]
    spoke = ~np.isnan(first)
    assert (start[spoke] < first[spoke]).all() and (first[spoke] <= end[spoke]).all() and (start < end).all()
    assert max(((start <= t) & (t < end)).sum() for t in start) == 2
    for t in start[2:]:
        assert 0 <= min(t - e for e in end if e <= t) < 0.05
    assert end.max() <= engine.stats["seconds"]


def test_percentiles_are_those_of_the_definition():
    """Rank (n - 1) p / 100 among the sorted, in proportion between two of them; NaN is left out."""
    values = np.random.default_rng(0).gamma(2.0, size=37)
    got = replay.percentiles(np.append(values, np.nan))
    for p in (50, 95, 99):
        below, part = divmod(36 * p / 100, 1)
        a, b = np.sort(values)[[int(below), min(int(below) + 1, 36)]]
        assert got[f"p{p}"] == pytest.approx(a + part * (b - a)) == pytest.approx(np.percentile(values, p))
    assert replay.percentiles(np.array([np.nan])) == {"p50": None, "p95": None, "p99": None}


# ---------------------------------------------------------------------------------------------------------------------
# bounds


def test_a_dense_step_reads_all_weights_once(headed_dir):
    policy = load(headed_dir)
    weights = sum(p.nbytes for p in policy.model.parameters())  # embedding and LM head are one tensor
    head, table = sum(p.nbytes for p in policy.mtp.parameters()), policy.model.get_input_embeddings().weight.nbytes
    assert replay.bound(policy, 1, 0, 1.0, 1e9) == {"bytes": weights, "tokens_per_s": 1e9 / weights}
    assert replay.bound(policy, 4, 0, 1.0, 1e9)["tokens_per_s"] == 4e9 / weights
    size = weights + 3 * (head + table)
    assert replay.bound(policy, 2, 3, 2.5, 1e9) == {"bytes": size, "tokens_per_s": 2 * 2.5 * 1e9 / size}


def test_a_step_of_experts_reads_those_that_are_chosen(qwen36_dir):
    """Two of eight for one token, all for very many; of an embedding table beside an LM head nothing."""
    policy = load(qwen36_dir)
    sizes = {name: p.nbytes for name, p in policy.model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    rest = sum(sizes.values()) - experts - policy.model.get_input_embeddings().weight.nbytes
    assert experts > 0 and rest > 0
    for tokens, share in ((1, 1 / 4), (2, 1 - 9 / 16), (1000, 1.0)):
        assert replay.bytes_read(policy.model, tokens, policy) == pytest.approx(rest + share * experts)
    head = {name: p.nbytes for name, p in policy.mtp.named_parameters()}
    once = sum(size / 4 if ".experts." in name else size for name, size in head.items())
    assert replay.bytes_read(policy.mtp, 1, policy) == pytest.approx(once)


# ---------------------------------------------------------------------------------------------------------------------
# whole runs


@pytest.mark.parametrize("kind", ["dense", "qwen36"])
def test_a_replay_with_and_without_drafts(kind, headed_dir, qwen36_dir, files, tmp_path, capsys):
    """The same answers, twice the rows; every figure is that of the requests in the file."""
    rows, words = files
    model = {"dense": headed_dir, "qwen36": qwen36_dir}[kind]
    words = ["replay", "--model", str(model), "--set", str(rows), *words, "--concurrency", "1,3", "--drafts", "2"]
    infer.main([*words, "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert f"{REQUESTS} requests of" in out and "P50" in out and "bound" in out
    assert out.count(f"{REQUESTS} of {REQUESTS} requests the same as without drafts") == 2
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["replay.json", "replay.png"]
    assert (tmp_path / "out" / "replay.png").read_bytes().startswith(b"\x89PNG")
    result = common.read_json(tmp_path / "out" / "replay.json")
    assert [(r["concurrency"], r["drafts"]) for r in result["results"]] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert result["bandwidth"] == 1e10 and len(result["requests"]) == REQUESTS
    for i, r in enumerate(result["results"]):
        mine = [rows[i] for rows in result["requests"].values()]
        latency = np.array([row["end"] - row["start"] for row in mine])
        first = np.array([row["first"] - row["start"] for row in mine])
        assert list(r["latency_s"].values()) == pytest.approx(np.percentile(latency, [50, 95, 99]))
        assert list(r["first_token_s"].values()) == pytest.approx(np.percentile(first, [50, 95, 99]))
        assert r["within"] == {str(x): (latency <= x).mean() for x in (3.4, 8.1, 15.0)}
        tokens = sum(row["tokens"] for row in mine)
        assert r["sampled"] == tokens > REQUESTS and sum(r["ends"].values()) == REQUESTS
        assert r["decode_tokens_per_s"] == pytest.approx((tokens - REQUESTS) / (latency - first).sum())
        assert r["tokens_per_s"] == pytest.approx(tokens / r["seconds"]) and r["bound"]["tokens_per_s"] > 0
        if r["drafts"]:
            times, right = sum(r["accepted"]), sum(n * count for n, count in enumerate(r["accepted"]))
            assert 1 <= r["accepted_length"] <= 1 + right / times and r["acceptance"] == r["accepted_length"] / 3
            assert len(r["accepted"]) == 3 and 0 <= r["draft_acceptance"] <= 1
        else:
            assert r["accepted"] is r["accepted_length"] is r["draft_acceptance"] is None


def test_a_policy_without_a_head_has_rows_without_drafts_only(model_dir, files, tmp_path, capsys):
    rows, words = files
    words = ["--model", str(model_dir), "--set", str(rows), "--out", str(tmp_path / "out"), *words]
    infer.main(["replay", *words, "--concurrency", "2", "--limit", "2"])
    assert capsys.readouterr().out.count("no MTP head") == 1
    [r] = common.read_json(tmp_path / "out" / "replay.json")["results"]
    assert (r["concurrency"], r["drafts"], r["requests"]) == (2, 0, 2)


# ---------------------------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "rows.jsonl:2: not a row of T1, T2 or T3"),
        ("[1]", "rows.jsonl:2: not a row of T1, T2 or T3"),
        ('{"id": "T1/0", "set": "T1", "seed": 3}', "rows.jsonl:2: not a row of T1, T2 or T3"),
        ('{"id": "T4/0", "set": "T4", "prompt": "x", "seed": 3, "harness": null}', "rows.jsonl:2: not a row of T1"),
        (dict(commit="0" * 12), "rows.jsonl:2: T1/1: made of another harness, world or code"),
        (dict(danmaku=["有券吗"]), "rows.jsonl:2: T1/1: made of another harness, world or code"),
    ],
)
def test_bad_lines_are_named(files, tmp_path, line, message):
    rows, words = files
    lines = rows.read_text(encoding="utf-8").splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | line) if isinstance(line, dict) else line
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        infer.main(["replay", "--model", "none", "--set", str(tmp_path / "rows.jsonl"), *words])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--concurrency", "9"], "--concurrency 9: there are 4 requests"),
        (["--concurrency", "0"], "--concurrency: 0 is not within"),
        (["--concurrency", ""], "--concurrency: give some"),
        (["--context", "20", "--concurrency", "1"], "--context 20: a prompt of"),
        (["--set", "T4"], "--set T4: has no harness"),
        (["--set", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--set", os.devnull], "no requests in it"),
        (["--manifest", "none.json"], "none.json: no such file"),
        (["--drafts", "0"], "--drafts: 0 is not within"),
    ],
)
def test_bad_options_leave_nothing(model_dir, files, tmp_path, words, message):
    rows, flags = files
    flags = ["--model", str(model_dir), "--set", str(rows), *flags, "--out", str(tmp_path / "out"), *words]
    with pytest.raises(BadInput, match=message):
        infer.main(["replay", *flags])
    assert not list(tmp_path.iterdir())


def test_infer_has_help(capsys):
    infer.main(["--help"])
    assert "python infer.py replay" in capsys.readouterr().out


def test_infer_takes_one_command():
    for words in ([], ["serve"]):
        with pytest.raises(BadInput, match="infer.py takes a command: replay"):
            infer.main(words)
