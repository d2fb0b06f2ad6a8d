"""HSA-SFT: a base learns its trade from a teacher who works under many harnesses (stage 1 of HAT).

    loss = - sum_t log p(token_t | all before it) / N        t: what the teacher said, N of them in the global batch

Nothing else has a loss: not the prompt, not tool results, not hook messages, not what a hook has sent back. samples.py
says what a sample is, which are kept, and what becomes of a teacher's mistakes. `--harness-mode fixed` is the control:
the same requests, rooms and faults, all under the original harness.

Left out: packing (samples of like length share a forward instead), a share of general data (OPD restores that skill).

    python sft.py                                          # small: two CPU cores, a minute of data, minutes of training
    python sft.py --harness-mode fixed                     # the control
    python sft.py --endpoint http://localhost:8000/v1 --llm NAME      # a language model as teacher, not the oracle
    python sft.py --rewriter http://localhost:8000/v1 --llm NAME      # one that rewords the harnesses, too
    python sft.py --logs my.jsonl --harness my-harness     # dialogues of your own; samples.read_logs has the format
    torchrun --nproc_per_node=8 sft.py --config qwen3      # a real model on GPUs, sharded; see the preset
    torchrun --nproc_per_node=2 sft.py                     # batches are sharded over ranks; a GPU each, if any
    python sft.py --out runs/sft-small --resume            # continue after Ctrl-C or a crash; on a CPU bit for bit

Expect under small, in seven minutes on one thread: T1 88 -> 93, T2 50 -> 74, T4 four points below the base. The run
leaves OUT/model (a Hugging Face directory) and OUT/samples.jsonl, every sample as it was told, those that were
left out among them (`python harness.py trace FILE`). An interrupted teacher goes on where it stopped.

metrics.jsonl, a row per step: loss = nats per trained token; held_out = the same of samples that are never trained;
tokens = those with a loss; tokens_per_s = all tokens of the samples, context included and padding not; epoch.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from options import BadInput, option, parse
from common import Dist, Run, Stop, cli, digest, dist
from common import checkpoints, load_checkpoint, save_checkpoint

import torch
from torch import Tensor
from tqdm import tqdm

from chat import Trajectory
from harness import Harness
from reword import Endpoint
from samples import Options, Row, case_maker, make_samples, read_logs, replayed, sort_out, tell
from model import Policy, in_turn, learning_rate, optimizer_step, pad_batch, set_rate, token_logps
from fsdp import IDLE, load_optimizer_state, optimizer_state, shard, to_train, weights

BUCKET = 64  # lengths are padded to multiples of this

# ---------------------------------------------------------------------------------------------------------------------
# options: those of the samples (samples.py), and


@dataclass
class Config(Options):
    config: str = option("small", "preset")
    model: str = option("data/base-small", "Hugging Face directory of the base")
    out: str = option("", "run directory; empty = the next free runs/sft-PRESET")
    resume: bool = option(False, "continue from the last checkpoint in --out")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = a GPU per process if there are any")
    context: int = option(1536, "longest sample in tokens; a longer one is left out, and counted", min=2)

    # update
    epochs: int = option(1, "times that each sample is trained", min=1)
    batch: int = option(16, "samples per step, over all ranks", min=1)
    micro: int = option(4, "samples per forward and rank; does not change the result", min=1)
    lr: float = option(3e-4, "AdamW learning rate", min=0)
    warmup: int = option(10, "steps of linear warmup", min=0)
    lr_end: float = option(0.1, "fraction of lr at the last step, approached linearly; 1 = constant", min=0)
    weight_decay: float = option(0.0, "of AdamW", min=0)
    grad_clip: float = option(1.0, "largest gradient norm, over all ranks; 0 = no clip", min=0)
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "of matrix products; bfloat16 is faster where the processor has it"
    )
    shard: bool = option(False, "each process holds its share of weights and optimizer (FSDP2)")
    recompute: bool = option(False, "backward computes each layer again: much less memory, a third more time")
    eval_every: int = option(25, "steps between held-out losses; 0 = only at the end", min=0)
    save_every: int = option(50, "steps between checkpoints", min=1)


PRESETS = {
    "tiny": dict(samples=6, held_out=2, epochs=1, batch=2, micro=1, eval_every=1, save_every=1),
    "small": dict(),
    "qwen3": dict(  # a start for a real model on GPUs; run on a toy alone
        model="Qwen/Qwen3-1.7B",
        samples=10_000,
        context=8192,
        batch=32,
        micro=1,
        lr=1e-5,
        warmup=20,
        shard=True,
        precision="bfloat16",
        recompute=True,
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# update


def rows_at(step: int, count: int, cfg: Config) -> list[int]:
    """Which of `count` rows a step trains: in another order each epoch, each once an epoch; the last step has the rest.

    The same whichever rank asks.
    """
    places = range((step - 1) * cfg.batch, min(step * cfg.batch, cfg.epochs * count))
    return in_turn(places, count, cfg.seed)


def losses(policy: Policy, rows: list[Row], cfg: Config, ranks: Dist) -> Iterator[Tensor]:
    """The summed loss of one micro-batch after the other, in nats; rows of like length stand together."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    parts = [rows[start : start + cfg.micro] for start in range(0, len(rows), cfg.micro)]
    half = cfg.precision == "bfloat16" and not cfg.shard  # what is sharded is cast by FSDP2
    for part in ranks.in_step(parts, cfg.shard):
        ids, mask = pad_batch(*zip(*(part or [IDLE])), bucket=BUCKET, device=ranks.device)  # (B, T)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
            yield -policy(token_logps, ids, mask).sum() * bool(part)


