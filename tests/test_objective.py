"""The HSA-RL objective, rewards -> advantages -> loss: numbers worked out by hand and exact expectations."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import objective
import rl
from facts import REWARDS

NAN = math.nan
LOW, HIGH = torch.tensor([0.1, 0.05]), torch.tensor([0.2, 0.08])
CLIP = torch.stack([LOW, HIGH], 1)
BATCH = [[0, 1, 1, 0, 2, 2, 2, 0], [1, 0, 2, 2, 0, 0, 0, 0], [2, 2, 2, 2, 2, 0, 0, 0]]  # segment of each token


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def advantages(groups, present=None, valid=None, penalty=None, rules=None, floor=0.5, **rewards):
    """segment_advantages with the rewards that a test does not name equal to 1 for everyone."""
    n = len(groups)
    return objective.segment_advantages(
        {name: t(*rewards.get(name, [1.0] * n)) for name in REWARDS},
        t(*penalty) if penalty else torch.zeros(n, 2, dtype=torch.float64),
        torch.tensor(present or [[True, True]] * n),
        torch.tensor(valid or [True] * n),
        torch.tensor(groups),
        SimpleNamespace(**dict(normalise="gdpo", floor=floor, condition=False, think_gate=0.0) | (rules or {})),
    )


def logps_like(batch, scale=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    segment = torch.tensor(batch)
    old = -torch.rand(segment.shape, generator=generator)
    now = old + scale * torch.randn(segment.shape, generator=generator)
    return now.where(segment > 0, 0.0).requires_grad_(), old.where(segment > 0, 0.0), segment


def loss_of(logps, old, segment, adv, votes=None, low=LOW, high=HIGH, form="token"):
    votes = votes or sum(int((segment == s).any(1).sum()) for s in (1, 2))
    return objective.policy_loss(
        logps, old, segment, torch.as_tensor(adv).float(), torch.stack([low, high], 1), votes, form
    )


# ---------------------------------------------------------------------------------------------------------------------
# one reward in its group


def test_normalised_by_hand():
    out = objective.normalised(t(1, 0, 0, 0), torch.zeros(4))
    std = math.sqrt(3) / 4
    torch.testing.assert_close(out, t(0.75, -0.25, -0.25, -0.25) / (std + 1e-4))


def test_unequal_groups_by_id():
    """FAULTS 18: groups of 3 and 2, interleaved, each by its own mean and std."""
    out = objective.normalised(t(1, 10, 2, 30, 3), torch.tensor([7, 4, 7, 4, 7]))
    a, b = 1 / (math.sqrt(2 / 3) + 1e-4), 10 / (10 + 1e-4)
    torch.testing.assert_close(out, t(-a, -b, 0, b, a))


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1 / 3, 1e6 + 0.1])
def test_constant_groups_are_exactly_zero(value):
    """FAULTS 19: the mean of equal floats may be off by an ulp; the advantage may not. Ragged groups."""
    groups = [0] * 3 + [1] * 7 + [2]
    assert objective.normalised(t(*[value] * 11), torch.tensor(groups)).abs().max() == 0
    same = dict.fromkeys(REWARDS, [value] * 11)
    assert advantages(groups, penalty=[[-0.1 / 3, -0.07]] * 11, floor=1e-9, **same).abs().max() == 0


def test_none_leaves_mean_and_std():
    """FAULTS 22: a reward that was not scored is not 0; a group without any contributes nothing."""
    out = objective.normalised(t(1, NAN, 0, NAN, NAN), torch.tensor([0, 0, 0, 1, 1]))
    torch.testing.assert_close(out, t(1, 0, -1, 0, 0) * 0.5 / (0.5 + 1e-4))


# ---------------------------------------------------------------------------------------------------------------------
# segment advantages


def test_segment_advantages_by_hand():
    """Two callers: the tool segment gets tool + skill + accuracy, the reply accuracy + effectiveness."""
    out = advantages([0, 0], accuracy=[1, 0], effectiveness=[0, 1], tool=[1, 0])
    z = 0.5 / (0.5 + 1e-4)
    tool = t(2 * z, -2 * z)
    torch.testing.assert_close(out, torch.stack([tool / (2 * z), t(0, 0)], 1))


def test_one_informative_group_of_64_is_bounded_by_the_floor():
    """FAULTS 20: 63 constant groups make the batch std small; the floor bounds the one that is left."""
    groups = [g for g in range(64) for _ in range(8)]
    accuracy = [1.0] + [0.0] * 511
    out = advantages(groups, accuracy=accuracy, floor=0.5)
    z = objective.normalised(t(*accuracy[:8]), torch.zeros(8))
    torch.testing.assert_close(out[:8, 0], z / 0.5)
    assert out[:8].abs().max() <= math.sqrt(7) / 0.5 and out[8:].abs().max() == 0
    unbounded = advantages(groups, accuracy=accuracy, floor=1e-9)
    assert unbounded.abs().max() > 3 * out.abs().max()


def test_batch_step_only_scales():
    """One positive number for the whole batch and segment: order and sign within a group stay."""
    accuracy, effectiveness = [1, 0, 0, 1, 1, 0], [1, 0.5, 0, 0, 1, 0.5]
    out = advantages([0, 0, 0, 1, 1, 1], accuracy=accuracy, effectiveness=effectiveness, floor=0.1)
    torch.testing.assert_close(out.std(0, correction=0), t(1, 1))
    unscaled = advantages([0, 0, 0, 1, 1, 1], accuracy=accuracy, effectiveness=effectiveness, floor=100.0)
    torch.testing.assert_close(out / out[0], unscaled / unscaled[0])
    assert (out.sign() == unscaled.sign()).all() and (unscaled[0] > 0).all()


def test_advantages_that_differ_on_single_rewards_are_kept():
    """FAULTS 21: the summed reward of this group is constant, its final advantage is not; and one that is, is zero."""
    out = advantages([0, 0], accuracy=[1, 0], effectiveness=[0, 1])
    assert out[:, 1].abs().max() == 0 and out[:, 0].abs().min() > 0  # reply: +1 -1; tool: accuracy alone


@pytest.mark.parametrize("tokens, penalty", [(0, 0), (100, 0), (101, -0.001), (150, -0.05), (200, -0.1), (9999, -0.1)])
def test_think_penalty_is_linear_and_bounded(tokens, penalty):
    assert objective.think_penalty([tokens], free=100, full=200) == pytest.approx(penalty)
    assert objective.think_penalty([tokens, 0, 150], free=100, full=200) == pytest.approx(penalty - 0.05)
    assert objective.think_penalty([], free=100, full=200) == 0


def test_penalty_is_centred_and_not_scaled():
    """FAULTS 23: in a group of equal rewards only the penalty is left, in its own size, whatever the batch std."""
    penalty = [[-0.1, 0.0], [0.0, 0.0], [0.0, -0.05], [0.0, -0.05]]
    for accuracy in ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]):
        out = advantages([0] * 4 + [1] * 2, penalty=penalty + [[0, 0]] * 2, accuracy=accuracy, floor=0.1)
        torch.testing.assert_close(out[:4, 0], t(-0.075, 0.025, 0.025, 0.025))
        torch.testing.assert_close(out[:4, 1], t(0.025, 0.025, -0.025, -0.025))


@pytest.mark.parametrize("right", range(1, 8))
def test_long_and_right_never_ranks_below_short_and_wrong(right):
    """FAULTS 23: full penalty in many states against none, beside a batch whose scale is as large as it can be."""
    good, cfg = [1.0] * right + [0.0] * (8 - right), rl.Config()
    worst = objective.think_penalty([500] * 8, cfg.think_free, cfg.think_full, cfg.think_penalty)
    assert worst == pytest.approx(-0.6)
    penalty = [[worst, worst]] * right + [[0.0, 0.0]] * (8 - right) + [[0, 0]] * 200
    other = [1.0, 0.0] * 100
    everything = {name: [1.0] * 8 + other for name in REWARDS} | {"accuracy": good + other}
    out = advantages([0] * 8 + [1] * 200, penalty=penalty, **everything)
    assert out[:right, 0].min() > out[right:8, 0].max() and out[:right, 1].min() > out[right:8, 1].max()


@pytest.mark.parametrize("n", [1, 3])
def test_degenerate_batches_are_finite_zeros(n):
    """FAULTS 24: G = 1, everything truncated, a segment nobody has."""
    alone = advantages(list(range(n)), accuracy=[0.3] * n, penalty=[[-0.1, -0.1]] * n)
    cut = advantages([0] * n, accuracy=list(range(n)), penalty=[[-0.1, 0]] * n, valid=[False] * n)
    empty = advantages([0] * n, tool=list(range(n)), present=[[False, False]] * n)
    unscored = advantages([0] * n, **dict.fromkeys(REWARDS, [NAN] * n), valid=[False] * n)
    for out in (alone, cut, empty, unscored):
        assert out.shape == (n, 2) and out.abs().max() == 0


def test_truncated_rollouts_leave_the_baseline():
    out = advantages([0, 0, 0], accuracy=[1, 0, 0.5], penalty=[[0, 0], [0, 0], [-0.1, 0]], valid=[True, True, False])
    torch.testing.assert_close(out[:2], advantages([0, 0], accuracy=[1, 0]))
    assert out[2].abs().max() == 0


def test_rollout_without_tool_calls_carries_tool_rewards_on_its_reply():
    """FAULTS 25. The baseline is the whole group's: the caller's tool reward counts in the mean of the other one."""
    present = [[True, True], [False, True]]
    out = advantages([0, 0], present=present, tool=[0, 1])
    z = 0.5 / (0.5 + 1e-4)
    std_reply = z / 2  # reply column before its scale: 0 for the caller, z for the other
    torch.testing.assert_close(out, torch.stack([t(-z / z, 0), t(0, z / max(std_reply, 0.5))], 1))


# ---------------------------------------------------------------------------------------------------------------------
# variants of the advantage


def test_grpo_normalises_the_sum():
    """Rewards (1, 0), (0, 1), (0, 0): by hand; and what the sum hides, GDPO sees."""
    rewards, groups = {"accuracy": t(1, 0, 0), "effectiveness": t(0, 1, 0)}, torch.zeros(3)
    weights = {"accuracy": 1.0, "effectiveness": 1.0}
    std = math.sqrt(2) / 3
    torch.testing.assert_close(
        objective.credited(rewards, weights, groups, "grpo"), t(1 / 3, 1 / 3, -2 / 3) / (std + 1e-4)
    )
    torch.testing.assert_close(objective.credited(rewards, weights, groups, "gdpo"), t(1, 1, -2) / 3 / (std + 1e-4))
    pair = {name: r[:2] for name, r in rewards.items()}
    doubled = {"accuracy": 2.0, "effectiveness": 1.0}
    assert objective.credited(pair, weights, groups[:2], "grpo").abs().max() == 0
    torch.testing.assert_close(objective.credited(pair, doubled, groups[:2], "gdpo"), t(0.5, -0.5) / (0.5 + 1e-4))


def test_grpo_leaves_out_what_lacks_a_reward():
    """FAULTS 22: a sum without one of its terms would be a low sum, not an unknown one."""
    rewards, groups = {"accuracy": t(1, 0, 1), "tool": t(1, 0, NAN)}, torch.zeros(3)
    out = objective.credited(rewards, {"accuracy": 1.0, "tool": 1.0}, groups, "grpo")
    torch.testing.assert_close(out, t(1, -1, 0) / (1 + 1e-4))


def test_conditioned_effectiveness_needs_accuracy():
    """A false reply that answers everything ranks with a false one that answers nothing; NaN stays NaN."""
    rewards = {"accuracy": t(1, 0, 0, NAN, 0), "effectiveness": t(0.5, 1, 0, 1, NAN), "tool": t(1, 1, 0, 0, 0)}
    out = objective.conditioned(rewards)
    assert out["effectiveness"].tolist()[:3] == [0.5, 0, 0] and out["effectiveness"][3:].isnan().all()
    assert out["tool"] is rewards["tool"] and out["accuracy"] is rewards["accuracy"]
    plain, given = (
        advantages([0] * 3, accuracy=[1, 0, 0], effectiveness=[0.5, 1, 0], rules={"condition": c})[:, 1]
        for c in (False, True)
    )
    assert plain[1] > plain[2] and given[1] == given[2] < given[0]


def test_the_gate_of_the_penalty_is_the_accuracy_of_the_group():
    """Two groups with the same reasoning, half and quarter right: a gate of 0.5 penalises the first alone."""
    groups, accuracy = [0] * 4 + [1] * 4, [1, 1, 0, 0, 1, 0, 0, 0]
    penalty = [[-0.1, 0.0], [0.0, 0.0]] * 4
    free, gated = (
        advantages(groups, accuracy=accuracy, penalty=penalty, rules={"think_gate": gate})[:, 0] for gate in (0.0, 0.5)
    )
    bare = advantages(groups, accuracy=accuracy)[:, 0]
    torch.testing.assert_close(free - bare, t(*[-0.05, 0.05] * 4))
    torch.testing.assert_close(gated - bare, t(-0.05, 0.05, -0.05, 0.05, 0, 0, 0, 0))


def test_merged_rollouts_carry_every_reward_on_one_segment():
    penalty, present = objective.merged(t([-0.1, -0.05], [0.0, -0.2]), torch.tensor([[True, True], [False, True]]))
    assert present.tolist() == [[False, True]] * 2
    torch.testing.assert_close(penalty, t([0, -0.15], [0, -0.2]))
    both = objective.merged(t([-0.6, -0.5]), torch.tensor([[True, True]]))[0]
    torch.testing.assert_close(both, t([0, -objective.MOST]))  # one bound, as for one segment
    everything = dict(accuracy=[1, 0], effectiveness=[1, 0], tool=[1, 0], skill=[0, 1])
    out = advantages([0, 0], present=[[False, True]] * 2, **everything)
    z = 0.5 / (0.5 + 1e-4)
    torch.testing.assert_close(out, t([0, 1], [0, -1]) * (3 * z - z) / (2 * z))


# ---------------------------------------------------------------------------------------------------------------------
# loss


def test_loss_by_hand():
    """One trajectory, two tool tokens and one reply token; the reply ratio e^0.2 is cut at 1.08."""
    old, segment = torch.tensor([[0.0, -1.0, -2.0, -1.0]]), torch.tensor([[0, 1, 1, 2]])
    logps = (old + torch.tensor([[0.0, 0.02, 0.04, 0.2]])).requires_grad_()
    loss, stats = loss_of(logps, old, segment, [[2.0, 3.0]])
    assert loss.item() == pytest.approx(-(2 * math.exp(0.03) + 3 * 1.08) / 2, rel=1e-5)
    loss.backward()
    torch.testing.assert_close(logps.grad, torch.tensor([[0.0, -math.exp(0.03) / 2, -math.exp(0.03) / 2, 0.0]]))
    assert stats["clipped"].tolist() == [0, 1] and stats["votes"].tolist() == [1, 1]
    assert stats["deviation"].tolist() == pytest.approx([math.exp(0.03) - 1, math.exp(0.2) - 1], rel=1e-4)


def test_clipping_is_pessimistic_and_per_segment():
    """A bad sample whose ratio already fell is left alone, one whose ratio rose is still pushed down."""
    old, segment = torch.zeros(2, 2), torch.tensor([[1, 2], [1, 2]])
    logps = torch.tensor([[-0.3, -0.3], [0.3, 0.3]]).requires_grad_()
    loss, stats = loss_of(logps, old, segment, [[-1.0, -1.0], [-1.0, -1.0]])
    loss.backward()
    assert logps.grad[0].abs().max() == 0 and logps.grad[1].min() > 0
    assert stats["clipped"].tolist() == [1, 1]
    wide, _ = loss_of(logps, old, segment, [[-1.0, -1.0], [-1.0, -1.0]], low=torch.tensor([0.5, 0.05]))
    assert torch.autograd.grad(wide, logps)[0][0].tolist() == pytest.approx([math.exp(-0.3) / 4, 0])


def test_ratio_comes_from_stored_logps():
    """FAULTS 11, 13: equal log-probs give ratio 1 exactly; other stored ones move both the loss and the gradient."""
    logps, old, segment = logps_like(BATCH, scale=0.0)
    adv = torch.tensor([[1.0, -2.0], [0.5, 1.0], [0.0, 3.0]])
    loss, stats = loss_of(logps, old, segment, adv)
    assert stats["deviation"].sum() == 0
    assert loss.item() == pytest.approx(-(1 - 2 + 0.5 + 1 + 3) / 5, rel=1e-6)
    shifted, stats = loss_of(logps, old - 0.01, segment, adv)
    assert shifted.item() == pytest.approx(loss.item() * math.exp(0.01), rel=1e-5)
    assert stats["deviation"].sum() == pytest.approx(5 * (math.exp(0.01) - 1), rel=1e-3)


def test_masked_tokens_get_no_gradient():
    """FAULTS 15: an environment token's log-prob changes neither loss nor any gradient; its own is exactly 0."""
    logps, old, segment = logps_like(BATCH)
    adv = torch.tensor([[1.0, -2.0], [0.5, 1.0], [0.0, 3.0]])
    loss, _ = loss_of(logps, old, segment, adv, low=LOW + 9, high=HIGH + 9)
    grad = torch.autograd.grad(loss, logps)[0]
    assert grad[segment == 0].abs().max() == 0 and grad[segment > 0].abs().max() > 0
    moved = logps.detach().where(segment > 0, -5.0).requires_grad_()
    again, _ = loss_of(moved, old, segment, adv, low=LOW + 9, high=HIGH + 9)
    assert again == loss and torch.equal(torch.autograd.grad(again, moved)[0], grad)


