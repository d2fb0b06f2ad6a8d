"""Evaluation: intervals by hand, whole tiny runs, comparisons and curves."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import common
import numpy as np
import torch
from tokenizers import Tokenizer

import eval as ev  # the room's name is that of a built-in function
from chat import REPLY, TOOL, Codec, Message, Trajectory
from options import BadInput
from data import make_sets
from data.make_sets import SETS, Sets
from facts import REWARDS
from browse import main as browse
from test_chat import teach

ROOT = Path(__file__).parent.parent
TOKENS = Codec(Tokenizer.from_file(str(ROOT / "data" / "base-small" / "tokenizer.json")))
AGENT = SETS[:4]
pytestmark = pytest.mark.usefixtures("at_the_root")


def pairs(*values):
    return np.array(values, dtype=float)


# ---------------------------------------------------------------------------------------------------------------------
# scores and intervals


ITEMS = [
    {"accuracy": 1.0, "effectiveness": 0.5, "stop": "reply"},
    {"stop": "error"},
    {"accuracy": 0.0, "effectiveness": 0.0, "stop": "fallback"},
]
ANSWERS = [
    {"strict/0": 1.0, "loose/0": 1.0, "strict/1": 0.0, "loose/1": 1.0},
    {"stop": "error"},
    {"strict/0": 1.0, "loose/0": 1.0},
]


def test_points_by_hand():
    assert ev.points(ITEMS, "T1").tolist() == [[75, 1], [0, 0], [0, 1]]
    assert ev.points(ANSWERS, "T4-P").tolist() == [[0, 1], [0, 0], [100, 1]]
    assert ev.points(ANSWERS, "T4-I").tolist() == [[100, 2], [0, 0], [100, 1]]
    assert ev.points([], "T2").shape == (0, 2)


def test_interval_leaves_out_what_was_not_scored():
    """FAULTS 22: no zero for an item that died; a share of instructions is one of all instructions."""
    assert ev.interval(ev.points(ITEMS, "T1")) == {"mean": 37.5, "low": 0.0, "high": 75.0, "items": 2}
    assert ev.interval(ev.points(ANSWERS, "T4-I"))["mean"] == pytest.approx(100 * 2 / 3, abs=1e-3)
    assert ev.interval(ev.points([{"stop": "error"}], "T1")) is None and ev.interval(ev.points([], "T1")) is None
    whole = ev.interval(pairs(*[[100, 1]] * 30, *[[0, 1]] * 70))
    assert ev.interval(pairs(*[[100, 1]] * 30, *[[0, 1]] * 70, *[[0, 0]] * 50)) == whole


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_interval_is_that_of_a_binomial(share):
    n = 400
    of = pairs(*[[100, 1]] * int(n * share), *[[0, 1]] * (n - int(n * share)))
    got, half = ev.interval(of), 196 * math.sqrt(share * (1 - share) / n)
    assert got["mean"] == 100 * share and got["items"] == n
    assert got["low"] == pytest.approx(100 * share - half, abs=0.6)
    assert got["high"] == pytest.approx(100 * share + half, abs=0.6)
    assert ev.interval(of) == got
    assert ev.interval(np.random.default_rng(1).permutation(of))["low"] == pytest.approx(got["low"], abs=0.6)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    scores = rng.choice([0, 25, 50, 75, 100], p=[0.3, 0.1, 0.1, 0.1, 0.4], size=(400, 120))
    found = [ev.interval(np.stack([row, np.ones(120)], 1)) for row in scores.astype(float)]
    truth = 100 * (0.025 + 0.05 + 0.075 + 0.4)
    assert 0.91 < np.mean([x["low"] <= truth <= x["high"] for x in found]) < 0.98


def test_items_that_are_all_alike_do_not_make_a_certainty():
    """A bootstrap of equal values has no width; three of three right is no proof."""
    assert ev.interval(pairs(*[[100, 1]] * 500)) == {"mean": 100, "low": 99.4, "high": 100, "items": 500}
    assert ev.interval(pairs([0, 1])) == {"mean": 0, "low": 0, "high": 100, "items": 1}
    same = pairs(*[[75, 1]] * 60)
    assert ev.interval(same, same) == {"mean": 0, "low": -5, "high": 5, "items": 60}


def test_a_paired_difference_cancels_what_is_hard_for_both():
    rng = np.random.default_rng(3)
    first = np.stack([100.0 * (rng.random(300) < 0.5), np.ones(300)], 1)
    second = first.copy()
    second[:12, 0] = 100 - second[:12, 0]
    better = first.copy()
    better[np.flatnonzero(better[:, 0] == 0)[:15], 0] = 100
    got, alone = ev.interval(better, first), ev.interval(first)
    assert got["mean"] == 5 and 0 < got["low"] < 5 < got["high"]
    assert got["high"] - got["low"] < 0.6 * (alone["high"] - alone["low"])
    back = ev.interval(first, better)
    assert (back["mean"], back["low"], back["high"]) == (-got["mean"], -got["high"], -got["low"])
    mixed = ev.interval(second, first)
    assert mixed["low"] < 0 < mixed["high"]
    first[0], better[1] = 0, 0  # each lacks another item: what one lacks counts in none
    assert ev.interval(better, first)["items"] == 298


def test_a_wide_interval_is_said_to_be_wide():
    few, many = ({"mean": 51.25, "low": low, "high": high, "items": 9} for low, high in ((40, 60.1), (46.2, 56.2)))
    assert ev.shown(few, count=True) == "51.2 [40.0, 60.1]* of 9" and ev.shown(many, "+") == "+51.2 [+46.2, +56.2]"
    assert ev.shown(None) == "-"
    assert "cannot tell" in ev.warning(ev.shown(few))[0] and not ev.warning(ev.shown(many))


def test_measure_and_summary_by_hand():
    state, segment, think = [-1, 0, 0, 0, -1, 1, 1], [0, TOOL, TOOL, TOOL, 0, REPLY, REPLY], [0, 1, 1, 0, 0, 1, 0]
    fault = [{"event": "tool_result", "tool": "get_coupon", "text": '{"error": "timeout"}', "call_id": "0"}]
    t = Trajectory([1] * 7, [int(s >= 0) for s in state], [0.0] * 7, segment, think, state, fault, stop_reason="reply")
    t.rewards = {"accuracy": 1.0, "effectiveness": 0.5, "tool": None, "skill": 1.0}
    row = ev.measure(t)
    assert row["tokens"] == 5 and row["fault"] and math.isnan(row["reward/tool"])
    assert [row[f"{what}/{s}"] for what in ("states", "think") for s in ("tool", "reply")] == [1, 1, 2, 1]
    dead = ev.measure(Trajectory(stop_reason="error", rewards=dict.fromkeys(REWARDS)))
    batch = ev.gather([row, dead], [1, 0], 2, common.ALONE)
    items = ev.items_of(batch)
    assert items[0] == {"stop": "error", "tokens": 0, "fault": 0} | dict.fromkeys(
        ("states/tool", "think/tool", "states/reply", "think/reply"), 0
    )
    assert items[1]["accuracy"] == 1 and "tool" not in items[1] and items[1]["stop"] == "reply"
    got = ev.summary(batch)
    assert got["score"] == 75 and got["fault_recovery"] == 1 and math.isnan(got["tool"])
    assert (got["think/tool"], got["think/reply"], got["stop/error"], got["stop/reply"]) == (2, 1, 1, 1)


# ---------------------------------------------------------------------------------------------------------------------
# whole runs


@pytest.fixture(scope="module")
def place(model_dir, tmp_path_factory):
    """A harness that lets a new policy babble twelve tokens, and the manifest of its own sets."""
    place = tmp_path_factory.mktemp("sets")
    shutil.copytree(ROOT / "data" / "harness", place / "harness")
    settings = common.read_json(place / "harness" / "harness.json")
    settings["limits"]["max_state_tokens"] = 12
    common.write_json(place / "harness" / "harness.json", settings)
    cfg = make_sets.Config(harness=str(place / "harness"), items=5, out=str(place / "own.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        make_sets.make(cfg)
    shutil.copytree(model_dir, place / "model")
    return place


def flags(place, *more):
    words = ["--config", "tiny", "--device", "cpu", "--model", str(place / "model"), "--reply-tokens", "12"]
    return [*words, "--manifest", str(place / "own.json"), *map(str, more)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Sets are made into a directory of the tests."""
    rows = Sets.rows
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr(Sets, "rows", lambda self, name, where=cache: rows(self, name, where))