def count_tokens(rows: list[Row], ranks: Dist) -> int:
    """Trained tokens of the rows of all ranks."""
    said = torch.tensor(float(sum(sum(mask) for _, mask in rows)), dtype=torch.float64, device=ranks.device)
    return int(ranks.all_reduce_sum(said).item())


def held_out_loss(policy: Policy, rows: list[Row], cfg: Config, ranks: Dist) -> float:
    """Mean loss per token of all ranks' rows."""
    tokens = count_tokens(mine := rows[ranks.rank :: ranks.world], ranks)
    with torch.no_grad():
        total = float(sum(loss.item() for loss in losses(policy, mine, cfg, ranks)))
    total = torch.tensor(total, dtype=torch.float64, device=ranks.device)  # the same type on a rank without rows
    return ranks.all_reduce_sum(total).item() / tokens


def update(policy: Policy, optimizer, rows: list[Row], cfg: Config, ranks: Dist) -> dict:
    """One optimizer step on this rank's rows (ids, mask); what the log wants of it, over all ranks.

    Every rank takes the same step: a sum of token losses under one number of tokens, counted over all ranks. Rows of
    which nothing is trained are skipped; BadInput if the whole batch is of that kind.
    """
    kept = [row for row in rows if any(row[1])]
    tokens = count_tokens(kept, ranks)
    if tokens == 0:
        raise BadInput("a whole batch without a token to train: its masks are 0 everywhere")
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)  # loss, tokens with their context, rows skipped
    for loss in losses(policy, kept, cfg, ranks):
        (loss / tokens).backward()
        sums[0] += loss.item() / tokens
    sums[1:] += torch.tensor([sum(len(ids) for ids, _ in kept), len(rows) - len(kept)], device=ranks.device)
    norm = optimizer_step(policy.model, optimizer, cfg.grad_clip, ranks)
    loss, read, skipped = ranks.all_reduce_sum(sums).tolist()
    return {"loss": loss, "grad_norm": norm, "tokens": tokens, "read": int(read), "skipped": int(skipped)}


# ---------------------------------------------------------------------------------------------------------------------
# the run


def ready(path: str | Path, cfg: Config, ranks: Dist) -> Policy:
    """The policy at `path`; BadInput if --context is too long for it."""
    policy = to_train(path, cfg, ranks.device)
    positions = policy.model.config.get_text_config().max_position_embeddings
    if cfg.context > positions:
        raise BadInput(f"--context {cfg.context} is beyond the {positions} positions of {path}")
    return policy


