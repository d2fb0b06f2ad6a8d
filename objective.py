"""The objective of HSA-RL as small pure functions: rewards -> advantages of each segment -> loss.

G rollouts of one task are a group. Four rewards r_k are credited to two segments s of a rollout, its tool-call states
and its reply states, by REWARD_TABLE:

    A_s     = sum_k w_sk (r_k - mean_G r_k) / (std_G r_k + 1e-4)     each reward in its group (GDPO); std 0 -> exactly 0
    A_hat_s = A_s / max(std_batch A_s, floor) + pen_s                one scale for the batch, bounded by the floor
    p_i     = sum over states of s: -size clip((L_think - free) / (full - free), 0, 1), at least -MOST
    pen_s   = p_i - mean_G p                                         short reasoning: centred in the group, never scaled
    rho_s   = exp(mean_{t in s}(logp_t - logp_old_t))                one ratio per segment (GSPO), over sampled tokens
    rho_st  = sg[rho_s] exp(logp_t - sg[logp_t])                     its token form
    loss    = - mean over (trajectory, segment) of mean_{t in s} min(rho_st A, clip(rho_st, 1 - lo_s, 1 + hi_s) A)

A is A_hat_s and sg stops the gradient. Each variant differs in one readable place:

    normalise  gdpo  each reward in its group, then the sum     grpo  the sum of the rewards in its group
    ratio      token rho_st   sequence rho_s with its gradient   plain exp(logp_t - logp_old_t), as PPO and GRPO
    segments   False = the whole rollout is one reply segment (`merged`), which then carries every reward
    condition  effectiveness counts only where accuracy is 1 (GDPO's conditioned reward: the harder one first)
    think_gate long reasoning is penalised only in groups whose mean accuracy reaches this

The token form exists because the advantages of two segments meet in one sequence: a ratio over the whole sequence would
smear them. Within a segment whose tokens weigh the same both forms have the same gradient. Numbers of the whole global
batch come in, on every rank, so that no rank needs to know which groups the others hold. NaN = not scored.

Left out: a critic, and advantages within a segment: its tokens share one.
"""

import math
from collections.abc import Callable
from typing import Literal, Protocol

import common  # noqa: F401  before torch: it sets the OpenMP environment
import torch
from torch import Tensor

from chat import SEGMENTS  # the columns of everything that is (N, 2) below

# Which reward counts in which segment, and how much. Tool calls get the facts, so accuracy is theirs too.
REWARD_TABLE = {
    "tool": {"tool": 1.0, "skill": 1.0, "accuracy": 1.0},
    "reply": {"accuracy": 1.0, "effectiveness": 1.0},
}


# Six states at the size of the report, 0.1. In a batch of the largest scale accuracy alone is worth 2 / 3 where three
# rewards are credited, so what is right ranks above what is wrong at any length; where all four are, it is worth 1 / 2.
MOST = 0.6


class Rules(Protocol):
    """What of the options of rl.py the advantages depend on."""

    normalise: Literal["gdpo", "grpo"]
    floor: float
    condition: bool
    think_gate: float


# ---------------------------------------------------------------------------------------------------------------------
# advantages


def centred(x: Tensor) -> Tensor:
    """x - mean; exactly 0 for equal values, where rounding of the mean would leave a residue that std blows up."""
    return torch.zeros_like(x) if bool((x == x[0]).all()) else x - x.mean()