def stored_rollouts(path):
    return [Trajectory.from_dict(json.loads(line)) for line in path.read_text().splitlines()]


def teacher(style):
    """What stands for harness.run: the oracle's whole rollout in one turn of the engine's."""

    def run(h, danmaku, room, codec, seed=0):
        return teach(h, room.task, codec, room.seed, room.faults, **style)
        yield

    return run


@pytest.fixture
def result(place, tmp_path, monkeypatch):
    """result(name, style) -> path: the evaluation of an oracle of that style."""

    def make(name, *words, **style):
        monkeypatch.setattr(ev, "run", teacher(style))
        ev.main(flags(place, "--out", tmp_path / name, *words))
        return tmp_path / name

    return make


def test_a_run_leaves_its_result_twice_the_same(place, tmp_path, capsys):
    """FAULTS 30. The babble of a new policy, sampled: cut by length everywhere, on T4 scored as it stands."""
    words = ("--trajectories", tmp_path / "t.jsonl", "--temperature", "1")
    for _ in range(2):
        ev.main(flags(place, *words))
        (place / "model" / "eval.json").rename(tmp_path / f"{len(list(tmp_path.iterdir()))}.json")
    one, two = sorted(tmp_path.glob("*.json"))
    assert one.read_text() == two.read_text()
    r = common.read_json(one)
    manifest = common.read_json(place / "own.json")
    assert r["harness_commit"] == manifest["harness_commit"] and r["config"]["temperature"] == 1 and r["seed"] == 0
    assert {n: x["sha256"] for n, x in r["sets"].items()} == {n: x["sha256"] for n, x in manifest["sets"].items()}
    assert list(r["scores"]) == list(ev.COLUMNS) and r["code_version"] == common.code_version()
    assert len(r["items"]) == 25 and r["items"]["T1/3"]["stop"] == "length" and r["items"]["T1/3"]["tokens"] == 12
    assert r["scores"]["T1"] == {"mean": 0, "low": 0, "high": 60, "items": 5}
    kept = stored_rollouts(tmp_path / "t.jsonl")
    assert [t.events[0]["id"] for t in kept] == list(r["items"])
    assert [sum(t.mask) for t in kept] == [item["tokens"] for item in r["items"].values()]
    out = capsys.readouterr().out
    assert "T3-prompt" in out and "0.0 [0.0, 60.0]*" in out and "cannot tell" in out
    assert "5 of 5 answers of T4 were cut: more --reply-tokens" in out
    browse(["trace", str(tmp_path / "t.jsonl"), "--count", "25"])
    assert capsys.readouterr().out.count("[length]") == 25
    ev.main(flags(place, *words, "--seed", "1", "--sets", "T1,T4", "--out", tmp_path / "seed.json"))
    others = {t.events[0]["id"]: t.ids for t in stored_rollouts(tmp_path / "t.jsonl")}
    assert len(others) == 10 and not [t for t in kept if others.get(t.events[0]["id"]) == t.ids]


