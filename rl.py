"""HSA-RL: reinforcement learning of a tool-using agent inside its harness, credited per segment (stage 3 of HAT).

A step: tasks -> groups of G rollouts under a harness -> four rewards each -> advantages per segment -> a few optimizer
steps. objective.py has the equations, each with its variants; this file makes the rollouts and takes the steps.

    step      groups x G rollouts of the policy as it is, some groups under the original harness, some under augmented
    dropped   rollouts that could not be scored or (--cut mask) were cut by length, before any baseline; then those
              whose final advantages are all zero
    vote      each (trajectory, segment) that is left has one; each minibatch divides its sum by the same number, the
              votes of the whole global batch over the number of minibatches
    logp_old  what the engine sampled with: the first ratio is 1, and a mismatch of engine and trainer is part of it
    prompt    read once for all rollouts of a group in a micro-batch: the same gradient, half of the tokens (not where
              weights are sharded, layers recomputed or recurrent, or a group's harnesses differ)

    python rl.py                                           # small: two CPU cores, 8 minutes
    python rl.py --harness-mode fixed                      # the control: all groups under the original harness
    python rl.py --normalise grpo --no-segments --ratio plain --floor 1 --think-penalty 0     # GRPO's objective
    torchrun --nproc_per_node=2 rl.py                      # groups are sharded over ranks; a GPU each, if there are any
    torchrun --nproc_per_node=8 rl.py --shard --groups 16  # and so are weights and optimizer (fsdp.py)
    torchrun --nproc_per_node=8 rl.py --config qwen3 --harness my-harness      # a real model on GPUs, see the preset
    python rl.py --out runs/rl-small --resume              # continue after Ctrl-C or a crash; on a CPU bit for bit

Expect under small: the score of the rollouts rises from 48 to 65; on 200 unseen requests T2 rises from 52.8 to 57.6,
the score under the original harness stays at 87.5, and reasoning gets shorter by two fifths. The run ends with the same
requests before and after, and leaves OUT/model (a Hugging Face directory), reward.png, think_length.png,
trajectories.jsonl (the last evaluation, rank 0's) and, from each step that was saved, its ten worst and ten best
rollouts in rollouts-STEP.jsonl: `python harness.py trace FILE --count 20` shows them. With --keep-rollouts these are
all rollouts of all steps: `python mtp.py --rollouts "OUT/rollouts-*.jsonl"` trains an MTP head on them.

metrics.jsonl, a row per step: score = 100 x mean of accuracy and effectiveness; think/s = reasoning tokens per state;
stop/* = how rollouts ended; first_ratio_off = mean |rho - 1| before the first optimizer step (with --truncate rho is to
the trainer's own log-probs, and engine_off = mean |p_trainer / p_engine - 1| of a token says how far the engine is
off); clip/s = share of votes that the clip silences; entropy, mtp/* = of the rollouts that are trained;
accepted_length, draft_acceptance = tokens per verification and share of right drafts, with --drafts; fault_recovery =
accuracy of rollouts on which a tool failed; eval/* = the fixed slice under the original harness without faults; of the
same requests, eval/T2 = the score, each under a held-out variant of it; with tools that fail at rates of a fifth
eval/faulty = the score of all, and eval/fault_recovery = the accuracy of those on which a tool failed.
"""

import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from options import BadInput, option, parse
from common import Dist, Run, Stop, cli, digest, dist, model_digest
from curves import draw
from common import checkpoints, gpu_peak_mb, held_mb, load_checkpoint, peak_mb, save_checkpoint, seed_of, write_text

import torch
from torch import Tensor
from tqdm import tqdm

from chat import REPLY, SEGMENTS, Trajectory
from harness import Harness, run
from reword import Endpoint, Rewriter
from augment import augment
from sim import NO_FAULTS, Faults, Task, World, check_harness, make_task
from facts import REWARDS
from samples import Dimension, another_state
from model import Policy, hidden_states, learning_rate, optimizer_step, pad_batch, set_rate
from model import shared_prefix, token_logps
from fsdp import check_precision, load_optimizer_state, optimizer_state, shard, to_train, weights, whole
from mtp import Learner
from infer import Engine
from eval import collect, gather, summary, think_lengths
from eval import measure as measure_rollout
from objective import kl_loss, merged, policy_loss, segment_advantages, think_penalty, truncated_weights

