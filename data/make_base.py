"""Pre-trains the base model of the small world from scratch: echoes, general instructions, dialogues under random harnesses.

    loss = - sum_t m_t log p(y_t | y_<t) / sum_t m_t        m_t = 1 on what an assistant says (one denominator per step)

A base must be able to *read* a harness without knowing any: every dialogue shows another one, with its own names, descriptions,
order, headings and rule values. So it must copy what it has never seen. Dialogues teach that very slowly; before the first step
stands a prelude of echoes: random tokens said twice, FEW different ones at first: some more than the width has dimensions are enough
to learn, for all tokens, what comes after the last one like this. A tenth of all later micro-batches are quotations, pieces of
hundreds of random tokens: without them the model unlearns to copy what its dialogues do not happen to have, and finds nothing
in a long prompt. The decay of the learning rate matters as much as the steps (most of the accuracy comes in its last quarter).

A step is `micro` micro-batches of about `tokens` tokens, each of one source (base_samples.py) and of about one length
(causal rows padded on the right to a few fixed lengths: as fast as packing on a CPU, and no mask). The MTP head comes
last, on the same mixture, while the model stays (mtp.py has its loss). Left out: packing, mixture schedules, an MTP
loss on the model itself, any text that was not generated here.

    python data/make_base.py                         # one leg, an hour and a half on two CPU cores
    torchrun --nproc_per_node=2 data/make_base.py    # the same with a micro-batch a process
    python data/make_base.py --init DIR --warm 0 ... # go on from a base; the shipped one has seven legs (LOG.md)
    python data/make_base.py --resume                # go on after a stop
    python data/make_base.py --init data/base-small --steps 0 --mtp-steps 800 ...      # an MTP head for a finished base
    python data/make_base.py --config tiny           # seconds, for tests; into runs/base-tiny

It writes over data/base-small when it ends: `git checkout data/base-small` brings the shipped one back.
"""

import copy
import dataclasses
import itertools
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  before torch: it sets the thread variables
import model as policies  # noqa: E402
import mtp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import GenerationConfig, PreTrainedTokenizerFast  # noqa: E402

from options import BadInput, option, parse  # noqa: E402
from common import Stop, cli, seed_of  # noqa: E402
from data.base_samples import HELD_OUT, SAID, SOURCES, echo, make_data, padded, quotation, tokenizer_file  # noqa: E402

Shares = tuple[float, float, float, float, float, float]  # one for each of SOURCES


@dataclass
class Config:
    config: str = option("small", "preset")
    out: str = option(str(ROOT / "data" / "base-small"), "finished model; its tokenizer must already lie there")
    run: str = option(str(ROOT / "runs" / "base-small"), "checkpoints and metrics")
    cache: str = option(str(ROOT / "runs" / "base-samples"), "made samples, kept between runs")
    resume: bool = option(False, "go on from the last checkpoint")
    seed: int = option(0, "of weights, samples and their order")
    init: str = option("", "model directory to go on from, with a fresh optimizer; empty = new weights")
    # model
    hidden: int = option(128, "width")
    layers: int = option(4, "decoder layers")
    heads: int = option(4, "query heads of 32 dimensions")
    kv_heads: int = option(2, "key and value heads")
    ffn: int = option(384, "width of the MLP")
    # data
    copies: int = option(49000, "look-up and copy samples")
    routings: int = option(34000, "choices of tools and skills by their descriptions")
    readings: int = option(40000, "replies by what tools returned, in dialogues whose prompt has no lists")
    instructions: int = option(80000, "IFEval-like samples")
    dialogues: int = option(50000, "trajectories, each under its own random harness; 0 leaves the simulator out")
    strange: float = option(0.6, "share of the dialogues whose product words are random characters", min=0, max=1)
    held_out: int = option(96, "samples per source of the accuracy measurement")
    max_length: int = option(1280, "tokens; longer samples are left out, and counted", min=1, max=2048)
    workers: int = option(2, "processes that make samples")
    # training
    steps: int = option(12000, "optimizer steps", min=0)
    mtp_steps: int = option(0, "steps of the MTP head, after those; 0 = as it is in --init, or none", min=0)
    mtp_lr: float = option(2e-3, "AdamW learning rate of the head, linearly to lr_end of it")
    prelude: int = option(600, "steps in which echoes of few tokens must be learned; 0 = no prelude", min=0)
    warm: int = option(1000, "first steps, with warm_shares")
    warm_shares: Shares = option(
        (0.0, 0.5, 0.1, 0.2, 0.0, 0.2), "of micro-batches: quotation, copy, ifeval, routing, reading, dialogue", min=0
    )
    shares: Shares = option((0.1, 0.05, 0.17, 0.15, 0.15, 0.38), "the same after the first `warm` steps", min=0)
    micro: int = option(2, "micro-batches per step")
    tokens: int = option(2560, "tokens per micro-batch, padding included")
    lr: float = option(3e-3, "AdamW learning rate, at its peak")
    warmup: int = option(50, "steps of linear warmup", min=0)
    lr_end: float = option(0.1, "fraction of lr at the last step, approached linearly", min=0)
    weight_decay: float = option(0.05, "of AdamW")
    clip: float = option(1.0, "gradient norm")
    # bookkeeping
    log_every: int = option(20, "steps between rows of losses")
    eval_every: int = option(500, "steps between rows of held-out accuracy")
    save_every: int = option(500, "steps between checkpoints")