def test_padding_invariant():
    """FAULTS 12, 14: more padding changes nothing, though the ratio is a mean over the sequence."""
    logps, old, segment = logps_like(BATCH)
    adv = torch.tensor([[1.0, -2.0], [0.5, 1.0], [0.0, 3.0]])
    loss, stats = loss_of(logps, old, segment, adv)
    wide = [torch.nn.functional.pad(x, (0, 40)) for x in (logps, old, segment)]
    padded, padded_stats = loss_of(*wide, adv)
    torch.testing.assert_close(padded, loss)
    torch.testing.assert_close(torch.autograd.grad(padded, logps)[0], torch.autograd.grad(loss, logps)[0])
    assert all(torch.allclose(stats[k].float(), padded_stats[k].float()) for k in stats)


@pytest.mark.parametrize("split", [[1, 2], [2, 1], [1, 1, 1]])
def test_micro_batches_do_not_change_the_gradient(split):
    """FAULTS 8, 16: one denominator, each (trajectory, segment) one vote however long it is."""
    logps, old, segment = logps_like(BATCH)
    adv = torch.tensor([[1.0, -2.0], [0.5, 1.0], [0.0, 3.0]])
    whole = torch.autograd.grad(loss_of(logps, old, segment, adv, votes=5)[0], logps)[0]
    parts = [x.split(split) for x in (logps, old, segment, adv)]
    loss = sum(loss_of(*part, votes=5)[0] for part in zip(*parts, strict=True))
    torch.testing.assert_close(torch.autograd.grad(loss, logps)[0], whole)


