"""General On-Policy Distillation: a fine-tuned policy wins its general skill back on its own answers (stage 2 of HAT).

The student S answers general prompts. The teacher T, the base before fine-tuning, reads each answer and says at every
token that S sampled what it would have said there; both at the temperature of the sampling, over the whole vocabulary:

    D_t  = sum_v p_S(v) (log p_S(v) - log p_T(v))          the reverse KL, at each sampled token t
    loss = sum_t D_t / N                                   N = sampled tokens of the whole global batch

Each form of --kl is a weight on the log-probs of the student, grad D_t = sum_v w_v grad log p_S(v):

    reverse   D as above                                   w_v = p_S (log p_S - log p_T)
    forward   D = sum_v p_T (log p_T - log p_S)            w_v = -p_T
    jsd       D = b KL(T || m) + (1 - b) KL(S || m)        w_v = (1 - b) p_S (log p_S - log m),  m = b p_T + (1 - b) p_S
    sampled   D = log p_S(a) - log p_T(a), a was sampled   w_v = D at v = a, else 0

`sampled` is the policy gradient with the advantage -D: the mean of its w over what S samples is the w of `reverse`.
Only sampled tokens count. They pass through the LM heads CHUNK at a time, and again in the backward pass, so that
tokens x vocabulary never exists at once.

Left out: a teacher behind an API (it gives no whole vocabulary, and a truncated reverse KL can be negative), replay of
older answers (each is trained on once, just after it was sampled).

    python opd.py --model runs/sft-small/model                      # small: two CPU cores, about two minutes
    python opd.py --model DIR --teacher DIR --prompts tulu.jsonl    # or .parquet; see conversation()
    torchrun --nproc_per_node=2 opd.py --model DIR                  # prompts are sharded over ranks; a GPU each, if any
    python opd.py --model DIR --out runs/opd-small --resume         # continue after a stop; on a CPU bit for bit

Expect the KL to halve within ten steps. 0 from the start means that nothing was forgotten. The run leaves OUT/model (a
Hugging Face directory) and kl.png. Each step has new answers, in the small world to new prompts too, so the curve is
its own evaluation; how much of the general skill comes back is for the general tests to say.

metrics.jsonl, a row per step: kl = reverse KL per token in nats, whatever --kl trains; loss = D per token; entropy in
nats; length = sampled tokens per answer; cut = share of answers without an end; silent = prompts that left no room.
"""

import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from options import BadInput, option, parse
from common import Dist, Run, Stop, cli, digest, dist
from curves import draw
from common import checkpoints, load_checkpoint, model_digest, save_checkpoint, seed_of

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from chat import Trajectory
from data import general
from model import Policy, hidden_states, in_chunks, in_turn, learning_rate, load, optimizer_step, pad_batch, set_rate
from fsdp import IDLE, check_precision, load_optimizer_state, optimizer_state, shard, to_train, weights, whole
from infer import Engine
from eval import answer, drive

CHUNK = 512  # sampled tokens per LM-head product: 512 x 248k in fp32 are 0.5 GB, and four such live at once (jsd: five)

# ---------------------------------------------------------------------------------------------------------------------
# options