TINY = dict(hidden=64, heads=2, kv_heads=1, layers=2, ffn=128, copies=200, instructions=200, held_out=8)
TINY |= dict(
    prelude=2,
    routings=40,
    readings=20,
    dialogues=40,
    steps=4,
    mtp_steps=2,
    warm=2,
    micro=2,
    tokens=1280,
    log_every=1,
    eval_every=4,
    save_every=2,
    workers=1,
    out=str(ROOT / "runs" / "base-tiny"),
    run=str(ROOT / "runs" / "base-tiny-run"),
)
PRESETS = {"small": {}, "tiny": TINY}
FEW = 200  # different tokens in the first echoes
ATTEMPTS = 8
LEARNED = (0.5, 1.0)  # mean loss at which they become all tokens, and at which the prelude ends
SHARP = 2.0  # weights of the norms of queries and keys at the start

# ----------------------------------------------------------------------------------------------------------------- model


def create(config, attempt=0):
    """A new policy in float32 over the tokenizer that lies in `out`; each attempt has other weights.

    Normalised queries and keys of 32 dimensions make logits of at most sqrt(32) = 5.7: too flat to pick one token out of
    hundreds, so the norms start at SHARP instead of 1. And of those dimensions only the slowly rotating ones can match a
    token hundreds of places away: at a rotary base of 1e4 these are 10 of the 32, at 1e6 18. LOG.md has what both do.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.out)
    shape = {"hidden": config.hidden, "layers": config.layers, "heads": config.heads, "kv_heads": config.kv_heads}
    seed = seed_of("base", "init", config.seed, *[attempt] * bool(attempt))
    policy = policies.create(tokenizer, **shape, ffn=config.ffn, rope_theta=1e6, seed=seed)
    sharpen(policy.model)
    return policy


@torch.no_grad()
def sharpen(module):
    """The norms of queries and keys at SHARP."""
    for name, weight in module.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            weight.fill_(SHARP)


def said_logits(model, ids, mask):
    """Logits (N, V) float32, targets (N,) and mask values (N,) at the N positions that an assistant said."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # (B, T-1, H)
        said = mask[:, 1:] > 0
        logits = model.lm_head(hidden[said])  # the head runs on these positions only
    return logits.float(), ids[:, 1:][said], mask[:, 1:][said]


@torch.no_grad()
def accuracy(model, samples, budget, device):
    """(share of samples whose every scored token is the argmax given the true past, share of such tokens)."""
    whole, right, total = 0, 0, 0
    order = sorted(range(len(samples)), key=lambda i: samples.lengths[i], reverse=True)
    while order:
        n = max(1, budget // padded(samples.lengths[order[0]]))
        take, order = order[:n], order[n:]
        ids, mask = samples.batch(take, device)
        logits, targets, kind = said_logits(model, ids, mask)
        wrong = (logits.argmax(-1) != targets) & (kind == SAID)  # (N,)
        row = (mask[:, 1:] > 0).nonzero()[:, 0]  # (N,) the row that each position belongs to
        whole += len(take) - len(row[wrong].unique())
        right += int((kind == SAID).sum() - wrong.sum())
        total += int((kind == SAID).sum())
    return whole / len(samples), right / total


def finished(policy):
    """The policy as it is shipped: a copy in bf16, with generation defaults."""
    policy = dataclasses.replace(policy, model=copy.deepcopy(policy.model).to("cpu", torch.bfloat16))
    stop, pad = policy.codec.stop_ids, policy.tokenizer.pad_token_id
    policy.model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad, do_sample=True)
    return policy


