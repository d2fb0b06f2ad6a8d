"""Whole runs of rl.py on a tiny new policy: first ratio, log, files, kill and resume, two processes, refusals.

A new policy babbles until it is cut, and would be dropped for it; `child` scores babble as if it were an agent's, so
that there is something to learn. The tests start this file as a script too: python tests/test_rl_run.py RL_FLAGS.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common
from options import BadInput

import pytest
import torch
from safetensors.torch import load_file

import eval as evaluation
import rl
from chat import REPLY, TOOL, Sample, Turn
from model import MTP, load
from mtp import read_rollouts
from test_chat import teach

SEEDED = (
    "score",
    *rl.REWARDS,
    "think/tool",
    "loss",
    "entropy",
    "grad_norm",
    "clip/reply",
    "dropped",
    "first_ratio_off",
)


def fake_score(harness, task, t):
    """Rewards of babble by its ids. Its first half counts as a tool call whose first tokens are reasoning."""
    where = [i for i, sampled in enumerate(t.mask) if sampled]
    half = where[: len(where) // 2]
    for i in half:
        t.segment[i], t.state[i] = TOOL, 0
    for i in where[len(half) :]:
        t.segment[i], t.state[i] = REPLY, 1
    for i in half[: 1 + t.ids[where[0]] % len(half)]:
        t.think[i] = 1
    t.stop_reason = "reply"
    even = [t.ids[i] % 2 == 0 for i in where]
    tool = None if task.seed % 7 == 0 else float(even[0])
    return {"accuracy": float(even[1]), "effectiveness": sum(even) / len(even), "tool": tool, "skill": 1.0}


class Engine(rl.Engine):
    """Every ninth id ends a state, so that rollouts differ in length."""

    def __init__(self, policy, *words, **options):
        super().__init__(policy, *words, **options)
        self.stop_ids |= {*range(0, self.vocab, 9)}


def babble(patch):
    patch.setattr(evaluation, "score", fake_score)
    patch.setattr(rl, "Engine", Engine)


def child(argv):
    """rl.py on babble; with --fail rank 1 breaks in its second step."""
    babble(pytest.MonkeyPatch())
    if "--fail" in argv:
        argv.remove("--fail")
        update = rl.update

        def failing(*words):
            if os.environ["RANK"] == "1":
                print("failing at", time.time(), flush=True)
                raise RuntimeError("rank 1 has had enough")
            return update(*words)

        rl.update = failing
    rl.main(argv)


@pytest.fixture(scope="module")
def flags(model_dir, tmp_path_factory):
    """Flags of a tiny run: a new two-layer policy, a harness that lets it babble 12 tokens, a rate that stays."""
    place = tmp_path_factory.mktemp("rl")
    shutil.copytree(ROOT / "data" / "harness", place / "harness")
    settings = common.read_json(place / "harness" / "harness.json")
    settings["limits"]["max_state_tokens"] = 12
    common.write_json(place / "harness" / "harness.json", settings)
    where = {"model": model_dir, "harness": place / "harness", "world": ROOT / "data" / "world" / "zh.json"}
    words = ["--config", "tiny", "--device", "cpu", "--lr-end", "1"]
    return [*words, *(word for k, v in where.items() for word in (f"--{k}", str(v)))]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The directory of a run of four steps that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        babble(patch)
        rl.main([*flags, "--steps", "4", "--out", str(out)])
    return out


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def seeded(out):
    """What of the rows depends on the seed alone; -1 for what there was nothing to count for."""
    kept = [{k: v for k, v in row.items() if k in SEEDED or k.startswith("eval/")} for row in rows(out)]
    return [{k: -1.0 if v is None else v for k, v in row.items()} for row in kept]


def start(*words, launcher=()):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, __file__, *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)


def test_first_ratio_is_one(whole):
    """FAULTS 11: engine and trainer agree on the log-probs of the first minibatch, at each step of the run."""
    trained = [row for row in rows(whole) if row.get("updates")]
    assert len(trained) == 4 and all(row["first_ratio_off"] < 1e-4 for row in trained)
    assert all(row["grad_norm"] > 0 for row in trained)


@pytest.fixture
def dense(model_dir):
    return load(model_dir)


@pytest.fixture(params=["dense", "qwen36"])
def policy(request, model_dir, qwen36_dir):
    return load({"dense": model_dir, "qwen36": qwen36_dir}[request.param])


ADVANTAGES = torch.tensor([[1, -1], [0.5, 2], [0, 0], [-1, 0], [0, 1]], dtype=torch.float64)


def gradient(policy, advantages=ADVANTAGES, minibatch=(0,) * 5, reference=None, drafter=None, prompt=0, **options):
    """Log of an update on babble of five lengths, and its gradients summed over the minibatches; no weight moves.

    prompt: tokens that all of them have in common, before what is their own.
    """
    trajectories = []
    for i, n in enumerate((3, 140, 40, 7, 9)):
        ids, given = [7 * j % 250 for j in range(prompt)], prompt + 4
        ids += [(17 * i + 5 * j) % 250 for j in range(n + 4)]
        half, mask = n // 2, [0] * given + [1] * n
        segment = [0] * given + [TOOL] * half + [REPLY] * (n - half)
        logps, state = [-7.8 * m for m in mask], [-1] * given + [0] * half + [1] * (n - half)
        trajectories.append(rl.Trajectory(ids, mask, logps, segment, [0] * len(ids), state))
    options = dict(minibatches=1, micro=5, grad_clip=0, clip_tool=(0.9, 9), clip_reply=(0.9, 9)) | options
    optimizer = torch.optim.SGD(policy.model.parameters(), 0.0)
    optimizer.zero_grad = lambda: None
    policy.model.zero_grad()
    cfg = rl.Config(**options)
    actors = rl.Actors(policy, optimizer, reference, drafter)
    log = rl.update(actors, trajectories, advantages, minibatch, cfg, common.ALONE)
    return log, [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.model.parameters()]


def test_update_does_not_depend_on_micro_batches(policy):
    """FAULTS 8, 14, 16: other micro-batches mean other padding and other partial sums, and the same step."""
    log, whole = gradient(policy)
    for micro in (1, 2):
        other, parts = gradient(policy, micro=micro)
        assert other == pytest.approx(log, rel=1e-4, abs=1e-6)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"truncate": 2.0}, {"ratio": "sequence"}])
def test_a_prompt_that_a_group_shares_is_read_once(dense, options, monkeypatch):
    """The same step as if each of its members had read it, in half of the tokens."""
    read, forward = [], dense.model.base_model.forward
    monkeypatch.setattr(dense.model.base_model, "forward", lambda **k: read.append(k["input_ids"]) or forward(**k))
    log, whole = gradient(dense, prompt=400, **options)
    tokens = sum(ids.numel() for ids in read)
    assert read[0].shape == (1, 384)
    read.clear()
    monkeypatch.setattr(rl, "shared_prefix", lambda *_: 0)
    other, each = gradient(dense, prompt=400, **options)
    assert 2 * tokens < sum(ids.numel() for ids in read)
    assert other == pytest.approx(log, rel=1e-4, abs=1e-6)
    for a, b in zip(whole, each, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_micro_batches_are_of_one_group_where_that_shares_a_prompt(dense, qwen36_dir):
    """Elsewhere, with recurrent layers or harnesses of their own, like lengths stand together."""

    def made(policy, prompts, **options):
        rows = [[p] * 40 + [8 + i] * n for i, (p, n) in enumerate(zip(prompts, (9, 70, 20, 60)))]
        told = [rl.Trajectory(r, [0] * 40 + [1] * (len(r) - 40), *([0.0] * len(r) for _ in range(4))) for r in rows]
        cfg = rl.Config(group_size=2, micro=3, **options)
        return [(m[0], m[5], m[1].shape[1]) for m in rl.micro_batches(policy, told, [0, 1, 2, 3], cfg, common.ALONE)]

    alike, apart = [([0, 1], 32, 128), ([2, 3], 32, 128)], [([0, 2, 3], 0, 128), ([1], 0, 128)]
    assert made(dense, (1, 1, 2, 2)) == alike and made(dense, (1, 2, 1, 2)) == apart
    assert made(load(qwen36_dir), (1, 1, 2, 2)) == apart
    assert made(dense, (1, 1, 2, 2), shard=True) == apart


@pytest.mark.parametrize("minibatch, updates", [([0, 0, 0, 0, 1], 2), ([1, 0, 0, 1, 1], 2), ([1] * 5, 1)])
def test_a_vote_weighs_the_same_in_whichever_minibatch_it_falls(policy, minibatch, updates):
    """FAULTS 8: uneven and empty minibatches; their gradients add up to twice that of the whole."""
    log, whole = gradient(policy)
    other, parts = gradient(policy, minibatch=minibatch, minibatches=2)
    assert other["updates"] == updates and other["loss"] == pytest.approx(log["loss"], rel=1e-4)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(2 * a, b, rtol=1e-3, atol=1e-5)


def test_trajectories_without_any_advantage_are_dropped(dense):
    """They have no vote and no token in the update; a batch of nothing else takes no optimizer step."""
    some = torch.zeros(5, 2, dtype=torch.float64)
    log, moved = gradient(dense, some)
    assert log["updates"] == 0 and all(m.abs().max() == 0 for m in moved)
    held = gradient(dense, some, reference=load(dense.path), kl=1.0)
    assert held[0]["updates"] == 1 and max(m.abs().max() for m in held[1]) == 0  # all are held to what they still are
    some[3, 1] = 1.0
    log, moved = gradient(dense, some)
    assert log["updates"] == 1 and -0.7 < log["loss"] < -0.4  # two votes, one of them with A = 1 and a ratio near 1
    assert max(m.abs().max() for m in moved) > 0


def test_the_gradient_is_clipped_and_zero_means_not_at_all(policy):
    (log, free), (_, cut) = gradient(policy), gradient(policy, grad_clip=0.1)
    norms = [torch.stack([g.norm() for g in each]).norm().item() for each in (free, cut)]
    assert norms == pytest.approx([log["grad_norm"], 0.1], rel=1e-3) and norms[0] > 0.2


def test_without_segments_a_rollout_has_one_vote(dense):
    """Its two halves share advantage, ratio and mean: the gradient is that of GSPO over the whole."""
    whole = torch.tensor([[0, 1], [0, 2], [0, 0], [0, -1], [0, 1]], dtype=torch.float64)
    log, merged = gradient(dense, whole, segments=False)
    assert log["updates"] == 1 and log["clip/tool"] == 0
    assert log["loss"] == pytest.approx(-(1 + 2 - 1 + 1) / 4, abs=0.2)  # four votes with ratios near 1
    apart = gradient(dense, whole[:, [1, 1]])[1]
    assert not all(torch.allclose(a, b) for a, b in zip(merged, apart, strict=True))


def test_truncated_weights_correct_an_engine_that_is_off(policy):
    """The first ratio is to the trainer's own log-probs, though the engine's here are made up; a weight has a bound."""
    log, whole = gradient(policy, truncate=2.0)
    assert log["first_ratio_off"] < 1e-6
    assert 0.1 < log["engine_off"] < 10 and "engine_off" not in gradient(policy)[0]
    assert gradient(policy)[0]["first_ratio_off"] > 1e-3
    assert any(g.abs().max() > 0 for g in whole)
    for micro in (1, 2):
        for a, b in zip(whole, gradient(policy, truncate=2.0, micro=micro)[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    small, half = (gradient(policy, truncate=most)[1] for most in (2e-6, 1e-6))  # every weight is the largest one
    for a, b in zip(small, half, strict=True):
        torch.testing.assert_close(a, 2 * b, rtol=1e-3, atol=1e-9)


def test_a_head_that_learns_along_leaves_the_policy_alone(policy):
    """FAULTS 38, 39: the same log and gradient of the policy, bit for bit; only with `train` does the head move."""
    log, alone = gradient(policy)
    for how in ("measure", "train"):
        policy.mtp = MTP(policy.model)
        before = [p.clone() for p in policy.mtp.parameters()]
        same, beside = gradient(policy, drafter=rl.Learner(policy, lr=0.01), mtp=how)
        assert {k: v for k, v in same.items() if not k.startswith("mtp/")} == log
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
        moved = any(not torch.equal(a, b) for a, b in zip(before, policy.mtp.parameters(), strict=True))
        assert moved == (how == "train") and 1 <= same["mtp/length"] <= 4 and same["mtp/loss_1"] > 0
    policy.mtp = None


def test_a_run_trains_the_head_along_and_resumes(flags, whole, tmp_path):
    """FAULTS 41: the head is saved with the policy, whose curve is as without it; a resume changes nothing."""
    policy = load(next(flags[i + 1] for i, word in enumerate(flags) if word == "--model"))
    policy.mtp = MTP(policy.model)
    policy.publish(tmp_path / "model")
    words = [*flags, "--model", str(tmp_path / "model"), "--mtp", "train"]
    with pytest.MonkeyPatch.context() as patch:
        babble(patch)
        rl.main([*words, "--steps", "4", "--out", str(tmp_path / "one")])
        rl.main([*words, "--steps", "2", "--out", str(tmp_path / "two")])
        rl.main([*words, "--steps", "4", "--out", str(tmp_path / "two"), "--resume"])
    assert seeded(tmp_path / "one")[3:] == seeded(tmp_path / "two")[3:]
    for got, want in zip(seeded(tmp_path / "one"), seeded(whole), strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
    one, two = (load(tmp_path / name / "model") for name in ("one", "two"))
    heads = [[p for p in each.mtp.parameters()] for each in (policy, one, two)]
    assert all(torch.equal(a, b) for a, b in zip(*heads[1:], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*heads[:2], strict=True))
    assert all("mtp/length" in row for row in rows(tmp_path / "one") if row.get("updates"))


def jobs(cfg):
    return partial(rl.training_jobs, cfg, rl.World.load(cfg.world), rl.Harness.load(cfg.harness))


@pytest.mark.parametrize("kind", ["dense", "qwen36"])
@pytest.mark.filterwarnings("ignore:drafting does not pay")
def test_rollouts_under_drafts_have_exact_log_probs(kind, flags, headed_dir, qwen36_dir, guided, monkeypatch):
    """FAULTS 11: the first ratio is 1 where drafts were taken and where they were not."""
    monkeypatch.setattr(evaluation, "score", fake_score)
    model = {"dense": headed_dir, "qwen36": qwen36_dir}[kind]
    cfg = rl.parse(rl.Config, rl.PRESETS, [*flags, "--drafts", "2", "--temperature", "0.2", "--minibatches", "1"])
    policy = load(model)
    engine = guided(policy, cfg.slots, cfg.context, cfg.temperature, drafts=cfg.drafts)
    actors = rl.Actors(policy, torch.optim.SGD(policy.model.parameters(), 0.0))
    log, _ = rl.train_step(1, engine, actors, jobs(cfg), cfg, common.ALONE)
    assert log["updates"] == 1 and log["first_ratio_off"] < 1e-4
    taken = engine.stats["accepted"]
    assert sum(taken[1:]) > 5 and taken[0] > 0
    assert log["accepted_length"] == engine.stats["accepted_length"] > 1.1
    assert log["draft_acceptance"] == engine.stats["draft_acceptance"]


def test_a_run_rolls_out_with_drafts(flags, qwen36_dir, tmp_path):
    """Its own head drafts; the log says how often it was right, in the rows of rollouts alone."""
    words = [*flags, "--model", str(qwen36_dir), "--drafts", "2", "--steps", "1", "--eval-requests", "1"]
    with pytest.MonkeyPatch.context() as patch:
        babble(patch)
        rl.main([*words, "--out", str(tmp_path / "run")])
    before, step = rows(tmp_path / "run")
    assert "accepted_length" not in before and step["updates"] > 0 and step["first_ratio_off"] < 1e-4
    assert 1 <= step["accepted_length"] <= 3 and 0 <= step["draft_acceptance"] <= 1


def test_kl_pulls_towards_the_reference(policy):
    """Nothing to itself. To another policy it is positive, and a step down its gradient alone makes it smaller."""
    (log, free), (same, itself) = gradient(policy), gradient(policy, kl=10.0, reference=policy)
    assert same["loss"] == pytest.approx(log["loss"])
    for a, b in zip(free, itself, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    other = load(policy.path)
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.05)
    (log, free), (held, pulled) = gradient(policy), gradient(policy, kl=1.0, reference=other)
    pull = [b - a for a, b in zip(free, pulled, strict=True)]
    apart, steep = held["loss"] - log["loss"], sum(p.square().sum().item() for p in pull)
    with torch.no_grad():
        for p, step in zip(policy.model.parameters(), pull, strict=True):
            p -= 0.1 * apart / steep * step  # a tenth of the way, were it a line
    closer = gradient(policy, kl=1.0, reference=other)[0]["loss"] - gradient(policy)[0]["loss"]
    assert 0.8 * apart < closer < 0.95 * apart


def test_all_rollouts_are_kept_if_asked_for(flags, tmp_path):
    """And mtp.py reads those of all steps."""
    with pytest.MonkeyPatch.context() as patch:
        babble(patch)
        patch.setattr(rl, "SHOWN", 1)
        words = ["--keep-rollouts", "--save-every", "3", "--steps", "3", "--eval-requests", "1", "--out"]
        rl.main([*flags, *words, str(tmp_path / "run")])
    files = sorted((tmp_path / "run").glob("rollouts-*.jsonl"))
    assert [file.name[9:15] for file in files] == ["000001", "000002", "000003"]
    assert [len(file.read_text().splitlines()) for file in files] == [4, 4, 4]
    told, counted = read_rollouts(str(tmp_path / "run" / "rollouts-*.jsonl"), 10**6, 10**6)
    assert len(told) == 12 and "12 rollouts" in counted


def test_run_leaves_its_files(whole):
    log = rows(whole)
    assert [row["step"] for row in log] == [0, 1, 2, 3, 4]
    assert {"eval/score", "eval/T2"} <= log[0].keys() and "eval/score" in log[4] and "eval/score" not in log[2]
    for name in ("trajectories.jsonl", "rollouts-000001.jsonl", "rollouts-000004.jsonl"):
        trajectories = [json.loads(line) for line in (whole / name).read_text().splitlines()]
        assert len(trajectories) == 4 and rl.Trajectory.from_dict(trajectories[0]).harness_commit
    rewards = [[r for r in t["rewards"].values() if r is not None] for t in trajectories]
    means = [sum(r) / len(r) for r in rewards]
    assert means == sorted(means)
    for name in ("reward.png", "think_length.png"):
        assert (whole / name).read_bytes().startswith(b"\x89PNG")
    saved, last = load(whole / "model"), load(whole / "ckpt-000004" / "model")
    assert all(torch.equal(a, b) for a, b in zip(saved.model.parameters(), last.model.parameters(), strict=True))
    assert "before" in (whole / "log.txt").read_text()


def test_a_tool_that_hangs_is_an_unscored_error(flags, policy, monkeypatch):
    """FAULTS 28: at its deadline; its group goes on without it. Both rollouts hear the oracle, who calls a tool."""
    cfg = rl.parse(rl.Config, rl.PRESETS, flags)
    world, harness, run = rl.World.load(cfg.world), rl.Harness.load(cfg.harness), rl.run
    tried = (rl.training_jobs(cfg, world, harness, step, range(1)) for step in count(1))
    told = ((jobs, teach(harness, jobs[0][1], policy.codec, 0)) for jobs in tried)
    jobs, oracle = next((jobs, t) for jobs, t in told if any(e["event"] == "tool_call" for e in t.events))

    def hears(*words):
        loop = run(*words)
        turn = next(loop)
        for _, where in oracle.states():
            yield Turn(turn.ids, [], 1)
            try:
                turn = loop.send(Sample([oracle.ids[t] for t in where], [0.0] * len(where), "stop"))
            except StopIteration as end:
                return end.value

    jobs[0][2].call = lambda *_: time.sleep(4)
    monkeypatch.setattr(evaluation, "run", hears)
    engine = rl.Engine(policy, slots=2, deadline_s=0.5)
    stuck, fine = rl.collect(engine, jobs, "rollouts", common.ALONE)
    assert engine.stats["stuck"] == 1 and stuck.stop_reason == "error" and stuck.harness_commit == harness.commit
    assert set(stuck.rewards) == set(rl.REWARDS) and set(stuck.rewards.values()) == {None}
    assert fine.stop_reason == "reply" and None not in fine.rewards.values()
    assert rl.measure(stuck, cfg)["stop/error"] == 1


def test_a_stop_within_the_first_evaluation_is_saved_too(flags, whole, tmp_path):
    words = [*flags, "--steps", "4", "--out", str(out := tmp_path / "run")]
    evaluate = rl.evaluate

    def interrupted(*words):
        signal.raise_signal(signal.SIGINT)
        return evaluate(*words)

    with pytest.MonkeyPatch.context() as patch:
        babble(patch)
        patch.setattr(rl, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rl.main(words)
        assert (out / "ckpt-000000").exists() and len(rows(out)) == 1
        patch.setattr(rl, "evaluate", evaluate)
        rl.main([*words, "--resume"])
    assert seeded(out) == seeded(whole)


@pytest.mark.parametrize("lr_end", ["1.0", "0.1"])
def test_more_steps_are_the_same_run_if_the_learning_rate_is_constant(flags, tmp_path, lr_end):
    words = [*flags, "--out", str(tmp_path / "run"), "--lr-end", lr_end]
    cfg = rl.parse(rl.Config, rl.PRESETS, words)
    inputs = {"harness_commit": rl.Harness.load(cfg.harness).commit, "world_digest": common.digest(cfg.world)}
    common.Run(str(tmp_path / "run"), cfg, inputs=inputs)
    (tmp_path / "run" / "ckpt-000001").mkdir()  # a damaged one: where the run would go on, it stops here
    with pytest.raises(BadInput, match="files.json" if lr_end == "1.0" else "steps was 2 and is now 9"):
        rl.main([*words, "--resume", "--steps", "9"])


def test_kill_and_resume_bit_for_bit(flags, whole, tmp_path):
    """FAULTS 31, 32: Ctrl-C, resume, SIGKILL, resume; weights and log are those of the run that nothing interrupted."""
    words = [*flags, "--steps", "4", "--out", str(out := tmp_path / "run")]
    process = start(*words)
    wait_for(out / "ckpt-000001", process)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130 and not (out / "model").exists()
    process = start(*words, "--resume")
    wait_for(out / "ckpt-000003", process)
    process.kill()
    process.communicate()
    with pytest.MonkeyPatch.context() as patch:
        babble(patch)
        rl.main([*words, "--resume"])
    assert seeded(out) == seeded(whole)
    weights = "model/model.safetensors"
    assert (out / weights).read_bytes() == (whole / weights).read_bytes()


TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def moments(out, step):
    """Mean gradients of a checkpoint, by the names of the weights: AdamW's first moments, linear in the gradients."""
    state = torch.load(out / f"ckpt-{step:06d}" / "state.pt", weights_only=False)["optimizer"]["state"]
    return {name: each["exp_avg"] for name, each in state.items()}