@pytest.mark.parametrize("segment_id, column", [(1, 0), (2, 1)])
def test_segments_are_independent(segment_id, column):
    """FAULTS 17: an advantage moves no gradient of the other segment; tool rewards leave callers' replies alone."""
    logps, old, segment = logps_like(BATCH)
    grads = []
    for value in (0.5, -4.0):
        adv = torch.ones(3, 2)
        adv[:, column] = value
        grads.append(torch.autograd.grad(loss_of(logps, old, segment, adv)[0], logps)[0])
    other = (segment > 0) & (segment != segment_id)
    assert torch.equal(grads[0][other], grads[1][other]) and not torch.equal(*grads)
    a, b = (advantages([0, 0, 0], accuracy=[1, 0, 1], tool=tool)[:, 1] for tool in ([1, 0, 0], [0, 0.5, 1]))
    assert torch.equal(a, b)


def test_token_form_has_the_gradient_of_gspo():
    """Within a segment all tokens share the advantage, so the token form must give GSPO's own sequence gradient."""
    logps, old, segment = logps_like([[0, 1, 1, 1, 0, 2, 2]])
    wide = torch.tensor([9.0, 9.0])
    loss, _ = loss_of(logps, old, segment, [[1.5, -0.7]], low=torch.tensor([0.9, 0.9]), high=wide)
    sequence = sum(a * (logps - old)[segment == s].mean().exp() for s, a in ((1, 1.5), (2, -0.7)))
    torch.testing.assert_close(loss, -sequence / 2)
    torch.testing.assert_close(torch.autograd.grad(loss, logps)[0], torch.autograd.grad(-sequence / 2, logps)[0])