def test_a_right_policy_gets_all_points_and_a_careless_one_fewer(place, result, capsys):
    best = ev.load_result(str(result("best.json", "--sets", "T3-prompt,T1,T2,T3-tool")))
    assert list(best["sets"]) == list(AGENT) and best["gap"] == {"mean": 0, "low": -60, "high": 60, "items": 5}
    for name in AGENT:
        assert best["scores"][name] == {"mean": 100, "low": 40, "high": 100, "items": 5}
        table = best["details"][name]
        assert table["accuracy"] == table["effectiveness"] == table["tool"] == 1 and table["stop/reply"] == 5
        assert sum(x["items"] for x in table["intents"].values()) == 5
        for change in table["changes"].values():
            assert sum(side["items"] for side in change.values() if side) == 5
    assert set(best["details"]["T2"]["changes"]) <= {"skill_id", "skill_content", "tool", "prompt", "hook"}
    worse = result("worse.json", "--sets", "T1,T2", careless=1.0)
    capsys.readouterr()
    ev.main(["compare", str(result("best.json", "--sets", "T1,T2,T4")), str(worse)])
    out = capsys.readouterr().out.split("minus")[1]
    assert re.search(r"worse.json +-\d+\.\d \[-\d+\.\d, [+-]\d+\.\d\]\* +-\d+", out)