# ------------------------------------------------------------------------------------------------------------------ loop


def picks(config, sources, step):
    """The sources of this step's micro-batches, drawn by their shares."""
    shares = config.warm_shares if step <= config.warm else config.shares
    weights = [share for source, share in zip(SOURCES, shares, strict=True) if source in sources]
    return random.Random(seed_of("base", "mix", config.seed, step)).choices(sources, weights, k=config.micro)


def train_step(model, optimizer, config, batches, ranks=common.ALONE):
    """One optimizer step over micro-batches [(source, ids, mask)]: {source: (loss sum, tokens)} of those of this rank."""
    total, sums = sum(int((mask[:, 1:] > 0).sum()) for _, _, mask in batches), {}
    for source, ids, mask in batches[ranks.rank :: ranks.world]:
        logits, targets, _ = said_logits(model, ids, mask)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        (loss / total).backward()
        sums = merged(sums, {source: (loss.item(), len(targets))})
    policies.optimizer_step(model, optimizer, config.clip, ranks)
    return sums


def merged(*sums):
    """Several {source: (loss sum, tokens)} as one."""
    sources = sorted(set().union(*sums))
    return {s: tuple(map(sum, zip(*(each[s] for each in sums if s in each), strict=True))) for s in sources}


def adamw(model, config):
    return torch.optim.AdamW(
        model.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )


def prelude(config, device):
    """A new policy that has learned to echo, and a line that says when it did.

    The loss rests on a plateau and falls from it within fifty steps, or never: a matter of luck, so weights that have not
    learned FEW tokens after `prelude` steps are drawn anew.
    """
    for attempt in range(ATTEMPTS):
        policy = create(config, attempt)
        model, plain = policy.model.to(device).train(), len(policy.tokenizer) - len(policy.codec.added)
        optimizer, few, loss, learned = adamw(model, config), FEW, math.inf, []
        for step in (bar := tqdm(range(1, 3 * config.prelude + 1), f"prelude {attempt + 1}")):
            policies.set_rate(optimizer, config.lr * min(1.0, step / max(1, config.warmup)))
            rng = np.random.default_rng(seed_of("base", "echo", config.seed, attempt, step))
            batch = ("echo", *echo(rng, few, plain, device))
            total, n = train_step(model, optimizer, config, [batch])["echo"]
            loss = total / n if loss == math.inf else 0.95 * loss + 0.05 * total / n
            bar.set_postfix(tokens=few, loss=f"{loss:.2f}")
            if loss < LEARNED[len(learned)]:
                learned.append(step)
                few, loss = plain, math.inf
            if len(learned) == len(LEARNED) or (step == config.prelude and not learned):
                break
        if learned:
            break
    when = f"learned after {' and '.join(map(str, learned))} steps" if learned else "not learned"
    return policy, f"prelude: echoes were {when}, weights {attempt + 1}"


def teach_head(policy, config, sources, draw, ranks):
    """Train the MTP head, a new one if there is none: what its learner logs of the last `log_every` steps."""
    if policy.mtp is None:
        policy.mtp = policies.MTP(policy.model, seed_of("base", "mtp", config.seed) % 2**63)
        sharpen(policy.mtp)
    policy.mtp.float()
    learner, log = mtp.Learner(policy, config.mtp_lr), {}
    shape = dataclasses.replace(config, lr=config.mtp_lr)
    for step in (bar := tqdm(range(1, config.mtp_steps + 1), "MTP head", disable=ranks.rank > 0)):
        policies.set_rate(learner.optimizer, policies.learning_rate(step, config.mtp_steps, shape))
        batches = [draw(source) for source in picks(config, sources, config.steps + step)]
        for _, ids, mask in batches[ranks.rank :: ranks.world]:
            learner.read(ids, (mask > 0).long())
        learner.step(ranks)
        if step % config.log_every == 0 or step == config.mtp_steps:
            log = learner.log(ranks)
            bar.set_postfix({name: f"{log[name]:.3f}" for name in ("loss", "length", "greedy_length")})
    return log