def test_sequence_form_by_hand():
    """Both tokens of a segment share e^0.03, and its clip silences both."""
    old, segment = torch.tensor([[0.0, -1.0, -2.0, -1.0]]), torch.tensor([[0, 1, 1, 2]])
    logps = (old + torch.tensor([[0.0, 0.02, 0.04, 0.2]])).requires_grad_()
    loss, stats = loss_of(logps, old, segment, [[2.0, 3.0]], form="sequence")
    assert loss.item() == pytest.approx(-(2 * math.exp(0.03) + 3 * 1.08) / 2, rel=1e-5)
    loss.backward()
    torch.testing.assert_close(logps.grad, torch.tensor([[0.0, -math.exp(0.03) / 2, -math.exp(0.03) / 2, 0.0]]))
    assert stats["clipped"].tolist() == [0, 1]


def test_plain_form_by_hand():
    """Each token has its own ratio and its own clip: 0.02 passes, 0.3 is cut at 1.2."""
    old, segment = torch.tensor([[0.0, -1.0, -2.0, -1.0]]), torch.tensor([[0, 1, 1, 2]])
    logps = (old + torch.tensor([[0.0, 0.02, 0.3, 0.01]])).requires_grad_()
    loss, stats = loss_of(logps, old, segment, [[2.0, 3.0]], form="plain")
    assert loss.item() == pytest.approx(-((math.exp(0.02) + 1.2) + 3 * math.exp(0.01)) / 2, rel=1e-5)
    loss.backward()
    torch.testing.assert_close(logps.grad, torch.tensor([[0.0, -math.exp(0.02) / 2, 0.0, -1.5 * math.exp(0.01)]]))
    assert stats["clipped"].tolist() == [0.5, 0]  # half of the tokens of that vote