@pytest.mark.parametrize("how", [[], ["--truncate", "2", "--kl", "0.1", "--recompute", "--shard"]])
def test_two_processes_take_the_same_step(flags, whole, tmp_path, how):
    """FAULTS 16: rollouts sharded by group, one vote count, gradients summed before the clip; then one process goes on.

    Weights and optimizer sharded as well, layers computed again, with every extra forward that the options know; these
    change little in a run of exact log-probs that starts at its reference. The single process does without either, and
    two go on with what it has left.
    """
    words, alone = [*flags, *how, "--out", str(out := tmp_path / "run")], tmp_path / "alone"
    output, _ = (process := start(*words, "--steps", "2", launcher=TWO)).communicate()
    assert process.returncode == 0 and "returned a view" not in output, output
    for got, want in zip(seeded(out), seeded(whole)[:3], strict=True):
        assert {k: got[k] for k in want} == pytest.approx(want, rel=5e-3 if how else 1e-3, abs=1e-3 if how else 1e-5)
    kept = [json.loads(line) for line in (out / "rollouts-000002.jsonl").read_text().splitlines()]
    assert len(kept) == 4 and len({sum(t["mask"]) for t in kept}) > 1  # of both ranks, ragged
    with pytest.MonkeyPatch.context() as patch:
        babble(patch)
        rl.main([*flags, *how[:-2], "--out", str(alone), "--steps", "2"])
        ours, theirs = moments(out, 2), moments(alone, 2)
        assert ours.keys() == theirs.keys() and max(m.abs().max() for m in ours.values()) > 1e-3
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-2, atol=1e-5)
        rl.main([*flags, *how[:-2], "--out", str(out), "--steps", "4", "--resume"])
        if how:
            rl.main([*flags, *how[:-2], "--out", str(alone), "--steps", "5", "--resume"])
    assert len(rows(out)) == 5
    if how:
        resumed = start(*words, "--steps", "5", "--resume", launcher=TWO)
        assert resumed.wait() == 0, resumed.stdout.read()
    last, wanted = seeded(out)[-1], seeded(alone if how else whole)[-1]
    assert {k: last[k] for k in wanted} == pytest.approx(wanted, rel=2e-2, abs=2e-2)


