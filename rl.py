"""HSA-RL: reinforcement learning of a tool-using agent inside its harness, credited per segment (stage 3 of HAT).

G rollouts of one task under one harness are a group. Four rewards r_k (accuracy, effectiveness, tool rationality, skill
selection) are credited to two segments s of a rollout, its tool-call states and its reply states, by REWARD_TABLE:

    A_s     = sum_k w_sk (r_k - mean_G r_k) / (std_G r_k + 1e-4)     each reward in its group (GDPO); std 0 -> exactly 0
    A_hat_s = A_s / max(std_batch A_s, floor) + pen_s                one scale for the batch, bounded by the floor
    p_i     = sum over states of s: -0.1 clip((L_think - free) / (full - free), 0, 1)
    pen_s   = p_i - mean_G p                                         short reasoning: centred in the group, never scaled
    rho_s   = exp(mean_{t in s}(logp_t - logp_old_t))                one ratio per segment (GSPO), over sampled tokens
    rho_st  = sg[rho_s] exp(logp_t - sg[logp_t])                     its token form
    loss    = - mean over (trajectory, segment) of mean_{t in s} min(rho_st A_hat_s, clip(rho_st, 1 - lo_s, 1 + hi_s) A_hat_s)

logp_old are the log-probs the engine sampled with, so the very first ratio is 1 and engine/trainer mismatch is part of
the ratio. Rollouts that were cut by length, or could not be scored, join neither baseline nor loss; rollouts whose
final advantages are all zero are dropped. Each (trajectory, segment) has one vote, counted over the whole global batch.

Left out until augment.py: groups under augmented harnesses (`harness_for` is the one place they plug in) and the fault
curriculum. Left out altogether: a critic, and a separate mismatch weight (the stored log-probs make it unnecessary).

    python rl.py                                           # small: two CPU cores, about 8 minutes
    python rl.py --config qwen36 --model PATH              # one machine with GPUs
    torchrun --nproc_per_node=8 rl.py --config qwen36      # groups are sharded over ranks
    python rl.py --out runs/rl-small --resume              # continue after Ctrl-C or a crash, bit for bit

Expect under small: accuracy and effectiveness rise, reasoning gets shorter. The run ends with both measured on the same
200 unseen requests before and after, and leaves OUT/model (a Hugging Face directory), reward.png and think_length.png.
"""

import json
import math
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import common  # before torch: it sets the OpenMP environment
from common import BadInput, seed_of

import torch
from torch import Tensor
from tqdm import tqdm

from chat import REPLY, TOOL, StopReason, Trajectory
from harness import Harness, run
from sim import World, make_task, score
from infer import Engine
import model

# ---------------------------------------------------------------------------------------------------------------------
# options


@dataclass
class Config:
    # where from, where to
    config: str = "small"  # preset: tiny | small | smollm2 | qwen36
    model: str = "data/base-small"  # Hugging Face directory of the policy
    layers: int = 0  # 0 = the weights of --model; n = new random weights with n layers and its tokenizer (tests)
    harness: str = "data/harness"  # harness directory
    world: str = "data/world/zh"  # world directory
    out: str = ""  # run directory
    resume: bool = False  # continue from the last checkpoint in --out
    seed: int = 0  # the seed of everything
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations

    # rollouts: groups x group_size per step, over all ranks
    groups: int = field(default=12, metadata={"min": 1})  # tasks per step
    group_size: int = field(default=8, metadata={"min": 1})  # G, rollouts per task
    temperature: float = 1.0  # of sampling; there is no top-p or top-k, which the trainer's log-probs could not mirror
    context: int = 1024  # longest context in tokens
    slots: int = 96  # rollouts that the engine runs side by side
    faults: float = field(default=0.1, metadata={"min": 0, "max": 1})  # probability that a tool call fails

    # advantages
    floor: float = 0.5  # least batch std to divide by: one informative group among many must not blow up
    think_penalty: float = 0.1  # largest penalty per state for long reasoning
    think_free: int = 12  # reasoning tokens per state that cost nothing (the report: 100)
    think_full: int = 24  # reasoning tokens per state that cost the whole penalty (the report: 200)

    # update
    steps: int = 25  # rounds of rollout and update
    minibatches: int = field(default=2, metadata={"min": 1})  # optimizer steps per round
    micro: int = field(default=16, metadata={"min": 1})  # sequences per forward and rank; does not change the result
    lr: float = 5e-4  # AdamW learning rate
    warmup: int = 2  # steps of linear warmup
    lr_end: float = 1.0  # fraction of lr at the last step, approached linearly; 1 = constant
    weight_decay: float = 0.0  # of AdamW
    grad_clip: float = 1.0  # largest gradient norm, over all ranks
    clip_tool: tuple[float, float] = (0.10, 0.15)  # lo,hi of the tool segment: few tokens, so its ratio moves more
    clip_reply: tuple[float, float] = (0.05, 0.08)  # lo,hi of the reply segment
    kl: float = 0.0  # weight of the KL to the starting policy; 0 = no reference model in memory

    # evaluation and saving
    eval_requests: int = 200  # unseen requests of the fixed evaluation slice
    eval_every: int = 0  # steps between evaluations; 0 = only before and after
    save_every: int = field(default=10, metadata={"min": 1})  # steps between checkpoints