def main(argv):
    config = parse(Config, PRESETS, argv, __doc__)
    ranks = common.dist()
    if config.micro % ranks.world:
        raise BadInput(f"--micro {config.micro} must be a multiple of the {ranks.world} processes")
    device = ranks.device
    tokenizer_file(config)  # before Run, as is the policy: what is refused leaves no directory
    policy = policies.load(config.init) if config.init else create(config)
    run = common.Run(config.run, config, config.resume, ranks=ranks)
    if ranks.rank == 0:
        data = make_data(config, run.start)
    ranks.barrier()
    if ranks.rank > 0:  # what rank 0 has made
        data = make_data(config, run.start)
    sources = [s for s in SOURCES if s == "quotation" or (s, "train") in data]
    if config.prelude and not config.init and not run.start:
        policy, line = prelude(config, device)
        run.say(line)
    model = policy.model.to(device).train()
    optimizer = adamw(model, config)
    run.say(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M weights, {len(policy.tokenizer)} tokens, {device}"
    )
    drawn = dict.fromkeys(sources, 0)  # micro-batches taken of each source: the data cursor
    if run.start:
        state = common.load_checkpoint(run.dir, ranks)[2]
        model.load_state_dict(state["model"])  # float32: the bf16 copy beside it is for use, not for training on
        optimizer.load_state_dict(state["optimizer"])
        drawn = state["drawn"]
    streams, plain = {}, len(policy.tokenizer) - len(policy.codec.added)
    for source in sources[1:]:
        stream = data[source, "train"].groups(config.tokens, seed_of("base", "order", config.seed, source))
        streams[source] = itertools.islice(stream, drawn[source], None)

    def draw(source):
        """The next micro-batch of a source."""
        drawn[source] += 1
        if source == "quotation":
            rng = np.random.default_rng(seed_of("base", source, config.seed, drawn[source]))
            return source, *quotation(rng, plain, device)
        return source, *data[source, "train"].batch(next(streams[source]), device)

    sums, tokens, clock = {}, 0, time.time()  # since the last row of losses
    bar = tqdm(range(run.start + 1, config.steps + 1), "base", config.steps, initial=run.start, disable=ranks.rank > 0)
    with Stop(ranks) as stop:
        for step in bar:
            batches = [draw(source) for source in picks(config, sources, step)]
            lr = policies.set_rate(optimizer, policies.learning_rate(step, config.steps, config))
            sums = merged(sums, train_step(model, optimizer, config, batches, ranks))
            tokens += sum(ids.numel() for _, ids, _ in batches)
            if step % config.log_every == 0 or step == config.steps:
                row = {f"loss_{source}": loss / n for source, (loss, n) in merged(*ranks.all(sums)).items()}
                run.log(
                    step,
                    **row,
                    lr=lr,
                    tokens_per_s=tokens / (time.time() - clock),
                )
                bar.set_postfix({name[5:]: f"{loss:.3f}" for name, loss in row.items()})
                sums, tokens, clock = {}, 0, time.time()
            if ranks.rank == 0 and (step % config.eval_every == 0 or step == config.steps):  # the others wait below
                row = {}
                for source in (s for s in HELD_OUT if (s, "test") in data):
                    found = accuracy(model, data[source, "test"], 4 * config.tokens, device)
                    row[f"whole_{source}"], row[f"token_{source}"] = found
                run.log(step, **row)
            if (ended := stop.requested) or step % config.save_every == 0 or step == config.steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "drawn": drawn}
                common.save_checkpoint(run.dir, step, finished(policy).save, state, ranks)
            if ended:
                break
    if config.mtp_steps:
        model.eval().requires_grad_(False)
        log = teach_head(policy, config, sources, draw, ranks)
        run.say("MTP head: " + ", ".join(f"{name} {value:.3f}" for name, value in log.items()))
    if ranks.rank == 0:
        finished(policy).publish(config.out)
    run.say(f"{config.out}: {config.steps} steps, {config.mtp_steps} of the MTP head")


if __name__ == "__main__":
    cli(main)