def test_half_precision(flags, headed_dir, tmp_path):
    """One process, sharded by itself, in bf16: trainer and engine disagree by roundings, the weights stay in fp32.

    As the preset of a real model asks for, which truncates: the ratios are to the trainer's own log-probs.
    """
    sizes = "--groups 2 --group-size 2 --eval-requests 4 --slots 4 --context 1536 --steps 2 --lr 2e-4 --warmup 0"
    words = [*flags, "--config", "qwen3", "--model", str(headed_dir), "--drafts", "1", *sizes.split()]
    output, _ = (process := start(*words, "--out", str(out := tmp_path / "run"))).communicate()
    assert process.returncode == 0, output
    first, last = rows(out)[1], rows(out)[-1]
    assert 1e-6 < first["engine_off"] < 0.05 and first["first_ratio_off"] < 1e-3 and last["updates"] > 0
    new, old = (load_file(path / "model.safetensors") for path in (out / "model", headed_dir))
    moved = [name for name in new if not torch.equal(new[name], old[name])]
    assert not [name for name in moved if name.startswith("mtp.")]  # nor is the head rounded
    assert len(moved) > 20 and all(x.dtype == torch.float32 for x in new.values())
    assert any((x != x.bfloat16().float()).any() for x in new.values())


def test_one_rank_that_fails_ends_them_all_with_its_error(flags, tmp_path):
    """Within a minute, whatever the others are waiting for."""
    words = [*flags, "--steps", "400", "--out", str(tmp_path / "run"), "--fail"]
    output, _ = (process := start(*words, launcher=TWO)).communicate(timeout=150)
    assert process.returncode != 0 and "RuntimeError: rank 1 has had enough" in output
    said = float(output.partition("failing at ")[2].split()[0])
    assert time.time() - said < 60