def test_weights_of_tokens_scale_them():
    """min(p / q, 2) by hand; in the loss a weight scales its token alone, clipped or not."""
    weights = objective.truncated_weights(torch.tensor([[-1.0, -1.0, -3.0]]), torch.tensor([[-1.0, -3.0, -1.0]]), 2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, math.exp(-2)]]))
    logps, old, segment = logps_like([[0, 1, 1, 2]])
    wide = dict(low=torch.tensor([0.9, 0.9]), high=torch.tensor([9.0, 9.0]))
    plain = torch.autograd.grad(loss_of(logps, old, segment, [[1.5, -0.7]], **wide)[0], logps)[0]
    weight = torch.tensor([[5.0, 0.5, 2.0, 1.0]])
    heavy = loss_of(logps, old, segment, torch.tensor([[[1.5], [-0.7]]]) * weight[:, None], votes=2, **wide)[0]
    torch.testing.assert_close(torch.autograd.grad(heavy, logps)[0], plain * weight)


def test_importance_weights_correct_an_engine_that_samples_otherwise():
    """Enumerated: E_q[p / q grad loss] = E_p[grad loss]. Truncated, no term is larger than `most` times its own."""
    z = torch.tensor([0.3, -0.5, 0.1, 0.9]).requires_grad_()
    p, q, value = z.log_softmax(0), torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), torch.tensor([1.0, -1.0, 0.5, 2.0])
    exact = -torch.autograd.grad((p.exp() * value).sum(), z, retain_graph=True)[0]
    expected = torch.zeros(4)
    for a in range(4):
        now, weight = p[a][None, None], objective.truncated_weights(p[a].detach(), q[a], 99.0)
        advantage = (value[a] * weight).reshape(1, 1, 1).expand(1, 2, 1)
        loss, _ = objective.policy_loss(now, now.detach(), torch.tensor([[2]]), advantage, CLIP, votes=1)
        expected += q[a].exp() * torch.autograd.grad(loss, z, retain_graph=True)[0]
    torch.testing.assert_close(expected, exact)