@dataclass
class Config:
    # where from, where to
    model: str = option(MISSING, "Hugging Face directory of the student: the policy after fine-tuning")
    teacher: str = option("data/base-small", "Hugging Face directory of the teacher: the base before fine-tuning")
    config: str = option("small", "preset")
    prompts: str = option("", "JSON-lines or parquet file of general prompts; empty = the small world's own")
    out: str = option("", "run directory; empty = the next free runs/opd-PRESET")
    resume: bool = option(False, "continue from the last checkpoint in --out")
    seed: int = option(0, "the seed of everything")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = a GPU per process if there are any")
    teacher_dtype: Literal["float32", "bfloat16"] = option("float32", "bfloat16 halves the memory of the teacher")
    teacher_device: Literal["same", "cpu"] = option("same", "cpu = where the GPU has no room for it, and slowly")

    # answers
    batch: int = option(64, "prompts per step, over all ranks", min=1)
    reply_tokens: int = option(128, "most tokens of an answer", min=1)
    context: int = option(
        768, "longest prompt and answer in tokens; a longer prompt is passed over, and counted", min=2
    )
    slots: int = option(64, "answers that the engine samples side by side", min=1)
    temperature: float = option(1.0, "of sampling, and of both distributions in the loss", min=0.01)

    # loss
    kl: Literal["reverse", "forward", "jsd", "sampled"] = option("reverse", "form of the divergence")
    beta: float = option(
        0.5, "jsd: the teacher's share; near 0 like forward, near 1 like reverse", min=0.001, max=0.999
    )

    # update
    steps: int = option(40, "rounds of sampling and update", min=1)
    micro: int = option(16, "sequences per forward and rank; does not change the result", min=1)
    lr: float = option(2e-4, "AdamW learning rate", min=0)
    warmup: int = option(2, "steps of linear warmup", min=0)
    lr_end: float = option(0.1, "fraction of lr at the last step, approached linearly; 1 = constant", min=0)
    weight_decay: float = option(0.0, "of AdamW", min=0)
    grad_clip: float = option(1.0, "largest gradient norm, over all ranks; 0 = no clip", min=0)
    shard: bool = option(False, "each process holds its share of the student and its optimizer (FSDP2)")
    precision: Literal["float32", "bfloat16"] = option("float32", "with --shard: of the student")
    recompute: bool = option(False, "backward computes each layer again: much less memory, a third more time")
    save_every: int = option(10, "steps between checkpoints", min=1)