@pytest.mark.parametrize(
    "words, message",
    [
        (["--think-full", "5", "--think-free", "5"], "--think-full 5 must be above --think-free 5"),
        (["--context", "40"], "--context 40: a prompt has"),
        (["--context", "5000"], "context 5000 is beyond"),
        (["--groups", "0"], "--groups"),
        (["--shard", "--mtp", "train"], "a head is not trained on a sharded policy"),
        (["--precision", "bfloat16"], "--precision bfloat16 is that of --shard"),
        (["--mtp", "train"], "has no MTP head; mtp.py trains one for it"),
        (["--drafts", "2"], "--drafts 2 --mtp keep: .*model has no MTP head"),
        (["--drafts", "-1"], "--drafts: -1 is not within"),
        (["--model", "nowhere"], "nowhere: no such model directory"),
        (["--clip-tol", "1,2"], "--clip-tool"),
        (["--clip-tool", "0.1"], "--clip-tool: '0.1' is not 2 values"),
        (["--faults", "0.1"], "--faults: '0.1' is not 3 values"),
        (["--faults", "0.1,0.2,2"], "--faults: 2.0 is not within 0 .. 1"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_directory(flags, tmp_path, words, message):
    with pytest.raises(BadInput, match=message):
        rl.main([*flags, "--out", str(tmp_path / "run"), *words])
    assert not list(tmp_path.iterdir())


def test_a_step_in_which_nothing_was_sampled_is_refused(flags, policy):
    """FAULTS 7."""
    cfg = rl.parse(rl.Config, rl.PRESETS, [*flags, "--context", "40"])
    engine = rl.Engine(policy, 4, cfg.context)
    with pytest.raises(BadInput, match="no rollout sampled a token"):
        rl.train_step(1, engine, rl.Actors(policy, None), jobs(cfg), cfg, common.ALONE)


if __name__ == "__main__":
    common.cli(child)