def test_follow_scores_each_instruction(place, tmp_path, monkeypatch, capsys):
    """FAULTS 50, 51: official prompts are read as the official code reads them, ours as bilingual readers do."""
    said = "我喜欢苹果，也喜欢梨。"

    def spoken(messages, codec, limit, seed=0):
        if "die" in messages[-1]["content"]:
            return Trajectory(stop_reason="error", seed=seed)
        return Trajectory([5], [1], [0.0], [REPLY], [0], [0], reply=said, stop_reason="reply", seed=seed)
        yield

    monkeypatch.setattr(ev, "answer", spoken)
    official = [
        (["punctuation:no_comma", "keywords:existence"], [{}, {"keywords": ["葡萄"]}], "a"),
        (["punctuation:no_comma"], [{}], "b"),
        (["punctuation:no_comma"], [{}], "die"),
    ]
    lines = [dict(key=i, prompt=p, instruction_id_list=ids, kwargs=kw) for i, (ids, kw, p) in enumerate(official)]
    (tmp_path / "o.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ev.main(flags(place, "--sets", "T4", "--t4", tmp_path / "o.jsonl", "--out", tmp_path / "o.json"))
    r = common.read_json(tmp_path / "o.json")
    assert r["scores"]["T4-P"]["mean"] == 50 and r["scores"]["T4-I"]["mean"] == pytest.approx(66.6667)
    assert r["details"]["T4"]["types"]["punctuation:no_comma"] == {"count": 2, "strict": 100, "loose": 100}
    assert r["details"]["T4"]["stop/error"] == 1 and "1 items of T4 died" in (out := capsys.readouterr().out)
    assert "were cut" not in out
    rows = [{**line, "id": f"T4/{line['key']}", "key": line["key"]} for line in lines]
    engine = ev.Engine(ev.load(place / "model"))
    batch, _ = ev.follow(engine, rows, ev.BILINGUAL, 12)
    assert ev.interval(ev.points(ev.items_of(batch), "T4-I"))["mean"] == 0  # ， is a comma, and there is no 葡萄


def test_answer_is_a_loop_like_any_other(model_dir):
    loop = ev.answer([{"role": "user", "content": "你好"}], TOKENS, 9, 4)
    turn = next(loop)
    assert turn.max_new_tokens == 9 and turn.ids == TOKENS.prompt([{"role": "user", "content": "你好"}])
    said = TOKENS.render(Message("想一想", "你好呀"))
    with pytest.raises(StopIteration) as end:
        loop.send(ev.Sample(said, [0.0] * len(said), "stop"))
    t = end.value.value
    assert (t.reply, t.stop_reason, t.seed) == ("你好呀", "reply", 4) and 0 < sum(t.think) < len(said)
    assert t.ids == turn.ids + said and [e["event"] for e in t.events] == ["input", "state", "reply"]


class Shard(common.Dist):
    """One of two ranks; what they would sum is summed by the test."""

    def all_reduce_sum(self, tensor):
        return tensor


def test_two_ranks_share_the_items(place):
    sets, engine = Sets.load(place / "own.json"), ev.Engine(ev.load(place / "model"), slots=8)
    runs = {
        "T2": lambda ranks: ev.evaluate(engine, sets.rows("T2"), sets.original, sets.world, ranks),
        "T4": lambda ranks: ev.follow(engine, sets.rows("T4"), ev.BILINGUAL, 12, ranks),
    }
    for go in runs.values():
        whole, kept = go(common.ALONE)
        parts = [go(Shard(rank, 2)) for rank in range(2)]
        assert [len(part[1]) for part in parts] == [3, 2] and len(kept) == 5
        for key, column in whole.items():
            torch.testing.assert_close(parts[0][0][key] + parts[1][0][key], column, equal_nan=True)
        assert [t.ids for t in parts[1][1]] == [t.ids for t in kept[1::2]]


def test_torchrun_gives_the_result_of_one_process(place, tmp_path):
    words = flags(place, "--sets", "T2,T4", "--limit", "3", "--trajectories", tmp_path / "t.jsonl")
    ev.main([*words, "--out", str(tmp_path / "one.json")])
    (tmp_path / "t.jsonl").unlink()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(ROOT / "eval.py"), *words, "--out", str(tmp_path / "two.json")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (common.read_json(tmp_path / f"{n}.json") for n in ("one", "two"))
    assert {k: v for k, v in one.items() if k != "config"} == {k: v for k, v in two.items() if k != "config"}
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("t.jsonl", "t-1.jsonl")] == [4, 2]
    assert done.stdout.count("95% bootstrap") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["--sets", "T1,T5"], "--sets: 'T5' is not one of T1, T2"),
        (["--sets", ","], "--sets: give some of T1"),
        (["--context", "200"], r"--context 200: a prompt of T1 has \d+ tokens"),
        (["--sets", "T4", "--context", "20"], r"--context 20: a prompt of T4 has \d+ tokens"),
        (["--model", "nowhere"], "nowhere: no such directory to write eval.json into; --out FILE"),
        (["--model", "nowhere", "--out", "x.json"], "nowhere: no such model directory"),
        (["--manifest", "nowhere.json"], "nowhere.json: no such file"),
        (["--limits", "3"], "did you mean --limit"),
        (["--t4", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--out", str(ROOT / "data")], "--out .*data: is a directory; give the file to write"),
        (["--trajectories", str(ROOT / "data")], "--trajectories .*data: is a directory"),
    ],
)
def test_bad_input_is_one_line(place, words, message):
    with pytest.raises(BadInput, match=message):
        ev.main([*flags(place), *words])
    assert not (place / "model" / "eval.json").exists()