def test_kl_has_the_gradient_of_the_reverse_kl():
    """Enumerated: E_p[grad (logp - ref)^2 / 2] = grad KL(p || ref)."""
    z = torch.tensor([0.3, -0.5, 0.1, 0.9]).requires_grad_()
    p, ref = z.log_softmax(0), torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    exact = torch.autograd.grad((p.exp() * (p - ref)).sum(), z, retain_graph=True)[0]
    expected = torch.zeros(4)
    for a in range(4):
        loss = objective.kl_loss(p[a][None, None], ref[a][None, None], torch.tensor([[2]]), votes=1)
        expected += p[a].exp().detach() * torch.autograd.grad(loss, z, retain_graph=True)[0]
    torch.testing.assert_close(expected, exact)


# ---------------------------------------------------------------------------------------------------------------------
# the whole estimator on a policy small enough to enumerate


class Toy:
    """First token: 0, 1 = call a tool, with an argument, and reply; 2 = answer at once. A segment has two tokens."""

    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.first, self.argument, self.reply, self.end = self.parameters = [
            torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
            for shape in (3, (2, 2), (2, 3), (3, 2))
        ]
        self.value = torch.rand(3, 2, 3, 2, generator=g, dtype=torch.float64)  # accuracy of all four
        self.tools = torch.rand(3, 2, generator=g, dtype=torch.float64)  # tool reward of first and argument
        self.penalty = -torch.rand(2, 2, generator=g, dtype=torch.float64)  # of what is thought in the tool segment

    def trajectories(self):
        """(logps (T,), segments, accuracy, tool reward with penalty) of each trajectory there is."""
        first, argument, reply, end = (x.log_softmax(-1) for x in self.parameters)
        for a, b, c, d in itertools.product(range(2), range(2), range(3), range(2)):
            logps = torch.stack([first[a], argument[a, b], reply[a, c], end[a, d]])
            yield logps, [1, 1, 2, 2], self.value[a, b, c, d], self.tools[a, b] + self.penalty[a, b]
        for d in range(2):
            logps = torch.stack([first[2], end[2, d], *torch.zeros(2, dtype=torch.float64)])
            yield logps, [2, 2, 0, 0], self.value[2, 0, 0, d], self.tools[2, 0]

    def expected_loss_gradient(self, whole_group=True, form="token"):
        """Expectation of the loss gradient; baseline = exact mean over everyone, or over those of the same choice."""
        everyone = list(self.trajectories())
        p = torch.stack([logps.sum().exp().detach() for logps, *_ in everyone])
        total = [torch.zeros_like(x) for x in self.parameters]
        for i, (logps, segment, *rewards) in enumerate(everyone):
            peers = torch.tensor([whole_group or (1 in segment) == (1 in other[1]) for other in everyone]) * p
            accuracy, tool = (
                r - sum(w * other[k] for w, other in zip(peers, everyone, strict=True)) / peers.sum()
                for k, r in enumerate(rewards, start=2)
            )
            adv = torch.stack([accuracy + tool, accuracy if 1 in segment else accuracy + tool])
            now, segment = logps[None], torch.tensor([segment])
            loss, _ = objective.policy_loss(now, now.detach(), segment, adv[None], CLIP, votes=1, form=form)
            grads = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
            for so_far, grad in zip(total, grads, strict=True):
                so_far += p[i] * (0 if grad is None else grad)
        return total

    def exact_gradient(self):
        """Of - E[accuracy + tool], halved: of the two tokens of a segment each has half of its vote."""
        value = sum(logps.sum().exp() * (accuracy + tool) for logps, _, accuracy, tool in self.trajectories())
        return torch.autograd.grad(-value / 2, self.parameters)