PRESETS = {
    "tiny": dict(layers=2, groups=2, group_size=2, steps=2, micro=2, slots=4, eval_requests=4, save_every=1),
    "small": dict(),
    "smollm2": dict(
        model="data/smollm2", world="data/world/en", groups=16, steps=50, micro=4, lr=1e-5, context=4096,
        think_free=100, think_full=200
    ),
    "qwen36": dict(
        model="Qwen/Qwen3.6-35B-A3B", dtype="bfloat16", groups=64, group_size=16, context=16384, slots=256, steps=200,
        minibatches=4, micro=1, lr=1e-6, warmup=10, think_free=100, think_full=200, eval_every=20,
        clip_tool=(1e-3, 2e-3), clip_reply=(3e-4, 4e-4)
    ),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# advantages: numbers of the whole global batch in, one advantage per (trajectory, segment) out. NaN = not scored.

SEGMENTS = {"tool": TOOL, "reply": REPLY}
REWARDS = ("accuracy", "effectiveness", "tool", "skill")
# Which reward counts in which segment, and how much. Tool calls get the facts, so accuracy is theirs too.
REWARD_TABLE = {
    "tool": {"tool": 1.0, "skill": 1.0, "accuracy": 1.0},
    "reply": {"accuracy": 1.0, "effectiveness": 1.0},
}


def centred(x: Tensor) -> Tensor:
    """x - mean; exactly 0 for equal values, where rounding of the mean would leave a residue that std blows up."""
    return torch.zeros_like(x) if bool((x == x[0]).all()) else x - x.mean()


def gdpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """One reward normalised in its group: (r - mean_G) / (std_G + 1e-4). (N,), (N,) group ids -> (N,).

    NaN (not scored) leaves mean and std and gets 0. Constant groups, G = 1 among them, get exactly 0; groups may differ
    in size. The std is that of the population, so that |result| <= sqrt(G - 1).
    """
    out = torch.zeros_like(rewards)
    for group in groups.unique():
        member = (groups == group) & ~rewards.isnan()
        if member.any():
            r = rewards[member]
            out[member] = centred(r) / (r.std(correction=0) + 1e-4)
    return out


def think_penalty(tokens: int, free: int, full: int, size: float = 0.1) -> float:
    """Penalty of one state with that many reasoning tokens: 0 up to `free`, then linear, -size from `full` on."""
    return -size * min(max((tokens - free) / (full - free), 0.0), 1.0)


def segment_advantages(
    rewards: dict[str, Tensor], penalty: Tensor, present: Tensor, valid: Tensor, groups: Tensor, floor: float
) -> Tensor:
    """A_hat of the header for each trajectory and segment: (N, 2), columns tool and reply.

    rewards: name -> (N,), NaN = not scored; penalty: p_i (N, 2); present: (N, 2) the trajectory has tokens in the segment;
    valid: (N,) False for truncated or unscored ones, which leave every baseline; groups: (N,) ids.

    Every baseline runs over the whole group, whether or not a trajectory has the segment: "those that called a tool" is
    the policy's own choice, and a baseline that depends on it is biased. The choice not to call is made in the first
    state, so a trajectory without tool calls carries the rewards of the tool segment on its reply segment.
    """
    normal = {name: gdpo(r.masked_fill(~valid, math.nan), groups) for name, r in rewards.items()}
    out = torch.zeros_like(penalty)
    if not valid.any():
        return out
    weights = REWARD_TABLE["reply"]
    carried = sum(w * normal[name] for name, w in REWARD_TABLE["tool"].items() if name not in weights)
    for s, segment in enumerate(SEGMENTS):
        a = sum(w * normal[name] for name, w in REWARD_TABLE[segment].items())
        if segment == "reply":
            a = torch.where(present[:, 0], a, a + carried)
        out[:, s] = a / max(float(a[valid].std(correction=0)), floor)
        for group in groups.unique():
            member = (groups == group) & valid
            if member.any():
                out[member, s] += centred(penalty[member, s])
    return out.where(present & valid[:, None], 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# loss


def membership(segment: Tensor) -> Tensor:
    """Segment ids (B, T) -> 0/1 weights (B, 2, T): which tokens belong to the tool and to the reply segment."""
    return torch.stack([segment == s for s in SEGMENTS.values()], dim=1).float()


def mean_over(x: Tensor, member: Tensor) -> Tensor:
    """Mean of x (B, 2 or 1, T) over the tokens of each segment (B, 2, T) -> (B, 2); 0 for an empty segment."""
    return (x * member).sum(-1) / member.sum(-1).clamp(min=1)


def gspo_loss(
    logps: Tensor, old: Tensor, segment: Tensor, advantages: Tensor, low: Tensor, high: Tensor, votes: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the header on a micro-batch, and its sums per segment for the log.

    logps, old: (B, T) of the trainer now (with gradient) and of the engine then; segment: (B, T) 0 = not trained;
    advantages: (B, 2); low, high: (2,) clip ranges; votes: (trajectory, segment) pairs of the *global* batch, so that
    neither micro-batches nor ranks change the gradient.
    """
    member = membership(segment)  # (B, 2, T)
    log_ratio = mean_over((logps.detach() - old)[:, None], member)  # (B, 2)
    gradient = (logps - logps.detach()).exp()[:, None]  # (B, 1, T) value 1, carries the gradient of each token
    ratio = log_ratio.exp()[..., None] * gradient  # (B, 2, T)
    clipped = ratio.clamp(1 - low[:, None], 1 + high[:, None])
    a = advantages[..., None]
    loss = -mean_over(torch.minimum(ratio * a, clipped * a), member).sum() / votes

    with torch.no_grad():
        exists = member.any(-1)  # (B, 2)
        r = log_ratio.exp()
        bites = torch.where(advantages > 0, r > 1 + high, r < 1 - low) & (advantages != 0) & exists
        stats = {"clipped": bites.sum(0), "votes": exists.sum(0), "deviation": ((r - 1).abs() * exists).sum(0)}
    return loss, stats


def kl_loss(logps: Tensor, reference: Tensor, segment: Tensor, votes: float) -> Tensor:
    """KL to a reference with the votes of the policy loss, as (logp - ref)^2 / 2.

    Its gradient (logp - ref) grad logp is that of the reverse KL in expectation; that of logp - ref itself is zero.
    """
    return mean_over((logps - reference).square()[:, None] / 2, membership(segment)).sum() / votes


# ---------------------------------------------------------------------------------------------------------------------
# rollouts


def harness_for(original: Harness, group: int) -> Harness:
    """The harness of a group: the original one. HSA plugs in here."""
    return original


def collect(engine: Engine, policy, jobs: list[tuple], greedy: bool = False) -> list[Trajectory]:
    """Roll out and score jobs of (harness, task, room, seed), all in one batch of the engine."""
    loops = [run(harness, task.request, room, policy.codec, seed) for harness, task, room, seed in jobs]
    trajectories = engine.run(loops, [seed for *_, seed in jobs], greedy=greedy)
    for (harness, task, *_), trajectory in zip(jobs, trajectories, strict=True):
        trajectory.rewards = score(harness, task, trajectory)
    return trajectories


def training_jobs(cfg: Config, world: World, original: Harness, step: int, groups: range) -> list[tuple]:
    """The rollouts of these groups. Members share task, harness and tool faults; only their sampling seed differs."""
    jobs = []
    for g in groups:
        harness, task = harness_for(original, g), make_task(world, seed_of(cfg.seed, "task", step, g))
        for member in range(cfg.group_size):
            room = task.open(cfg.faults, seed_of(cfg.seed, "room", step, g))
            jobs.append((harness, task, room, seed_of(cfg.seed, "rollout", step, g, member)))
    return jobs


def facts(trajectory: Trajectory, cfg: Config) -> dict[str, float]:
    """What advantages and log need of one trajectory, as numbers (NaN = not scored), so that ranks can exchange it."""
    rewards = {name: trajectory.rewards.get(name) for name in REWARDS}
    row = {f"reward/{name}": math.nan if r is None else float(r) for name, r in rewards.items()}
    row |= {f"stop/{reason}": float(trajectory.stop_reason == reason) for reason in get_args(StopReason)}
    row["tokens"] = sum(trajectory.mask)
    states = trajectory.states()
    for name, segment in SEGMENTS.items():
        think = [sum(trajectory.think[t] for t in positions) for s, positions in states if s == segment]
        row[f"states/{name}"], row[f"think/{name}"] = len(think), sum(think)
        row[f"penalty/{name}"] = sum(
            think_penalty(n, cfg.think_free, cfg.think_full, cfg.think_penalty) for n in think
        )
    return row


def gather(rows: list[dict[str, float]], places: list[int], total: int, ranks: Dist) -> dict[str, Tensor]:
    """The rows of all ranks, each at its place in the global batch, as columns (total,) that every rank holds."""
    table = torch.zeros(total, len(rows[0]), dtype=torch.float64)
    table[places] = torch.tensor([list(row.values()) for row in rows], dtype=torch.float64)
    table = ranks.all_reduce_sum(table.to(ranks.device)).cpu()
    return dict(zip(rows[0], table.T, strict=True))


def advantages_of(batch: dict[str, Tensor], groups: Tensor, cfg: Config) -> Tensor:
    """(N, 2) final advantages of a global batch of `facts`; all zero for truncated and unscored trajectories."""
    rewards = {name: batch[f"reward/{name}"] for name in REWARDS}
    scored = ~torch.stack([r.isnan() for r in rewards.values()]).all(0)
    penalty, states = (torch.stack([batch[f"{what}/{s}"] for s in SEGMENTS], 1) for what in ("penalty", "states"))
    return segment_advantages(rewards, penalty, states > 0, scored & (batch["stop/length"] == 0), groups, cfg.floor)


# ---------------------------------------------------------------------------------------------------------------------
# update


def update(policy, reference, optimizer, trajectories, advantages, part, cfg: Config, ranks: Dist) -> dict[str, float]:
    """One round of optimizer steps on this rank's trajectories (advantages (n, 2)); returns what the log wants.

    part: (n,) the minibatch of each trajectory, the same whichever rank holds it. Trajectories whose advantages are all
    zero are dropped here. All ranks take the same steps on the same gradient: sums of loss terms under global votes.
    """
    low, high = torch.tensor([cfg.clip_tool, cfg.clip_reply], device=ranks.device).T
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    sums = dict.fromkeys(("clipped/tool", "clipped/reply", "votes/tool", "votes/reply", "entropy", "tokens"), 0.0)
    first, norms = None, []
    for k in range(cfg.minibatches):
        chosen = [i for i, a in enumerate(advantages) if part[i] == k and a.any()]
        chosen.sort(key=lambda i: len(trajectories[i].ids))  # similar lengths together: less padding
        present = torch.tensor([[s in trajectories[i].segment for s in SEGMENTS.values()] for i in chosen])
        votes = float(ranks.all_reduce_sum(present.sum().double().to(ranks.device)))
        if votes == 0:
            continue
        total = torch.zeros(8, dtype=torch.float64, device=ranks.device)
        for i in range(0, len(chosen), cfg.micro):
            micro = chosen[i : i + cfg.micro]
            total += backward(policy, reference, [trajectories[j] for j in micro], advantages[micro], low, high, votes, cfg)
        for p in parameters:  # a rank without samples still takes part
            p.grad = ranks.all_reduce_sum(torch.zeros_like(p) if p.grad is None else p.grad)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, cfg.grad_clip, error_if_nonfinite=True)))
        optimizer.step()
        optimizer.zero_grad()
        ...