# ---------------------------------------------------------------------------------------------------------------------
# options


@dataclass
class Config:
    # where from, where to
    config: str = option("small", "preset")
    model: str = option("data/base-small", "Hugging Face directory of the policy")
    harness: str = option("data/harness", "harness directory")
    world: str = option("data/world/zh.json", "world file")
    out: str = option("", "run directory; empty = the next free runs/rl-PRESET")
    resume: bool = option(False, "continue from the last checkpoint in --out")
    seed: int = option(0, "the seed of everything")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = a GPU per process if there are any")

    # rollouts: groups x group_size per step, over all ranks
    groups: int = option(12, "tasks per step", min=1)
    group_size: int = option(8, "rollouts per task (G)", min=2)
    temperature: float = option(1.0, "of sampling; top-p and top-k would break the first ratio", min=0.01)
    context: int = option(1536, "longest context in tokens", min=2)
    slots: int = option(96, "rollouts that the engine runs side by side", min=1)
    drafts: int = option(0, "tokens that the MTP head guesses ahead in rollouts; needs a head", min=0)
    deadline_s: float = option(0.0, "seconds per rollout, 0 = none; with one, no two runs are equal bit for bit", min=0)
    harness_mode: Literal["hsa", "mixed", "fixed"] = option(
        "hsa", "hsa = some groups act under augmented harnesses; mixed = some rollouts, each its own; fixed = none"
    )
    augmented: float = option(0.5, "hsa, mixed: share under an augmented harness", min=0, max=1)
    leave_out: Dimension = option("none", "hsa, mixed: a dimension in which nothing changes")
    rewriter: str = option("", "hsa, mixed: OpenAI-compatible server that rewords, in place of the word pools")
    llm: str = option("default", "model name for it")
    strange: float = option(0.5, "share of groups in rooms of unheard-of product words", min=0, max=1)
    faults: tuple[float, float, float] = option((0.1, 0.07, 0.1), "P(timeout, malformed, denied)", min=0, max=1)
    fault_ramp: int = option(0, "steps over which these rise from 0", min=0)

    # advantages; objective.py says what the variants are
    normalise: Literal["gdpo", "grpo"] = option("gdpo", "each reward in its group, or their sum")
    segments: bool = option(True, "advantages, ratios and votes per segment; no = one for the whole rollout")
    cut: Literal["mask", "fail"] = option("fail", "a rollout cut by length: left out, or every reward 0")
    condition: bool = option(False, "effectiveness counts only where accuracy is 1")
    floor: float = option(0.5, "least batch std to divide by: one informative group of many must not blow up", min=1e-6)
    think_penalty: float = option(0.5, "largest penalty per state for long reasoning (the report: 0.1)", min=0)
    think_free: int = option(20, "reasoning tokens per state that cost nothing (the report: 100)", min=0)
    think_full: int = option(72, "reasoning tokens per state that cost the whole penalty (the report: 200)", min=1)
    think_gate: float = option(0.5, "mean accuracy of a group from which on reasoning costs", min=0, max=1)

    # update
    steps: int = option(40, "rounds of rollout and update", min=1)
    minibatches: int = option(2, "optimizer steps per round", min=1)
    micro: int = option(16, "sequences per forward and rank; does not change the result", min=1)
    lr: float = option(2e-4, "AdamW learning rate", min=0)
    warmup: int = option(2, "steps of linear warmup", min=0)
    lr_end: float = option(0.1, "fraction of lr at the last step, approached linearly; 1 = constant", min=0)
    weight_decay: float = option(0.0, "of AdamW", min=0)
    mtp: Literal["keep", "measure", "train"] = option("keep", "the MTP head: as it is, or measured, or trained along")
    mtp_lr: float = option(1e-3, "AdamW learning rate of the head", min=0)
    mtp_depth: int = option(3, "drafts in a row that it learns", min=1, max=3)
    mtp_targets: Literal["soft", "hard"] = option("soft", "it learns the policy's distributions, or the sampled tokens")
    shard: bool = option(False, "each process holds its share of weights and optimizer (FSDP2)")
    precision: Literal["float32", "bfloat16"] = option("float32", "with --shard: of forward, backward and rollouts")
    recompute: bool = option(False, "backward computes each layer again: much less memory, a third more time")
    grad_clip: float = option(1.0, "largest gradient norm, over all ranks; 0 = no clip", min=0)
    ratio: Literal["token", "sequence", "plain"] = option("token", "GSPO in token form, in sequence form, or PPO's")
    clip_tool: tuple[float, float] = option((0.02, 0.03), "lo,hi of the tool segment", min=0)
    clip_reply: tuple[float, float] = option((0.02, 0.03), "lo,hi of the reply segment", min=0)
    truncate: float = option(0.0, "largest weight for engine/trainer mismatch; 0 = ratios to the engine alone", min=0)
    kl: float = option(0.0, "weight of the KL to --model, on resume too; 0 = no reference model in memory", min=0)

    # evaluation and saving
    eval_requests: int = option(200, "unseen requests of the fixed evaluation slice", min=1)
    eval_every: int = option(0, "steps between evaluations; 0 = only before and after", min=0)
    save_every: int = option(10, "steps between checkpoints", min=1)
    keep_rollouts: bool = option(False, "write down every rollout of every step, a few MB each, and not ends alone")