PRESETS = {
    "tiny": dict(batch=4, reply_tokens=12, steps=2, micro=2, slots=4, save_every=1),
    "small": dict(),
    "qwen3": dict(  # a start for a real model on GPUs, with --prompts of a Tulu 3 file; run on a toy alone
        teacher="Qwen/Qwen3-1.7B",
        teacher_dtype="bfloat16",
        reply_tokens=1024,
        context=4096,
        steps=100,
        micro=2,
        lr=2e-6,
        warmup=10,
        shard=True,
        precision="bfloat16",
        recompute=True,
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# divergences of next-token distributions, given as log-probs over the whole vocabulary


@torch.no_grad()
def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probs (N, V) -> (N,) nats. Not clamped: a term may be negative, only the sum may not."""
    return p.exp().mul_(p - q).sum(-1)


@torch.no_grad()
def entropy_of(p: Tensor) -> Tensor:
    """Entropy of log-probs (N, V) -> (N,) nats."""
    return -p.exp().mul_(p).sum(-1)


@torch.no_grad()
def weigh(student: Tensor, teacher: Tensor, sampled: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """D (N,) and w (N, V) of the header's table. student, teacher: log-probs (N, V); sampled: ids (N,)."""
    if kind == "reverse":
        w = student.exp().mul_(student - teacher)
        return w.sum(-1), w
    if kind == "forward":
        return kl(teacher, student), teacher.exp().neg_()
    if kind == "jsd":
        middle = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
        theirs = beta * kl(teacher, middle)
        w = student.exp().mul_(student - middle).mul_(1 - beta)
        return theirs + w.sum(-1), w
    assert kind == "sampled", kind
    d = (student - teacher).gather(-1, sampled[:, None])  # (N, 1)
    return d[:, 0], torch.zeros_like(student).scatter_(-1, sampled[:, None], d)


def divergence(student: Tensor, teacher: Tensor, sampled: Tensor, kind: str = "reverse", beta: float = 0.5) -> Tensor:
    """D of two distributions per token, (N, V) log-probs, (N,) ids -> (N,) nats; its gradient is the student's alone.

    The log-probs must be normalised, and the student's made by log_softmax: the gradient leaves out all that a
    log_softmax takes out anyway. Forms: the header; jsd is that of Agarwal et al. (arXiv 2306.13649).
    """
    value, w = weigh(student, teacher, sampled, kind, beta)
    surrogate = (w * student).sum(-1)
    return value + (surrogate - surrogate.detach())


# ---------------------------------------------------------------------------------------------------------------------
# hidden states -> divergences


def chunked(
    student: tuple[Tensor, nn.Module],
    teacher: tuple[Tensor, nn.Module],
    sampled: Tensor,
    vocab: int | None,
    cfg: Config,
    chunk: int = CHUNK,
) -> Tensor:
    """D, reverse KL and entropy of each sampled token -> (N, 3) fp32 nats; only D carries a gradient.

    student, teacher: the hidden states (N, H) that predict the sampled ids (N,), and the LM head that reads them.
    vocab: rows of the heads that are tokens, None = all. `chunk` tokens meet the vocabulary at once.
    """
    return in_chunks(_columns, chunk, (student[0], teacher[0], sampled), student[1], teacher[1], vocab, cfg)


def _columns(hidden, teacher_hidden, sampled, head, teacher_head, vocab, cfg):
    student = log_probs(hidden, head, vocab, cfg.temperature)  # (n, V)
    with torch.no_grad():
        teacher = log_probs(teacher_hidden, teacher_head, vocab, cfg.temperature).to(student.device)
        entropy, reverse = entropy_of(student), kl(student, teacher)
    return torch.stack([divergence(student, teacher, sampled, cfg.kl, cfg.beta), reverse, entropy], dim=-1)


def log_probs(hidden: Tensor, head: nn.Module, vocab: int | None, temperature: float) -> Tensor:
    """Hidden states (n, H) -> log-probs of all tokens (n, V) in fp32, of the distribution that the engine samples."""
    return F.log_softmax(head(hidden)[:, :vocab].float() / temperature, dim=-1)


def token_divergences(student: nn.Module, teacher: nn.Module, ids: Tensor, mask: Tensor, cfg: Config) -> Tensor:
    """`chunked` for the N sampled tokens of a right-padded batch, in reading order: ids, mask (B, T) -> (N, 3)."""
    sampled = mask.bool()
    assert not sampled[:, 0].any(), "the first token of a sequence cannot have been sampled"
    predicts = sampled[:, 1:]  # (B, T - 1): position t - 1 predicts token t
    hidden = hidden_states(student, ids)[:, :-1][predicts]  # (N, H)
    with torch.no_grad():
        there = teacher.device  # the student's, or a CPU beside it
        teacher_hidden = hidden_states(teacher, ids.to(there))[:, :-1][predicts.to(there)]
    heads = student.get_output_embeddings(), teacher.get_output_embeddings()
    vocab = getattr(student, "valid_vocab", None)
    return chunked((hidden, heads[0]), (teacher_hidden, heads[1]), ids[sampled], vocab, cfg)


# ---------------------------------------------------------------------------------------------------------------------
# student and teacher must speak one language

PROBE = [
    {"role": "user", "content": "3号链接多少钱？  In English, please: what's the price of no. 1234?"},
    {"role": "assistant", "content": "It's ¥59.90 (券后价)."},
    {"role": "user", "content": "谢谢！\n\n再见"},
]


def compare(student: Policy, teacher: Policy) -> None:
    """BadInput, one line, unless ids mean the same to both and a prompt puts both into the same mode of thinking.

    A KL between different vocabularies is a number without a meaning. A teacher that was taught to think first and is
    asked on a student's answer that does not (or the other way round) teaches the mode instead of the answer.
    """
    pair = f"student {student.path} and teacher {teacher.path}"
    ours, theirs = (p.codec.tokenizer.get_vocab(with_added_tokens=True) for p in (student, teacher))
    if ours != theirs:
        word = min(word for word, _ in ours.items() ^ theirs.items())
        raise BadInput(
            f"{pair} differ in vocabulary: {word!r} has the id {ours.get(word)} here and {theirs.get(word)} there"
        )
    for what, view in (
        ("added tokens", lambda p: sorted(p.codec.added)),
        ("end-of-turn ids", lambda p: p.codec.stop_ids),
        ("tool-call format and thinking switch", lambda p: (p.codec.calls, p.codec.thinking)),
        ("how text becomes tokens", lambda p: p.codec.prompt(PROBE)),
        ("chat template, which holds the thinking switch", rendered),
    ):
        here, there = view(student), view(teacher)
        if here != there:
            same = len(os.path.commonprefix([here, there])) if here and there else 0
            here, there = (x and x[same : same + 40] for x in (here, there))
            raise BadInput(f"{pair} differ in {what}: {here!r} here, {there!r} there")


def rendered(policy: Policy) -> str | None:
    """A conversation as the checkpoint's own chat template opens the next turn; None without a template."""
    if not policy.tokenizer.chat_template:
        return None
    try:
        return policy.tokenizer.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(f"{policy.path}: its chat template cannot render a plain conversation: {reason}") from error


# ---------------------------------------------------------------------------------------------------------------------
# general prompts


def conversation(row: Any, where: str) -> list[dict]:
    """The messages that an answer is to follow: all but what the assistant says last; [] if then no user waits.

    row: {"messages": [{"role", "content"}, ...]} as in Tulu 3, or {"prompt": a text, or such a list}. BadInput at
    `where` for anything else.
    """
    said = (row.get("messages") or row.get("prompt")) if isinstance(row, dict) else None
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(messages, list) or not messages:
        raise BadInput(f'{where}: must be {{"messages": [...]}} or {{"prompt": ...}}')
    for m in messages:
        if not isinstance(m, dict) or not isinstance(m.get("content"), str):
            raise BadInput(f"{where}: each message must have a role and a text as content, not {str(m)[:60]!r}")
        if m.get("role") not in ("system", "user", "assistant"):
            raise BadInput(f"{where}: role {m.get('role')!r} is not system, user or assistant")
    kept = [{"role": m["role"], "content": m["content"]} for m in messages]
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    return kept if kept and kept[-1]["role"] == "user" and kept[-1]["content"].strip() else []


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of each row of a JSON-lines or, by its ending, parquet file, a few in memory at once."""
    try:
        if path.suffix != ".parquet":
            with open(path, "rb") as file:
                for n, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{n}", json_line(line, f"{path}:{n}")
            return
        try:
            from pyarrow import parquet
        except ImportError:
            raise BadInput(f"{path}: needs `pip install pyarrow`; a JSON-lines file needs nothing") from None
        with parquet.ParquetFile(path) as file:
            wanted = [name for name in ("messages", "prompt") if name in file.schema_arrow.names]
            batches = (batch.to_pylist() for batch in file.iter_batches(1024, columns=wanted))
            for n, row in enumerate(chain.from_iterable(batches), 1):
                yield f"{path}: row {n}", row
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise BadInput(f"{path}: {(getattr(error, 'strerror', None) or str(error)).lower()}") from None


def json_line(line: bytes, where: str) -> Any:
    """The value of one line of a JSON-lines file; a byte-order mark is fine."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not one JSON value a line: {error}") from None


def read_prompts(path: str) -> tuple[list[list[dict]], int]:
    """The conversations of a file, and how many rows were left out since nobody waits for an answer in them."""
    rows = [conversation(row, where) for where, row in rows_of(Path(path))]
    prompts = [messages for messages in rows if messages]
    if not prompts:
        raise BadInput(f"{path}: no prompt in {len(rows)} rows")
    return prompts, len(rows) - len(prompts)


def prompts_of(prompts: list[list[dict]] | None, step: int, places: range, cfg: Config) -> list[list[dict]]:
    """The conversations at `places` of a step's global batch, whichever rank asks.

    A file is gone through in another order each epoch. None: prompts of the small world, new ones in each step.
    """
    if prompts is None:
        rngs = [random.Random(seed_of(cfg.seed, "prompt", step, i)) for i in places]
        return [[{"role": "user", "content": general.sample(rng, "train")["prompt"]}] for rng in rngs]
    start = (step - 1) * cfg.batch
    return [prompts[i] for i in in_turn((start + i for i in places), len(prompts), cfg.seed)]


# ---------------------------------------------------------------------------------------------------------------------
# answers


def collect(engine: Engine, prompts: list[list[dict]] | None, step: int, cfg: Config, ranks: Dist) -> list[Trajectory]:
    """This rank's answers of a step, all in one batch of the engine, under a progress bar."""
    mine, codec = range(ranks.rank, cfg.batch, ranks.world), engine.policy.codec
    seeds = [seed_of(cfg.seed, "answer", step, i) for i in mine]
    asked = prompts_of(prompts, step, mine, cfg)
    loops = [answer(messages, codec, cfg.reply_tokens, seed) for messages, seed in zip(asked, seeds, strict=True)]
    return drive(engine, loops, seeds, f"answers {step}", ranks, greedy=False)


# ---------------------------------------------------------------------------------------------------------------------
# update


def update(
    student: Policy, teacher: Policy, optimizer, trajectories: list[Trajectory], cfg: Config, ranks: Dist
) -> dict:
    """One optimizer step on this rank's answers; what the log wants of it, per token of the global batch.

    Every rank takes the same step: a sum of token losses under one number of tokens, counted over all ranks. BadInput
    if nobody sampled any.
    """
    kept = sorted((t for t in trajectories if any(t.mask)), key=lambda t: len(t.ids))  # like lengths: less padding
    total = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # tokens; sums of D, reverse KL, entropy
    total[0] = sum(sum(t.mask) for t in kept)
    tokens = ranks.all_reduce_sum(total[:1].clone()).item()
    if tokens == 0:
        raise BadInput(f"no answer has a token: each prompt fills --context {cfg.context}, or the model gives NaN")
    parts = [kept[start : start + cfg.micro] for start in range(0, len(kept), cfg.micro)]
    for part in ranks.in_step(parts, cfg.shard):
        rows = [(t.ids, t.mask) for t in part or ()] or [IDLE]
        ids, mask = pad_batch(*zip(*rows), device=ranks.device)  # (B, T)
        columns = student(token_divergences, teacher.model, ids, mask, cfg) * bool(part)  # (N, 3)
        (columns[:, 0].sum() / tokens).backward()
        total[1:] += columns.detach().sum(0, dtype=torch.float64)
    norm = optimizer_step(student.model, optimizer, cfg.grad_clip, ranks)
    loss, reverse, entropy = (ranks.all_reduce_sum(total)[1:] / tokens).tolist()
    return {"kl": reverse, "loss": loss, "entropy": entropy, "grad_norm": norm}


# ---------------------------------------------------------------------------------------------------------------------
# the run


def ready(path: str | Path, teacher: Policy, cfg: Config, ranks: Dist) -> Engine:
    """The engine over the student at `path`; BadInput for what it cannot run or cannot be taught by this teacher."""
    engine = Engine(to_train(path, cfg, ranks.device), cfg.slots, cfg.context, cfg.temperature)
    compare(engine.policy, teacher)
    positions = teacher.model.config.get_text_config().max_position_embeddings
    if cfg.context > positions:
        raise BadInput(f"--context {cfg.context} is beyond the {positions} positions of teacher {teacher.path}")
    return engine


def train_step(step: int, engine: Engine, teacher: Policy, optimizer, prompts, cfg: Config, ranks: Dist) -> dict:
    """Answers, then one update. All randomness is seeded by (seed, step, index): a resumed step is the same step."""
    started = time.perf_counter()
    with whole(engine.policy):
        trajectories = collect(engine, prompts, step, cfg, ranks)
    ranks.barrier()  # the step's rollouts end with those of the slowest rank
    rollout_s = time.perf_counter() - started
    lr = set_rate(optimizer, learning_rate(step, cfg.steps, cfg))
    log = update(engine.policy, teacher, optimizer, trajectories, cfg, ranks)

    lengths = [sum(t.mask) for t in trajectories]
    open_ended = sum(n > 0 and t.stop_reason != "reply" for n, t in zip(lengths, trajectories))
    counts = torch.tensor([sum(lengths), open_ended, lengths.count(0)], dtype=torch.float64, device=ranks.device)
    tokens, cut, silent = ranks.all_reduce_sum(counts).tolist()
    answers = cfg.batch - silent
    log |= {
        "length": tokens / answers,
        "cut": cut / answers,
        "silent": int(silent),
        "lr": lr,
    }
    log |= {"tokens_per_s": tokens / rollout_s, "rollout_s": rollout_s}
    return log | {"update_s": time.perf_counter() - started - rollout_s}


def check(cfg: Config, processes: int) -> None:
    """BadInput for options that do not go together, and for prompts that are not there."""
    if cfg.batch % processes:
        raise BadInput(f"--batch {cfg.batch} must be a multiple of the {processes} processes")
    check_precision(cfg)
    if cfg.prompts and not Path(cfg.prompts).is_file():
        raise BadInput(f"--prompts {cfg.prompts}: no such file")


def main(argv: list[str]):
    cfg = parse(Config, PRESETS, argv, __doc__)
    ranks = dist(None if cfg.device == "auto" else cfg.device, cfg.shard)
    check(cfg, ranks.world)  # before Run, so that what is refused leaves no directory
    inputs = {"teacher_digest": model_digest(cfg.teacher)}
    inputs |= {"prompts_digest": digest(cfg.prompts)} if cfg.prompts else {}
    prompts, left_out = read_prompts(cfg.prompts) if cfg.prompts else (None, 0)
    place = ranks.device if cfg.teacher_device == "same" else "cpu"
    teacher = load(cfg.teacher, place, getattr(torch, cfg.teacher_dtype))
    teacher.model.requires_grad_(False)
    engine = None if cfg.resume else ready(cfg.model, teacher, cfg, ranks)

    free = ("steps",) if cfg.lr_end == 1 else ()  # else the rate of every step depends on how many there are
    record = Run(cfg.out, cfg, cfg.resume, f"runs/opd-{cfg.config}", ranks, free, inputs)
    saved = load_checkpoint(record.dir, ranks) if checkpoints(record.dir) else None
    engine = engine or ready(saved[1] if saved else cfg.model, teacher, cfg, ranks)
    policy = engine.policy
    if cfg.shard:
        shard(policy, ranks.device, cfg.precision)
    optimizer = torch.optim.AdamW(policy.model.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    if saved:
        load_optimizer_state(policy, optimizer, saved[2].pop("optimizer"))
    if prompts:
        record.say(f"{cfg.prompts}: {len(prompts)} prompts, {left_out} rows without a question left out")

    with Stop(ranks) as stop, tqdm(desc="steps", initial=record.start, total=cfg.steps, disable=ranks.rank > 0) as bar:
        for step in range(record.start + 1, cfg.steps + 1):
            log = train_step(step, engine, teacher, optimizer, prompts, cfg, ranks)
            record.log(step, **log)
            stopping = stop.requested
            if step == cfg.steps or step % cfg.save_every == 0 or stopping:
                state = {"optimizer": optimizer_state(policy, optimizer)}
                save_checkpoint(record.dir, step, partial(policy.save, weights=weights(policy)), state, ranks)
            bar.set_postfix({k: f"{log[k]:.3g}" for k in ("kl", "entropy", "length", "cut", "tokens_per_s")})
            bar.update()
            if stopping:
                break

    final = weights(policy)
    if ranks.rank == 0:
        policy.publish(record.dir / "model", final)
        draw(record.dir, "kl.png", "KL(student || teacher), nats per token", ["kl"])
        record.say(f"{record.dir}: model/, kl.png")
    ranks.barrier()  # nobody leaves while another still writes


if __name__ == "__main__":
    cli(main)