def in_groups(x: Tensor, groups: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function of the values of each group, in place of them. x (N,): NaN stays out and gets 0; groups (N,): ids."""
    out = torch.zeros_like(x)
    for group in groups.unique():
        member = (groups == group) & ~x.isnan()
        if member.any():
            out[member] = function(x[member])
    return out


def normalised(rewards: Tensor, groups: Tensor) -> Tensor:
    """One reward in its group: (r - mean_G) / (std_G + 1e-4). (N,), (N,) group ids -> (N,).

    NaN (not scored) leaves mean and std and gets 0. Constant groups, G = 1 among them, get exactly 0; groups may differ
    in size. The std is that of the population, so that |result| <= sqrt(G - 1).
    """
    return in_groups(rewards, groups, lambda r: centred(r) / (r.std(correction=0) + 1e-4))


def credited(rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor, normalise: str) -> Tensor:
    """Rewards (N,) each -> one advantage (N,) by their weights.

    gdpo keeps what sums lose: with (1, 0) and (0, 1) in a group the sum is constant, and each of the two is not. grpo
    is that sum. A rollout that lacks one of the rewards has no sum either, and gets 0.
    """
    if normalise == "grpo":
        return normalised(sum(w * rewards[name] for name, w in weights.items()), groups)
    return sum(w * normalised(rewards[name], groups) for name, w in weights.items())


def conditioned(rewards: dict[str, Tensor]) -> dict[str, Tensor]:
    """effectiveness 0 unless accuracy is 1: a complete answer that is false must not be worth half. NaN stays NaN."""
    unearned = 0.0 * (rewards["accuracy"] + rewards["effectiveness"])
    return rewards | {"effectiveness": rewards["effectiveness"].where(rewards["accuracy"] >= 1, unearned)}


def think_penalty(states: list[int], free: int, full: int, size: float = 0.1) -> float:
    """p_i of a segment whose states have so many reasoning tokens: 0 up to `free`, linear, -size from `full` on.

    Never below -MOST: what is right must rank above what is wrong and short.
    """
    return -min(size * sum(min(max((n - free) / (full - free), 0.0), 1.0) for n in states), MOST)


def segment_advantages(
    rewards: dict[str, Tensor], penalty: Tensor, present: Tensor, valid: Tensor, groups: Tensor, rules: Rules
) -> Tensor:
    """A_hat of the header for each trajectory and segment: (N, 2), columns tool and reply.

    rewards: name -> (N,), NaN = not scored; penalty: p_i (N, 2); present (N, 2): the trajectory has that segment; valid
    (N,): False for those that are not scored or masked, which leave every baseline; groups (N,): ids.

    Every baseline runs over the whole group, whether or not a trajectory has the segment: "those that called a tool" is
    the policy's own choice, and a baseline that depends on it is biased. The choice not to call is made in the first
    state, so a trajectory without tool calls carries on its reply segment what a tool segment would have had: rewards,
    and the penalty that it has been spared.
    """
    out = torch.zeros_like(penalty)
    if not valid.any():
        return out
    rewards = {name: r.masked_fill(~valid, math.nan) for name, r in rewards.items()}
    rewards = conditioned(rewards) if rules.condition else rewards
    right = in_groups(rewards["accuracy"], groups, lambda r: r.mean().expand_as(r))
    everything = REWARD_TABLE["tool"] | REWARD_TABLE["reply"]
    pens = [in_groups(p, groups, centred) for p in penalty.masked_fill(~valid[:, None], math.nan).unbind(1)]
    pens = torch.stack(pens, 1) * (right >= rules.think_gate)[:, None]  # (N, 2)
    pens[:, 1] += pens[:, 0].masked_fill(present[:, 0], 0.0)
    for s, segment in enumerate(SEGMENTS):
        a, pen = credited(rewards, REWARD_TABLE[segment], groups, rules.normalise), pens[:, s]
        if segment == "reply":
            a = a.where(present[:, 0], credited(rewards, everything, groups, rules.normalise))
        out[:, s] = a / max(float(a[valid].std(correction=0)), rules.floor) + pen
    return out.where(present & valid[:, None], 0.0)


def merged(penalty: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """penalty and present (N, 2) when a rollout is one segment: all of it is a reply, which carries every reward."""
    total = penalty.sum(1).clamp(min=-MOST)
    whole = torch.stack([torch.zeros_like(present[:, 0]), present.any(1)], 1)
    return torch.stack([torch.zeros_like(total), total], 1), whole


# ---------------------------------------------------------------------------------------------------------------------
# loss


def membership(segment: Tensor) -> Tensor:
    """Segment ids (B, T) -> 0/1 weights (B, 2, T): which tokens belong to the tool and to the reply segment."""
    return torch.stack([segment == s for s in SEGMENTS.values()], dim=1).float()


def mean_over(x: Tensor, member: Tensor) -> Tensor:
    """Mean of x (B, 2 or 1, T) over the tokens of each segment (B, 2, T) -> (B, 2); 0 for an empty segment."""
    return (x * member).sum(-1) / member.sum(-1).clamp(min=1)


def ratio_of(logps: Tensor, old: Tensor, member: Tensor, form: str) -> Tensor:
    """rho of the header in one of its three forms, for each token of each segment: (B, 2 or 1, T).

    token     the value of the segment's ratio, the gradient of each token alone
    sequence  the segment's ratio itself: its tokens share value and gradient (GSPO)
    plain     each token's own ratio (PPO, GRPO)
    """
    if form == "plain":
        return (logps - old).exp()[:, None]
    whole = mean_over((logps - old)[:, None], member)[..., None].exp()  # (B, 2, 1)
    if form == "sequence":
        return whole.expand_as(member)
    return whole.detach() * (logps - logps.detach()).exp()[:, None]


def policy_loss(
    logps: Tensor, old: Tensor, segment: Tensor, advantages: Tensor, clip: Tensor, votes: float, form: str = "token"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the header on a micro-batch, and its sums per segment for the log.

    logps, old: (B, T) of the trainer now (with gradient) and of the policy that sampled; segment: (B, T), 0 = not
    trained; advantages: (B, 2), or (B, 2, T) with a weight for each token in it; clip: (2, 2) with lo, hi of each
    segment; votes: the denominator, (trajectory, segment) pairs of the *global* batch over the number of minibatches,
    so that neither micro-batches nor ranks nor their sizes change the gradient.
    """
    member = membership(segment)  # (B, 2, T)
    low, high = (1 + sign * clip[:, i, None] for i, sign in enumerate((-1, 1)))  # (2, 1) each
    ratio = ratio_of(logps, old, member, form)
    a = advantages if advantages.dim() == 3 else advantages[..., None]
    loss = -mean_over(torch.minimum(ratio * a, ratio.clamp(low, high) * a), member).sum() / votes

    with torch.no_grad():
        bites = torch.where(a > 0, ratio > high, ratio < low) & (a != 0)
        away = (ratio - 1).abs()
        stats = {"clipped": mean_over(bites.float(), member), "deviation": mean_over(away, member)}
        stats = {name: x.sum(0) for name, x in stats.items()} | {"votes": member.any(-1).sum(0)}
    return loss, stats


def truncated_weights(trainer: Tensor, engine: Tensor, most: float) -> Tensor:
    """min(p_trainer / p_engine, most) of each token, (B, T): importance weights for what an engine samples otherwise.

    For an engine whose log-probs differ from the trainer's (another precision, quantised weights, a remote server): the
    ratio is then taken against the trainer's own log-probs, and the loss of each token has this weight.
    """
    return (trainer - engine).exp().clamp(max=most)


def kl_loss(logps: Tensor, reference: Tensor, segment: Tensor, votes: float) -> Tensor:
    """KL to a reference with the votes of the policy loss: the k2 estimator, (logp - ref)^2 / 2.

    Its gradient (logp - ref) grad logp is, token by token, that of the reverse KL of the next token, in expectation. As
    a loss k1, logp - ref, has gradient 0 in expectation, and k3, exp(ref - logp) - 1 - ref + logp, that of the forward
    KL. Left out: what a token does to the KL of those after it; a correction once the policy has moved in a round.
    """
    return mean_over((logps - reference).square()[:, None] / 2, membership(segment)).sum() / votes
