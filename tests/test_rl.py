"""What rl.py makes of a step's options: rollouts to run, numbers of a trajectory, advantages of a batch."""

import math

import pytest
import torch

import rl
from chat import Trajectory
from common import ALONE


def test_seeds_of_a_step():
    """FAULTS 29, 30: a group shares task and faults, in rooms of their own; all else has its own seed, at any shard."""
    cfg = rl.Config(groups=4, group_size=2)
    world, harness = rl.World.load(cfg.world), rl.Harness.load(cfg.harness)
    first, second = (rl.training_jobs(cfg, world, harness, step, range(4)) for step in (1, 2))
    _, tasks, rooms, seeds = zip(*first, *second)
    assert len({task.seed for task in tasks}) == len({room.seed for room in rooms}) == 8
    assert len(set(seeds)) == len(set(map(id, rooms))) == 16
    pairs = [(task.seed, room.seed) for task, room in zip(tasks, rooms)]
    assert pairs[::2] == pairs[1::2]
    shard = rl.training_jobs(cfg, world, harness, 1, range(1, 4, 2))
    assert [seed for *_, seed in shard] == [seeds[i] for i in (2, 3, 6, 7)]


def test_hsa_rollouts_share_a_harness_in_a_group_and_differ_between_groups():
    world, harness = rl.World.load("data/world/zh.json"), rl.Harness.load("data/harness")
    cfg = rl.Config(groups=16, group_size=2, harness_mode="hsa")
    commits = [h.commit for h, *_ in rl.training_jobs(cfg, world, harness, 1, range(16))]
    assert commits[::2] == commits[1::2]  # a group is one task under one harness
    assert commits[::2].count(harness.commit) == 8  # in each step as many groups on the original
    shares = [
        rl.training_jobs(
            rl.Config(groups=8, group_size=1, harness_mode="hsa", augmented=a), world, harness, 1, range(8)
        )
        for a in (0.0, 0.3, 1.0)
    ]
    assert [sum(h is not harness for h, *_ in jobs) for jobs in shares] == [0, 2, 8]
    assert len(set(commits)) > 4
    few = rl.Config(groups=1, group_size=2, harness_mode="hsa", augmented=0.4)  # one group a step: over the whole run
    each = [rl.training_jobs(few, world, harness, step, range(1))[0][0] is not harness for step in range(1, 11)]
    assert sum(each) == 4 and sum(each[:5]) == 2
    fixed = rl.training_jobs(rl.Config(groups=4, harness_mode="fixed"), world, harness, 1, range(4))
    assert {h.commit for h, *_ in fixed} == {harness.commit}


def test_mixed_groups_share_a_task_under_harnesses_of_their_own():
    world, harness = rl.World.load("data/world/zh.json"), rl.Harness.load("data/harness")
    cfg = rl.Config(groups=2, group_size=12, harness_mode="mixed")
    jobs = rl.training_jobs(cfg, world, harness, 1, range(2))
    for group in (jobs[:12], jobs[12:]):
        harnesses, tasks, rooms, _ = zip(*group)
        commits = [h.commit for h in harnesses]
        assert len({task.seed for task in tasks}) == len({room.seed for room in rooms}) == 1
        assert len(set(commits)) > 2 and commits.count(harness.commit) == 6


def test_a_rewriter_rewords_the_harnesses_of_rollouts():
    world, harness = rl.World.load("data/world/zh.json"), rl.Harness.load("data/harness")
    cfg = rl.Config(groups=4, group_size=1, harness_mode="hsa", augmented=1.0)

    def shout(text, what, rng):
        return text + "！" if what == "description" else text

    jobs = rl.training_jobs(cfg, world, harness, 1, range(4), shout)
    assert any(t.description.endswith("！") for h, *_ in jobs for t in h.tools)
    assert not any(
        t.description.endswith("！") for h, *_ in rl.training_jobs(cfg, world, harness, 1, range(4)) for t in h.tools
    )


def test_faults_rise_over_the_ramp():
    world, harness = rl.World.load("data/world/zh.json"), rl.Harness.load("data/harness")
    cfg = rl.Config(groups=1, group_size=1, faults=(0.4, 0.2, 0.1), fault_ramp=10)
    rates = [rl.training_jobs(cfg, world, harness, step, range(1))[0][2].faults for step in (1, 5, 10, 30)]
    assert [r.timeout for r in rates] == pytest.approx([0.04, 0.2, 0.4, 0.4])
    assert (rates[1].malformed, rates[1].denied) == pytest.approx((0.1, 0.05))


def test_facts_of_a_trajectory():
    """Tokens, states and think lengths per segment; a reward of None, or an absent one, is NaN."""
    cfg = rl.Config(think_penalty=0.1, think_free=1, think_full=3)
    trajectory = Trajectory(
        ids=list(range(8)), mask=[0, 1, 1, 1, 0, 1, 1, 1], logps=[0.0] * 8, segment=[0, 1, 1, 1, 0, 2, 2, 2],
        think=[0, 1, 1, 0, 0, 1, 0, 0], state=[-1, 0, 0, 0, -1, 1, 1, 1], stop_reason="reply",
        rewards={"accuracy": 1.0, "effectiveness": 0.5, "tool": None},
    )  # fmt: skip
    row = rl.measure(trajectory, cfg)
    assert row["tokens"] == 6 and row["states/tool"] == row["states/reply"] == 1
    assert (row["think/tool"], row["think/reply"]) == (2, 1)
    assert (row["penalty/tool"], row["penalty/reply"]) == (pytest.approx(-0.05), 0)
    assert row["reward/effectiveness"] == 0.5 and math.isnan(row["reward/tool"]) and math.isnan(row["reward/skill"])
    assert row["stop/reply"] == 1 and sum(v for k, v in row.items() if k.startswith("stop/")) == 1


def test_cut_and_unscored_trajectories_are_masked_and_counted():
    """FAULTS 7, 22, 24: by stop reason "length", by rewards that are all None, by having sampled nothing."""
    cfg, trajectories = rl.Config(cut="mask"), []
    for accuracy, stop, sampled in (
        (1, "reply", 1),
        (0, "reply", 1),
        (0, "length", 1),
        (None, "error", 1),
        (1, "reply", 0),
    ):
        token = ([5], [sampled], [0.0], [2 * sampled], [0], [sampled - 1])
        t_ = Trajectory(*token, rewards=dict.fromkeys(rl.REWARDS, accuracy), stop_reason=stop)
        trajectories.append(rl.measure(t_, cfg))
    batch = rl.gather(trajectories, list(range(5)), 5, ALONE)
    out = rl.advantages_of(batch, torch.zeros(5), cfg)
    assert out[0, 1] > 0 > out[1, 1] and out[2:].abs().max() == 0 and out[:, 0].abs().max() == 0
    mean = 2 / 3  # of the three that were scored, the one without a token among them
    assert out[0, 1] / out[1, 1] == pytest.approx((1 - mean) / -mean)
    assert rl.summary(batch)["stop/length"] == rl.summary(batch)["stop/error"] == 1

    out = rl.advantages_of(batch, torch.zeros(5), rl.Config(cut="fail"))  # a loop that no limit would end
    assert out[0, 1] > 0 > out[1, 1] == out[2, 1] and out[3:].abs().max() == 0
    assert out[0, 1] / out[1, 1] == pytest.approx((1 - 2 / 4) / -(2 / 4))