FAULTY = Faults(0.2, 0.15, 0.15)  # of the tools in the evaluation of recovery
SHOWN = 10  # rollouts at either end of a step that are written down with each checkpoint

PRESETS = {
    "tiny": dict(groups=2, group_size=2, steps=2, micro=2, slots=4, eval_requests=4, save_every=1),
    "small": dict(),
    "qwen3": dict(  # a start for a real model on GPUs, under a harness that lets it think; run on a toy alone
        model="Qwen/Qwen3-1.7B",
        groups=16,
        context=8192,
        slots=64,
        think_penalty=0.1,
        think_free=100,
        think_full=200,
        steps=200,
        minibatches=4,
        micro=1,
        lr=1e-6,
        warmup=10,
        lr_end=1.0,
        shard=True,
        precision="bfloat16",
        recompute=True,
        truncate=2.0,
        eval_every=50,
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# rollouts


def training_jobs(
    cfg: Config, world: World, original: Harness, step: int, groups: range, rewrite: Rewriter | None = None
) -> list[tuple]:
    """(harness, task, room, seed) per rollout. A group shares task, harness and tool faults, not its sampling seed.

    In mixed mode its members act under harnesses of their own: then what is rewarded is to do well under any of them.
    Groups, or members, of either kind take turns over the whole run, in the proportion that `augmented` says.
    """
    jobs, ramp = [], min(1.0, step / cfg.fault_ramp) if cfg.fault_ramp else 1.0
    faults = Faults(*(ramp * rate for rate in cfg.faults))
    for g in groups:
        rng = random.Random(seed_of(cfg.seed, "world", step, g))
        shop = world.strange(rng) if rng.random() < cfg.strange else world
        task = make_task(shop, seed_of(cfg.seed, "task", step, g))
        needed = {task.reply_skill, task.strategy} - {None}
        for member in range(cfg.group_size):
            own = (member,) if cfg.harness_mode == "mixed" else ()
            if own or member == 0:
                group, harness = (step - 1) * cfg.groups + g, original
                n = group * cfg.group_size + member if own else group
                if cfg.harness_mode != "fixed" and int((n + 1) * cfg.augmented) > int(n * cfg.augmented):
                    harness = another_state(original, cfg, seed_of(cfg.seed, "harness", step, g, *own), needed, rewrite)
            room = task.open(faults, seed_of(cfg.seed, "room", step, g))
            jobs.append((harness, task, room, seed_of(cfg.seed, "rollout", step, g, member)))
    return jobs


def measure(trajectory: Trajectory, cfg: Config) -> dict[str, float]:
    """What advantages and log need to know of one trajectory, in numbers, so that ranks can exchange it."""
    row = measure_rollout(trajectory)
    for name, segment in SEGMENTS.items():
        lengths = think_lengths(trajectory, segment)
        row[f"penalty/{name}"] = think_penalty(lengths, cfg.think_free, cfg.think_full, cfg.think_penalty)
    return row


def advantages_of(batch: dict[str, Tensor], groups: Tensor, cfg: Config) -> Tensor:
    """Final advantages (N, 2) of a gathered batch.

    Nobody knows what a rollout cut by length would have got: it is masked. Where most of those are loops that no limit
    would end, that lets loops spread, for nothing speaks against them; then to be cut is to fail.
    """
    cut = batch["stop/length"] > 0
    rewards = {
        name: batch[f"reward/{name}"].masked_fill(cut, 0.0 if cfg.cut == "fail" else math.nan) for name in REWARDS
    }
    scored = ~torch.stack(list(rewards.values())).isnan().all(0)
    penalty, states = (torch.stack([batch[f"{what}/{s}"] for s in SEGMENTS], 1) for what in ("penalty", "states"))
    penalty, present = (penalty, states > 0) if cfg.segments else merged(penalty, states > 0)
    return segment_advantages(rewards, penalty, present, scored, groups, cfg)


def evaluation_task(world: World, i: int) -> Task:
    """Request i of the fixed slice, the same in every run."""
    return make_task(world, seed_of("evaluation", i))


def variant(harness: Harness, task: Task) -> Harness:
    """The harness that the request meets in T2: held-out words, which no training sees."""
    return augment(harness, task.seed, pool="heldout", keep={task.reply_skill, task.strategy} - {None})[0]


def evaluate(engine: Engine, world: World, harness: Harness, cfg: Config, ranks: Dist) -> tuple[dict, list[Trajectory]]:
    """Greedy on the fixed slice: the summary over all ranks, and this rank's trajectories, under the original harness.

    Three numbers are of the same requests once more: T2, the score under their variants; and with tools that often fail
    faulty, the score of all, and fault_recovery, the accuracy of those on which one failed. Who calls less meets less.
    """
    mine = range(ranks.rank, cfg.eval_requests, ranks.world)
    tasks = [evaluation_task(world, i) for i in mine]

    def go(what: str, harnesses: list[Harness], faults: Faults) -> tuple[dict, list[Trajectory]]:
        jobs = [(h, task, task.open(faults, task.seed), task.seed) for h, task in zip(harnesses, tasks)]
        with whole(engine.policy):
            done = collect(engine, jobs, f"evaluation, {what}", ranks, greedy=True)
        return summary(gather([measure(t, cfg) for t in done], list(mine), cfg.eval_requests, ranks)), done

    same = [harness] * len(tasks)
    found, trajectories = go("T1", same, NO_FAULTS)
    found["T2"] = go("T2", [variant(harness, task) for task in tasks], NO_FAULTS)[0]["score"]
    failing = go("failing tools", same, FAULTY)[0]
    found |= {"faulty": failing["score"], "fault_recovery": failing["fault_recovery"]}
    return found, trajectories


# ---------------------------------------------------------------------------------------------------------------------
# update

Micro = tuple[list[int], Tensor, Tensor, Tensor, Tensor, int]
LENGTHS = 32  # a micro-batch is padded to a multiple of this, and as coarse is the prompt that its rows share

IDLE = Trajectory(ids=[0, 0], mask=[0, 1], logps=[0.0, 0.0], segment=[0, REPLY], think=[0, 0], state=[-1, 0])


def micro_batches(
    policy: Policy, trajectories: list[Trajectory], chosen: list[int], cfg: Config, ranks: Dist
) -> Iterator[Micro]:
    """A few of the chosen trajectories at a time: (which, ids, mask, logps, segment, shared), four of them (B, T).

    shared: leading tokens that these rows have in common. Where rows of a group have some, a micro-batch is of one
    group; elsewhere like lengths stand together. With sharded weights each rank must do what the others do: the one
    with fewer goes on with idle ones, which = [].
    """

    def common_to(which: list[int]) -> int:
        return (
            0
            if cfg.shard or cfg.recompute
            else shared_prefix(policy.model, [trajectories[i].ids for i in which], LENGTHS)
        )

    groups = [[*members] for _, members in itertools.groupby(chosen, lambda i: i // cfg.group_size)]
    if not any(map(common_to, groups)):
        groups = [sorted(chosen, key=lambda i: len(trajectories[i].ids))]
    parts = [group[start : start + cfg.micro] for group in groups for start in range(0, len(group), cfg.micro)]
    for part in ranks.in_step(parts, cfg.shard):
        which = part or []
        micro = [trajectories[i] for i in which] or [IDLE]
        columns = ([getattr(t, name) for t in micro] for name in ("ids", "mask", "logps", "segment"))
        ids, mask, logps, segment = pad_batch(*columns, bucket=LENGTHS, device=ranks.device)
        yield which, ids, mask, logps, segment if cfg.segments else segment.bool() * REPLY, common_to(which)


@dataclass
class Actors:
    """What an update reads and moves: the policy with its optimizer, what it is held to, and who learns its drafts."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: Policy | None = None
    drafter: Learner | None = None


def own_logps(policy: Policy, trajectories: list[Trajectory], kept: list[int], cfg: Config, ranks: Dist) -> dict:
    """Trajectory -> the log-probs that the trainer gives its tokens, as the engine's stand in it."""
    out = {}
    for which, ids, mask, *_, shared in micro_batches(policy, trajectories, kept, cfg, ranks):
        with torch.no_grad():
            rows = policy(forward, ids, mask, cfg.temperature, shared)[0].tolist()
        out |= {i: row[: len(trajectories[i].ids)] for i, row in zip(which, rows)}
    return out


def forward(model, ids: Tensor, mask: Tensor, temperature: float, shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies (B, T) of the sampled tokens, and the hidden states (B, T, H) that they come from."""
    hidden = hidden_states(model, ids, shared)
    return *token_logps(model, ids, mask, temperature, entropy=True, hidden=hidden), hidden


def update(actors: Actors, trajectories: list[Trajectory], advantages, minibatch, cfg: Config, ranks: Dist) -> dict:
    """One round of optimizer steps on this rank's trajectories with advantages (n, 2); what the log wants of it.

    minibatch: (n,) which optimizer step each belongs to, whichever rank holds it. Trajectories whose advantages are all
    zero are dropped, unless --kl holds them to a reference. Every rank takes the same step: a sum of loss terms under
    votes counted over all ranks.
    """
    policy, drafter = actors.policy, actors.drafter
    clip = torch.tensor([cfg.clip_tool, cfg.clip_reply], device=ranks.device)
    count, norms, cast = Counter(), [], torch.zeros(2, cfg.minibatches, device=ranks.device)
    kept = [i for i, t in enumerate(trajectories) if advantages[i].any() or (cfg.kl and any(t.mask))]
    for i in kept:
        own = sum(s in trajectories[i].segment for s in SEGMENTS.values()) if cfg.segments else 1
        cast[:, minibatch[i]] += torch.tensor([own * bool(advantages[i].any()), own], device=ranks.device)
    cast = ranks.all_reduce_sum(cast)  # votes in each minibatch: of the advantages, and of all that is read
    votes, held = (cast.sum(1) / cfg.minibatches).clamp(min=1e-9).tolist()  # the denominators of them all
    cast = cast[1].tolist()
    before = own_logps(policy, trajectories, kept, cfg, ranks) if cfg.truncate else {}
    for k in range(cfg.minibatches):
        if cast[k] == 0:
            continue
        chosen = [i for i in kept if minibatch[i] == k]
        for which, ids, mask, old, segment, shared in micro_batches(policy, trajectories, chosen, cfg, ranks):
            logps, entropy, hidden = policy(forward, ids, mask, cfg.temperature, shared)
            a = (advantages[which] if which else torch.zeros(1, len(SEGMENTS))).to(ranks.device, torch.float32)
            if which and cfg.truncate:
                rows = [trajectories[i].ids for i in which], [before[i] for i in which]
                engine, old = old, pad_batch(*rows, bucket=LENGTHS, device=ranks.device)[1]
                count.update(engine_off=((old - engine).exp() - 1).abs().mul(mask).sum().item())
                a = a[..., None] * truncated_weights(old, engine, cfg.truncate)[:, None]
            loss, stats = policy_loss(logps, old, segment, a, clip, votes, cfg.ratio)
            if actors.reference:
                with torch.no_grad():
                    anchor = actors.reference(forward, ids, mask, cfg.temperature, shared)[0]
                loss = loss + cfg.kl * bool(which) * kl_loss(logps, anchor, segment, held)
            loss.backward()
            if not which:
                continue
            if drafter:
                drafter.read(ids, mask, hidden, train=cfg.mtp == "train")
            count.update({f"{name}/{s}": x for name, each in stats.items() for s, x in zip(SEGMENTS, each.tolist())})
            count.update(loss=loss.item(), entropy=entropy.detach().sum().item(), tokens=mask.sum().item())
            if not norms:  # nothing has been updated yet: the ratio must be 1
                count.update(first=stats["deviation"].sum().item() / cast[k])
        norms.append(optimizer_step(policy.model, actors.optimizer, cfg.grad_clip, ranks))
        if drafter and cfg.mtp == "train":
            drafter.step(ranks)
    if not norms:
        return {"updates": 0}
    names = ["loss", "first", "entropy", "tokens", "engine_off"]
    names += [f"{name}/{s}" for name in ("clipped", "votes") for s in SEGMENTS]
    total = {name: x.item() for name, x in gather([{name: count[name] for name in names}], [0], 1, ranks).items()}
    log = {"updates": len(norms), "loss": total["loss"] / cfg.minibatches, "grad_norm": sum(norms) / len(norms)}
    log |= {f"clip/{s}": total[f"clipped/{s}"] / max(1, total[f"votes/{s}"]) for s in SEGMENTS}
    log |= {f"mtp/{name}": x for name, x in drafter.log(ranks).items()} if drafter else {}
    log |= {"engine_off": total["engine_off"] / total["tokens"]} if cfg.truncate else {}
    return log | {"entropy": total["entropy"] / total["tokens"], "first_ratio_off": total["first"]}


# ---------------------------------------------------------------------------------------------------------------------
# the run


def drafter_of(policy: Policy, cfg: Config) -> Learner | None:
    """Who reads the updates for the MTP head, if anybody does."""
    options = dict(temperature=cfg.temperature, soft=cfg.mtp_targets == "soft", depth=cfg.mtp_depth)
    return Learner(policy, cfg.mtp_lr, **options) if cfg.mtp != "keep" else None


def ready(path, cfg: Config, world: World, harness: Harness, ranks: Dist) -> Engine:
    """The engine over the policy at `path`; BadInput for what it cannot run, --context among it."""
    policy, deadline_s = to_train(path, cfg, ranks.device), cfg.deadline_s or None
    if policy.mtp is None and (cfg.drafts or cfg.mtp != "keep"):
        raise BadInput(f"--drafts {cfg.drafts} --mtp {cfg.mtp}: {path} has no MTP head; mtp.py trains one for it")
    engine = Engine(policy, cfg.slots, cfg.context, cfg.temperature, deadline_s=deadline_s, drafts=cfg.drafts)
    for task in (evaluation_task(world, i) for i in range(cfg.eval_requests)):
        for h in (harness, variant(harness, task)):
            turn = next(run(h, task.danmaku, task.open(), policy.codec), None)  # None: a hook denies it
            if turn and len(turn.ids) >= cfg.context:
                what = f"a prompt has {len(turn.ids)} tokens, and what follows needs room"
                raise BadInput(f"--context {cfg.context}: {what}")
    return engine


def written(
    trajectories: list[Trajectory], places: list[int], batch: dict[str, Tensor], cfg: Config, ranks: Dist
) -> list[dict]:
    """The rollouts of a step that are written down, of all ranks, by the mean of their rewards, the worst first.

    The SHOWN worst and SHOWN best, or all; what could not be scored stands at the end of all.
    """
    reward = torch.stack([batch[f"reward/{name}"] for name in REWARDS]).nanmean(0)
    order = [i for i in reward.argsort(stable=True).tolist() if cfg.keep_rollouts or not reward[i].isnan()]
    chosen = dict.fromkeys(order if cfg.keep_rollouts else order[:SHOWN] + order[-SHOWN:])
    found = {i: t.to_dict() for i, t in zip(places, trajectories) if i in chosen}
    found = {i: t for each in ranks.all(found) for i, t in each.items()}
    return [found[i] for i in chosen]


def acceptance(stats: dict, ranks: Dist) -> dict[str, float]:
    """Of the engine's last run on all ranks: tokens that a verification yields, and the share of right drafts."""
    right = sum(n * times for n, times in enumerate(stats["accepted"]))
    sums = [sum(stats["accepted"]), stats["yielded"], right, stats["drafted"]]
    sums = ranks.all_reduce_sum(torch.tensor(sums, dtype=torch.float64, device=ranks.device)).tolist()
    times, yielded, right, drafted = sums
    return {"accepted_length": yielded / times, "draft_acceptance": right / drafted} if times else {}


def train_step(
    step: int, engine: Engine, actors: Actors, jobs: Callable[[int, range], list[tuple]], cfg: Config, ranks: Dist
) -> tuple[dict, list[dict]]:
    """Rollout, advantages, update: the log of the step, and the rollouts that are written down.

    All randomness is seeded by (seed, step, index): a resumed step is the same step.
    """
    started = time.perf_counter()
    mine = range(ranks.rank, cfg.groups, ranks.world)
    with whole(engine.policy):
        trajectories = collect(engine, jobs(step, mine), f"rollouts {step}", ranks)

    groups = torch.arange(cfg.groups).repeat_interleave(cfg.group_size)  # (N,) of the global batch
    places = [g * cfg.group_size + m for g in mine for m in range(cfg.group_size)]
    batch = gather([measure(t, cfg) for t in trajectories], places, len(groups), ranks)
    rollout_s = time.perf_counter() - started  # until the last rank has rolled out
    if batch["tokens"].sum() == 0:
        raise BadInput(f"step {step}: no rollout sampled a token; look at --context {cfg.context} and --deadline-s")
    advantages = advantages_of(batch, groups, cfg)
    order = torch.randperm(cfg.groups, generator=torch.Generator().manual_seed(seed_of(cfg.seed, "minibatch", step)))

    lr = set_rate(actors.optimizer, learning_rate(step, cfg.steps, cfg))
    minibatch = order[groups] % cfg.minibatches
    drafted = acceptance(engine.stats, ranks) if cfg.drafts else {}
    log = summary(batch) | update(actors, trajectories, advantages[places], minibatch[places], cfg, ranks) | drafted

    kept = advantages.any(1)
    log |= {"dropped": int((~kept).sum()), "dropped_groups": cfg.groups - len(groups[kept].unique())}
    log |= {"lr": lr}
    log |= {"tokens_per_s": float(batch["tokens"].sum()) / rollout_s, "rollout_s": rollout_s}
    log |= {"update_s": time.perf_counter() - started - rollout_s, "peak_mb": peak_mb(), "held_mb": held_mb()}
    log |= {"gpu_peak_mb": mb} if (mb := gpu_peak_mb()) else {}
    return log, written(trajectories, places, batch, cfg, ranks)


def check(cfg: Config, processes: int) -> None:
    """BadInput for options that do not go together."""
    if cfg.groups % processes or cfg.eval_requests < processes:
        raise BadInput(f"--groups must be a multiple of the {processes} processes, --eval-requests no less than them")
    if cfg.shard and cfg.mtp != "keep":
        raise BadInput("--shard and --mtp: a head is not trained on a sharded policy; train it afterwards with mtp.py")
    check_precision(cfg)
    if cfg.think_full <= cfg.think_free:
        raise BadInput(f"--think-full {cfg.think_full} must be above --think-free {cfg.think_free}")


def main(argv: list[str]):
    cfg = parse(Config, PRESETS, argv, __doc__)
    ranks = dist(None if cfg.device == "auto" else cfg.device, cfg.shard)
    check(cfg, ranks.world)
    world, unseen = World.load(cfg.world, "train"), World.load(cfg.world, "test")
    check_harness(harness := Harness.load(cfg.harness))
    # before Run, so that what is refused leaves no directory
    engine = None if cfg.resume else ready(cfg.model, cfg, unseen, harness, ranks)
    reference = to_train(cfg.model, cfg, ranks.device) if cfg.kl else None
    rewrite = Endpoint(cfg.rewriter, cfg.llm) if cfg.rewriter else None
    jobs = partial(training_jobs, cfg, world, harness, rewrite=rewrite)

    free = ("steps",) if cfg.lr_end == 1 else ()  # else the rate of every step depends on how many there are
    inputs = {"harness_commit": harness.commit, "world_digest": digest(cfg.world)}
    inputs |= {"reference": model_digest(cfg.model)} if cfg.kl else {}
    record = Run(cfg.out, cfg, cfg.resume, f"runs/rl-{cfg.config}", ranks, free, inputs)
    saved = load_checkpoint(record.dir, ranks) if checkpoints(record.dir) else None
    engine = engine or ready(saved[1] if saved else cfg.model, cfg, unseen, harness, ranks)
    policy, before, after = engine.policy, {}, {}
    for each in (policy, reference) if cfg.shard else ():
        if each:
            shard(each, ranks.device, cfg.precision)
    optimizer = torch.optim.AdamW(policy.model.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    actors = Actors(policy, optimizer, reference, drafter := drafter_of(policy, cfg))
    if saved:
        load_optimizer_state(policy, optimizer, saved[2].pop("optimizer"))
        if drafter:
            drafter.optimizer.load_state_dict(saved[2]["drafter"])
        before, after = saved[2]["before"], saved[2]["after"]

    def keep(name: str, rows: list[dict]) -> None:
        if ranks.rank == 0 and rows:
            write_text(record.dir / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    with Stop(ranks) as stop, tqdm(desc="steps", initial=record.start, total=cfg.steps, disable=ranks.rank > 0) as bar:
        for step in range(record.start + 1 if saved else 0, cfg.steps + 1):  # step 0 only evaluates
            log, shown = {}, []
            if step:
                log, shown = train_step(step, engine, actors, jobs, cfg, ranks)
            if step in (0, cfg.steps) or (cfg.eval_every and step % cfg.eval_every == 0):
                after, trajectories = evaluate(engine, unseen, harness, cfg, ranks)
                before = before or after
                log |= {f"eval/{name}": value for name, value in after.items()}
                keep("trajectories.jsonl", [t.to_dict() for t in trajectories])
            record.log(step, **log)
            stopping = stop.requested
            saving = step == cfg.steps or step % cfg.save_every == 0 or stopping
            if saving or cfg.keep_rollouts:
                keep(f"rollouts-{step:06d}.jsonl", shown)
            if saving:
                state = {"optimizer": optimizer_state(policy, optimizer), "before": before, "after": after}
                state |= {"drafter": drafter.optimizer.state_dict()} if drafter else {}
                save_checkpoint(record.dir, step, partial(policy.save, weights=weights(policy)), state, ranks)
            if step:
                names = ("score", "think/tool", "think/reply", "stop/length", "tokens_per_s")
                bar.set_postfix({k: f"{log[k]:.3g}" for k in names})
                bar.update()
            if stopping:
                break

    final = weights(policy)
    if ranks.rank == 0:
        policy.publish(record.dir / "model", final)
        draw(record.dir, "reward.png", "mean reward of the rollouts", list(REWARDS))
        draw(record.dir, "think_length.png", "reasoning tokens per state", [f"think/{s}" for s in SEGMENTS])
        record.say(f"{cfg.eval_requests} unseen requests      before       after")
        for name in ("score", "T2", "faulty", *REWARDS, "fault_recovery", *(f"think/{s}" for s in SEGMENTS)):
            record.say(f"{name:22} {before[name]:>10.3f}  {after[name]:>10.3f}")
        record.say(f"{record.dir}: model/, trajectories.jsonl, reward.png, think_length.png")
    ranks.barrier()  # nobody leaves while another still writes


if __name__ == "__main__":
    cli(main)