def test_commands_have_help(capsys):
    for words in (["compare", "--help"], ["plot", "-h"], ["compare", "run", "--help"]):
        ev.main(words)
        assert "python eval.py compare" in capsys.readouterr().out


def test_commands(tmp_path):
    for words, message in (
        (["comapre"], "but no 'comapre'"),
        (["compare"], "compare takes runs: python eval.py compare RUN"),
        (["plot", "a", "b"], "plot takes a run"),
        (["compare", str(tmp_path)], "no eval.json there"),
        (["plot", str(tmp_path)], "metrics.jsonl: no such file"),
    ):
        with pytest.raises(BadInput, match=message):
            ev.main(words)
    (tmp_path / "eval.json").write_text("[1]")
    with pytest.raises(BadInput, match="eval.json: not a result of eval.py"):
        ev.main(["compare", str(tmp_path)])


# ---------------------------------------------------------------------------------------------------------------------
# compare and plot


def stored(path, right, n=40, name="T1", **changes):
    """A result in a file: the first `right` of n items of a set are right."""
    items = [{"accuracy": float(i < right), "effectiveness": float(i < right), "stop": "reply"} for i in range(n)]
    r = {"model": "m", "code_version": "abc", "config": {"temperature": 0.0, "out": str(path)}, "details": {}}
    r |= {"sets": {name: {"items": n, "sha256": "f" * 64}}, "scores": {name: ev.interval(ev.points(items, name))}}
    r |= {"items": {f"{name}/{i}": item for i, item in enumerate(items)}} | changes
    path.parent.mkdir(parents=True, exist_ok=True)
    ev.save_result(path, r)
    return r