@pytest.mark.parametrize("form", ["token", "sequence", "plain"])
def test_expected_loss_gradient_is_the_policy_gradient(form):
    """Baseline of the whole group, carried tool rewards: E[grad loss] = -grad E[accuracy + tool] / 2 in each form."""
    toy = Toy()
    for got, exact in zip(toy.expected_loss_gradient(form=form), toy.exact_gradient(), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)


def test_who_does_not_call_carries_what_calls_would_have():
    """Callers are pushed down by what they think beyond the group's mean, and who spared himself all of it is not."""
    penalty, present = [[-0.4, 0.0], [-0.2, -0.1], [0.0, -0.1], [0.0, 0.0]], [[True, True]] * 2 + [[False, True]] * 2
    out = advantages([0] * 4, present=present, penalty=penalty, accuracy=[1.0] * 4)
    torch.testing.assert_close(out, t([-0.25, 0.05], [-0.05, -0.05], [0.0, 0.15 - 0.05], [0.0, 0.15 + 0.05]))


def test_baseline_over_callers_only_would_be_biased():
    """Why the baseline runs over the whole group: over those of one choice, the choice itself gets no gradient."""
    toy = Toy()
    got, exact = toy.expected_loss_gradient(whole_group=False)[0], toy.exact_gradient()[0]
    assert abs(got[2]) < 1e-9 < 1e-3 < abs(exact[2])