def check(cfg: Config, processes: int) -> None:
    """BadInput for options that do not go together, and for logs that are not there."""
    if cfg.batch % processes:
        raise BadInput(f"--batch {cfg.batch} must be a multiple of the {processes} processes")
    if cfg.logs and cfg.endpoint:
        raise BadInput("--logs and --endpoint: dialogues of your own are replayed, there is nothing to ask a server")
    if cfg.logs and not Path(cfg.logs).is_file():
        raise BadInput(f"--logs {cfg.logs}: no such file")


def main(argv: list[str]):
    cfg = parse(Config, PRESETS, argv, __doc__)
    ranks = dist(None if cfg.device == "auto" else cfg.device, cfg.shard)
    check(cfg, ranks.world)  # before Run, so that what is refused leaves no directory
    harness = Harness.load(cfg.harness)
    logs = read_logs(cfg.logs, harness) if cfg.logs else []
    given, (cfg, often) = cfg, replayed(cfg, logs) if logs else (cfg, "")
    case_at, policy = case_maker(cfg, harness, logs), None if cfg.resume else ready(cfg.model, cfg, ranks)
    rewrite = Endpoint(cfg.rewriter, cfg.llm) if cfg.rewriter else None

    inputs = {"harness_commit": harness.commit} | ({"logs_digest": digest(cfg.logs)} if logs else {})
    inputs |= {} if logs else {"world_digest": digest(cfg.world)}
    record = Run(cfg.out, given, cfg.resume, f"runs/sft-{cfg.config}", ranks, inputs=inputs)
    saved = load_checkpoint(record.dir, ranks) if checkpoints(record.dir) else None
    policy = policy or ready(saved[1] if saved else cfg.model, cfg, ranks)
    if cfg.shard:
        shard(policy, ranks.device, cfg.precision)
    optimizer = torch.optim.AdamW(policy.model.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    if saved:
        load_optimizer_state(policy, optimizer, saved[2].pop("optimizer"))

    if often:
        record.say(often)

    def make(i: int) -> Trajectory:
        return tell(i, case_at(i), cfg, harness, policy.codec, rewrite)

    total, workers = cfg.samples + cfg.held_out, cfg.workers if cfg.endpoint or cfg.rewriter else 1
    told = make_samples(record.dir / "samples.jsonl", make, total, workers, ranks)
    rows, held, line = sort_out(told, cfg, cfg.context)
    steps = -(-cfg.epochs * len(rows) // cfg.batch)
    record.say(f"{line}\n{len(rows)} to train in {steps} steps, {len(held)} held out")

    with Stop(ranks) as stop, tqdm(desc="steps", initial=record.start, total=steps, disable=ranks.rank > 0) as bar:
        for step in range(record.start + 1, steps + 1):
            started = time.perf_counter()
            lr = set_rate(optimizer, learning_rate(step, steps, cfg))
            mine = [rows[i] for i in rows_at(step, len(rows), cfg)[ranks.rank :: ranks.world]]
            log = update(policy, optimizer, mine, cfg, ranks)
            log["tokens_per_s"] = log.pop("read") / (time.perf_counter() - started)
            log |= {"lr": lr, "epoch": min(cfg.epochs, step * cfg.batch / len(rows))}
            if step == steps or (cfg.eval_every and step % cfg.eval_every == 0):
                log["held_out"] = held_out_loss(policy, held, cfg, ranks)
            record.log(step, **log)
            stopping = stop.requested
            if step == steps or step % cfg.save_every == 0 or stopping:
                state = {"optimizer": optimizer_state(policy, optimizer)}
                save_checkpoint(record.dir, step, partial(policy.save, weights=weights(policy)), state, ranks)
            bar.set_postfix({k: f"{log[k]:.3g}" for k in ("loss", "tokens_per_s")})
            bar.update()
            if stopping:
                break

    final = weights(policy)
    if ranks.rank == 0:
        policy.publish(record.dir / "model", final)
        record.say(f"{record.dir}: model/, samples.jsonl")
    ranks.barrier()  # nobody leaves while another still writes


if __name__ == "__main__":
    cli(main)