def test_save_and_load_a_result(tmp_path):
    r = stored(tmp_path / "run" / "model" / "eval.json", 20)
    for place in ("run", "run/model", "run/model/eval.json"):
        assert ev.load_result(str(tmp_path / place)) == r
    lines = (tmp_path / "run/model/eval.json").read_text().splitlines()
    assert sum(line.startswith('  "T1/') for line in lines) == 40


def test_compare_side_by_side(tmp_path):
    stored(tmp_path / "a" / "eval.json", 20)
    stored(tmp_path / "b" / "eval.json", 30, config={"temperature": 0.5}, code_version="def")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    text = ev.compare([a, b, a])
    want = ev.interval(*(ev.points(ev.load_result(p)["items"].values(), "T1") for p in (b, a)))
    assert want["mean"] == 25 and f"{ev.shown(want, '+')}" in text and f"minus {a}" in text
    assert "they differ in temperature: 0.0 | 0.5" in text and "different code: abc, def" in text
    assert "minus" not in ev.compare([a])


def test_compare_refuses_different_sets(tmp_path):
    stored(tmp_path / "a.json", 20)
    stored(tmp_path / "b.json", 20, sets={"T1": {"items": 40, "sha256": "0" * 64}})
    stored(tmp_path / "c.json", 20, n=30)
    stored(tmp_path / "d.json", 20, name="T2")
    for other, message in (
        ("b", "f{12}; 40 items, 0|0{12}; 40 items, f"),
        ("c", "30 items"),
        ("d", "no set in common"),
    ):
        with pytest.raises(BadInput, match=message):
            ev.compare([str(tmp_path / f"{x}.json") for x in ("a", other)])


def test_plot_draws_every_curve(tmp_path, monkeypatch):
    drawn = []
    rows = [
        {"step": 0, "eval/score": 50.0, "eval/accuracy": 0.5},
        {
            "step": 1,
            "score": 40.0,
            "accuracy": 0.4,
            "think/tool": 30.0,
            "think/reply": 20.0,
            "clip/tool": 0.1,
            "entropy": 0.2,
        },
        {
            "step": 2,
            "score": 45.0,
            "accuracy": None,
            "think/tool": 25.0,
            "think/reply": 10.0,
            "clip/tool": 0.0,
            "note": "x",
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "sco')
    from matplotlib.axes import Axes

    draw = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *w, **k: drawn.append((k["label"], *w)) or draw(self, *w, **k))
    path = ev.plot(tmp_path, ev.REWARDS)
    assert path.read_bytes().startswith(b"\x89PNG") and sorted(p.name for p in tmp_path.iterdir()) == [
        "curves.png",
        "metrics.jsonl",
    ]
    curves = {label: (tuple(x), tuple(y)) for label, x, y, _ in drawn}
    assert (
        curves["score"] == ((1, 2), (40, 45))
        and curves["accuracy"] == ((1,), (0.4,))
        and curves["eval/score"] == ((0,), (50,))
    )
    assert curves.keys() == {k for row in rows for k in row} - {"step", "note"}
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(BadInput, match="metrics.jsonl:1: not a row of metrics"):
        ev.plot(tmp_path, ev.REWARDS)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(BadInput, match="no row of metrics"):
        ev.plot(tmp_path, ev.REWARDS)
