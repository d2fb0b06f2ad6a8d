"""The MTP head: what it drafts, how much of that the model would accept, and how it learns to draft better.

    x_t  = fc(cat[norm_e(E[tok_{t+1}]), norm_h(h_t)])        g1_t = norm(layer(x_t))      the module itself: model.MTP
    gd_t = the same with h <- g(d-1)_t, tok <- tok_{t+d}, position t + d - 1
    q_d  = softmax(lm_head(gd_t) / T) says tok_{t+d+1},      p_{t+d} = softmax(lm_head(h_{t+d}) / T) is the model's own
    loss = sum_d w_d sum_t D_d / N                           w = 0.51, 0.31, 0.18; N = first drafts of the global batch
    D    = KL(p_{t+d} || q_d), soft targets, or -log q_d(tok_{t+d+1}), hard ones
    a_d  = p_{t+d}(argmax q_d), at T = 0 whether it is the likeliest of p: P(draft d accepted | those before)

A chain starts at each sampled token that two or more sampled ones surround: tok_{t+1} .. tok_{t+d+1} belong to one
message of the policy, so nothing is learned across tool results, ends of turns or sequences, where nothing is drafted.
Draft d attends to what it attends to in the engine: the keys of first drafts up to t, and those of its own chain.
Hidden states, embedding and LM head are detached. The head has its own optimizer and clip, so that the policy neither
knows nor feels it; what it reads of the policy, h and p, comes from a forward that the stage has made anyway:

    learner = Learner(policy, lr=1e-3, temperature=1.0)
    hidden = hidden_states(policy.model, ids)                # ... and the loss of the stage from the same
    learner.read(ids, mask, hidden)                          # each micro-batch
    learner.step(ranks); learner.log(ranks)                  # each optimizer step; each row of the log

As a command it trains the head alone on stored rollouts, the model frozen: after SFT or OPD, or a head for a model
that has none.

    python mtp.py --model DIR --rollouts "runs/rl-small/rollouts-*.jsonl"    # of rl.py --keep-rollouts; a file or more
    python mtp.py --model DIR --rollouts runs/sft-small/samples.jsonl        # any conversations: ids and masks are read
    python mtp.py --model runs/rl-small/model --init BASE --rollouts FILE    # graft the head of the base onto it, first
    python mtp.py --model data/base-small --init random --rollouts FILE      # a new head
    torchrun --nproc_per_node=2 mtp.py ...                                   # rollouts are sharded over ranks
    python mtp.py --out runs/mtp-small --resume ...                          # after Ctrl-C or a crash, bit for bit

The run leaves OUT/model (the model and the head, ready for the engine), loss.png and acceptance.png.

metrics.jsonl, a row per step: loss, loss_d = D of draft d; length = tokens per forward of the model, of depth + 1 at
most, at the temperature; rate = length / (depth + 1); accepted = drafts accepted / (depth x forwards), though at the
end of a message there is less to draft; greedy_* = the same at T = 0; held_out/* = of rollouts that are never trained.
They are expectations along the recorded tokens (see `walk`). Left out: drafting trees, a head of several layers, its
router's balance loss.
"""

import glob
import json
import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from options import BadInput, option, parse
from common import Dist, Run, Stop, cli, digest, dist, read_text
from curves import draw
from common import checkpoints, load_checkpoint, model_digest, save_checkpoint, seed_of

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from model import MTP, Policy, hidden_states, in_chunks, in_turn, learning_rate, load, optimizer_step, pad_batch
from model import set_rate
from model import read_mtp as read

WEIGHTS = (0.51, 0.31, 0.18)  # of drafts 1, 2, 3 in the loss
RULES = {"": 1, "greedy_": 2}  # the two acceptances, and where they stand in the columns of `loss`
CHUNK = 512  # drafts per LM-head product: 512 x 248k in fp32 are 0.5 GB, and a few such live at once
BUCKET = 64  # lengths are padded to multiples of this

# ---------------------------------------------------------------------------------------------------------------------
# drafts and their loss


def starts_of(mask: Tensor, depth: int) -> Tensor:
    """mask (B, T) -> (B, T, depth) bool: at t, d - 1: tok_{t+1} .. tok_{t+d+1} were all sampled, draft d counts."""
    after = [F.pad(mask.bool()[:, n:], (0, n)) for n in range(1, depth + 2)]  # each (B, T)
    return torch.stack(after, dim=-1).cumprod(dim=-1).bool()[..., 1:]


def chain(head: MTP, model, ids: Tensor, starts: Tensor, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(row (N,), t (N,), gd_t (N, H)) of draft d = 1, 2, .. wherever `starts` (B, T, depth) has it, in reading order.

    Teacher-forced: draft d reads the recorded tok_{t+d}, which stands for a draft that was accepted.
    """
    cache = DynamicCache()
    g = head(model, ids[:, 1:], hidden[:, :-1], cache=cache)  # (B, T - 1, H): first drafts, prompt included
    starts, length = starts[:, :-1], g.shape[1]
    row, t = starts[..., 0].nonzero(as_tuple=True)
    yield row, t, g[row, t]
    if starts.shape[-1] == 1 or not (most := int(starts[..., 1].sum(1).max())):
        return
    # most of a context is nobody's draft: from here on only the chains, side by side, M of them
    t = starts[..., 1].int().argsort(dim=1, descending=True, stable=True)[:, :most]  # (B, M), the rows' own come first
    g = g.gather(1, t[..., None].expand(-1, -1, g.shape[-1]))  # (B, M, H)
    sees = torch.arange(length, device=ids.device) <= t[..., None]  # (B, M, T - 1)
    itself = torch.eye(most, dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)  # (B, M, M)
    for d in range(2, starts.shape[-1] + 1):
        sees = torch.cat([sees, itself], dim=-1)
        bias = torch.zeros(sees.shape, dtype=g.dtype, device=g.device).masked_fill_(~sees, -torch.inf)
        told = ids.gather(1, (t + d).clamp(max=length))
        g = head(model, told, g, own=True, position_ids=t + d - 1, attention_mask=bias[:, None], cache=cache)
        row, column = starts[..., d - 1].gather(1, t).nonzero(as_tuple=True)
        yield row, t[row, column], g[row, column]


def loss(
    model, head: MTP, ids: Tensor, mask: Tensor, hidden: Tensor | None = None, soft=True, temperature=1.0, depth=3
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the head before the division by N, its columns (B, T, depth, 3), and `starts_of` the batch.

    ids, mask (B, T), right-padded; hidden (B, T, H): the model's, if the caller has them. Gradients reach the head
    alone. Columns, without a gradient: D in nats, p of q's likeliest token, 1 if it is p's likeliest too.
    """
    if hidden is None:
        with torch.no_grad():
            hidden = hidden_states(model, ids)
    hidden, starts = hidden.detach(), starts_of(mask, depth)
    columns = torch.zeros(*starts.shape, 3, device=ids.device)
    total = torch.zeros((), device=ids.device)
    for d, (row, t, g) in enumerate(chain(head, model, ids, starts, hidden), 1):
        each = compare(model, g, hidden[row, t + d], ids[row, t + d + 1], soft, temperature)  # (N, 3)
        columns[row, t, d - 1] = each.detach()
        total = total + WEIGHTS[d - 1] * each[:, 0].sum()
    return total, columns, starts


def compare(model, g: Tensor, hidden: Tensor, target: Tensor, soft: bool, temperature: float) -> Tensor:
    """Columns of `loss` for states of the head and of the model (N, H) that predict `target` (N,) -> (N, 3) fp32."""
    lm_head, vocab = model.get_output_embeddings(), getattr(model, "valid_vocab", None)
    weight = lm_head.weight.detach()[:vocab]  # its rows beyond the tokens are padding
    bias = None if lm_head.bias is None else lm_head.bias.detach()[:vocab]
    return in_chunks(_compare, CHUNK, (g.to(weight.dtype), hidden, target), weight, bias, soft, temperature)


def _compare(g, hidden, target, weight, bias, soft, temperature):
    q = F.log_softmax(F.linear(g, weight, bias).float() / temperature, dim=-1)  # (n, V)
    with torch.no_grad():
        p = F.log_softmax(F.linear(hidden, weight, bias).float() / temperature, dim=-1)
        draft = q.argmax(-1, keepdim=True)
        chance, agree = p.gather(-1, draft).exp()[:, 0], p.argmax(-1, keepdim=True) == draft
    value = (p.exp() * (p - q)).sum(-1) if soft else -q.gather(-1, target[:, None])[:, 0]
    return torch.stack([value, chance, agree[:, 0].float()], dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# acceptance


def walk(chances: list[list[float]]) -> tuple[float, float]:
    """Expected forwards of the model that write a message, and drafts accepted on the way.

    chances[i][d - 1]: that draft d after the message's token i is accepted, those before it given. Its token 0 comes
    with the prompt; each forward then accepts n drafts and adds a token of the model's own, until the last is written.
    Places are weighed by how often a forward really begins there: easy ones are jumped over, so that a plain mean of
    the chances would promise too much. Exact for chances of 0 and 1, the greedy case.
    """
    visits, steps, accepted = [1.0] + [0.0] * len(chances), 0.0, 0.0
    for i, row in enumerate(chances):
        steps += (alive := visits[i])
        for n, chance in enumerate(row, 1):
            visits[i + n] += alive * (1 - chance)
            alive *= chance
            accepted += alive
        visits[min(i + len(row) + 1, len(chances))] += alive  # all accepted; past the end of turn there is no more
    return steps, accepted


def acceptance(columns: Tensor, mask: Tensor) -> Tensor:
    """Columns (B, T, depth, 3) of `loss` and mask (B, T) -> tokens written, forwards, drafts accepted: (rules, 3)."""
    out, depth = torch.zeros(len(RULES), 3, dtype=torch.float64), columns.shape[2]
    for table, sampled in zip(columns.tolist(), mask.tolist()):
        edges = [t for t, pair in enumerate(zip([0, *sampled], [*sampled, 0])) if pair[0] != pair[1]]
        for start, stop in zip(edges[::2], edges[1::2]):  # tokens start .. stop - 1 are one message
            for r, rule in enumerate(RULES.values()):
                rows = [[c[rule] for c in table[t - 1][: min(depth, stop - 1 - t)]] for t in range(start, stop - 1)]
                out[r] += torch.tensor([len(rows), *walk(rows)], dtype=torch.float64)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# learning


def graft(policy: Policy, path: str | Path) -> None:
    """Give the policy the MTP head of the checkpoint `path`, a model of the same architecture."""
    if not (head := read(path, policy.model)):
        raise BadInput(f"{path}: has no tensors mtp.*, so there is no head to graft")
    policy.mtp = head
    policy.model.config.get_text_config().mtp_before_norm = head.before_norm


class Learner:
    """Trains policy.mtp along with, or beside, the policy: `read` micro-batches, `step`, `log`.

    lr, clip (largest gradient norm, 0 = none): of an optimizer of its own. temperature, soft, depth: as in `loss`.
    """

    def __init__(self, policy: Policy, lr=1e-3, clip=1.0, temperature=1.0, soft=True, depth=3):
        if policy.mtp is None:
            raise BadInput(f"{policy.path}: has no MTP head; mtp.py trains one for it")
        self.policy, self.clip, self.temperature, self.soft, self.depth = policy, clip, temperature, soft, depth
        self.optimizer = torch.optim.AdamW(policy.mtp.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.drafts = 0  # first drafts since the last step, on this rank
        self.sums = torch.zeros(1 + 2 * depth + 3 * len(RULES), dtype=torch.float64)  # since the last log

    def read(self, ids: Tensor, mask: Tensor, hidden: Tensor | None = None, train=True) -> None:
        """Take in a micro-batch (B, T): its gradient if it is to be trained on, and what the log wants of it."""
        with torch.set_grad_enabled(train):
            total, columns, starts = loss(
                self.policy.model, self.policy.mtp, ids, mask, hidden, self.soft, self.temperature, self.depth
            )
        counts = starts.sum((0, 1))
        if train and counts[0] > 0:
            total.backward()  # of the sum: how many there are is known at the step
            self.drafts += int(counts[0])
        found = [total.detach()[None], columns[..., 0].sum((0, 1)), counts, acceptance(columns, mask).flatten()]
        self.sums += torch.cat([x.to("cpu", torch.float64) for x in found])

    def step(self, ranks: Dist) -> float:
        """One optimizer step on what all ranks have read since the last one; the gradient norm, 0 without a draft."""
        count = torch.tensor(float(self.drafts), dtype=torch.float64, device=ranks.device)
        drafts, self.drafts = ranks.all_reduce_sum(count).item(), 0
        if not drafts:
            return 0.0
        for p in self.policy.mtp.parameters():
            if p.grad is not None:
                p.grad /= drafts
        return optimizer_step(self.policy.mtp, self.optimizer, self.clip, ranks)

    def log(self, ranks: Dist) -> dict[str, float]:
        """What the header calls loss, loss_d, length, rate, accepted, of all that was read since the last log."""
        sums, k = ranks.all_reduce_sum(self.sums.to(ranks.device)).tolist(), self.depth
        self.sums = torch.zeros_like(self.sums)
        counts = sums[1 + k : 1 + 2 * k]
        if not counts[0]:
            return {}
        log = {"loss": sums[0] / counts[0]}
        log |= {f"loss_{d}": sums[d] / counts[d - 1] for d in range(1, k + 1) if counts[d - 1]}
        for r, rule in enumerate(RULES):
            tokens, steps, accepted = sums[1 + 2 * k + 3 * r :][:3]
            log |= {f"{rule}length": tokens / steps, f"{rule}rate": tokens / steps / (k + 1)}
            log[f"{rule}accepted"] = accepted / steps / k
        return log


# ---------------------------------------------------------------------------------------------------------------------
# options


@dataclass
class Config:
    # where from, where to
    model: str = option(MISSING, "Hugging Face directory of the model, which stays as it is")
    rollouts: str = option(
        MISSING, "JSON-lines file of trajectories, as rl.py and sft.py write them, or a pattern with *"
    )
    config: str = option("small", "preset")
    init: str = option("native", "native = the model's own head, or a new one; random = a new one; or a directory")
    norm: Literal["keep", "after", "before"] = option(
        "keep", "hidden states after or before the model's final norm; keep = as its config.json says (after)"
    )
    out: str = option("", "run directory; empty = the next free runs/mtp-PRESET")
    resume: bool = option(False, "continue from the last checkpoint in --out")
    seed: int = option(0, "the seed of everything")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = a GPU per process if there are any")
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the model; the head is trained in float32")

    # what is trained
    depth: int = option(3, "drafts in a row", min=1, max=len(WEIGHTS))
    targets: Literal["soft", "hard"] = option("soft", "the model's whole distribution, or the recorded token")
    temperature: float = option(1.0, "of both distributions: that of the sampling", min=0.01)
    context: int = option(1536, "longest rollout in tokens; a longer one is left out, and counted", min=3)
    held_out: int = option(16, "rollouts that are never trained, for the evaluation", min=1)

    # update
    steps: int = option(200, "optimizer steps", min=1)
    batch: int = option(16, "rollouts per step, over all ranks", min=1)
    micro: int = option(8, "rollouts per forward and rank; does not change the result", min=1)
    lr: float = option(1e-3, "AdamW learning rate", min=0)
    warmup: int = option(10, "steps of linear warmup", min=0)
    lr_end: float = option(0.1, "fraction of lr at the last step, approached linearly; 1 = constant", min=0)
    grad_clip: float = option(1.0, "largest gradient norm, over all ranks; 0 = no clip", min=0)
    eval_every: int = option(50, "steps between evaluations; 0 = only before and after", min=0)
    save_every: int = option(50, "steps between checkpoints", min=1)


PRESETS = {
    "tiny": dict(steps=2, batch=2, micro=1, held_out=1, save_every=1),
    "small": dict(),
}

# ---------------------------------------------------------------------------------------------------------------------
# the run

Sequence = tuple[list[int], list[int]]  # ids, mask


def files_of(pattern: str | Path) -> list[str | Path]:
    """What a pattern with * names, or the file itself."""
    return sorted(glob.glob(str(pattern))) or [pattern]


def read_rollouts(pattern: str | Path, vocab: int, context: int) -> tuple[list[Sequence], str]:
    """The rollouts of the files that have something to draft, and a line on those left out. BadInput says where.

    Of each line only ids and mask are read: any recorded or told conversation will do.
    """
    rows, long, silent = [], 0, 0
    files = files_of(pattern)
    lines = ((file, n, line) for file in files for n, line in enumerate(read_text(file).split("\n"), 1) if line.strip())
    for path, n, line in lines:
        try:
            data = json.loads(line)
            ids, mask = data["ids"], data["mask"]
            right = len(ids) == len(mask) and all(type(i) is int for i in ids) and set(mask) <= {0, 1}
        except (ValueError, LookupError, TypeError):
            right = False
        if not right or (mask and mask[0]):
            raise BadInput(f"{path}:{n}: not a trajectory: ids and a mask of 0 and 1 of one length, the first one 0")
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise BadInput(f"{path}:{n}: an id is not within the {vocab} tokens of the model: another tokenizer's?")
        short = not any(a and b for a, b in zip(mask, mask[1:]))
        long, silent = long + (len(ids) > context), silent + short
        if len(ids) <= context and not short:
            rows.append((ids, mask))
    return rows, f"{pattern}: {len(rows)} rollouts; left out: {long} beyond --context, {silent} with nothing to draft"


def ready(cfg: Config, ranks: Dist) -> tuple[Policy, str]:
    """The policy with the head that is to be trained, in float32, and a line on where it came from."""
    policy = load(cfg.model, ranks.device, getattr(torch, cfg.dtype))
    config = policy.model.requires_grad_(False).config.get_text_config()
    if cfg.context > config.max_position_embeddings:
        raise BadInput(
            f"--context {cfg.context} is beyond the {config.max_position_embeddings} positions of {cfg.model}"
        )
    line = f"the head of {cfg.model}"
    if cfg.init not in ("native", "random"):
        graft(policy, cfg.init)
        line = f"the head of {cfg.init}, on {cfg.model}"
    elif cfg.init == "random" or policy.mtp is None:
        policy.mtp = MTP(policy.model, seed_of(cfg.seed, "head") % 2**63)
        line = "a new head" if cfg.init == "random" else f"{cfg.model} has no tensors mtp.*: a new head"
    if cfg.norm != "keep":
        policy.mtp.before_norm = config.mtp_before_norm = cfg.norm == "before"
    policy.mtp.float()
    return policy, f"{line}, {sum(p.numel() for p in policy.mtp.parameters())} weights"


def batch_at(step: int, rows: list[Sequence], cfg: Config) -> list[Sequence]:
    """The rollouts of a step's global batch: all of them in another order each epoch, whichever rank asks."""
    return [rows[i] for i in in_turn(range((step - 1) * cfg.batch, step * cfg.batch), len(rows), cfg.seed)]


def read_all(learner: Learner, rows: list[Sequence], cfg: Config, ranks: Dist, train: bool) -> None:
    """Give the learner this rank's share of the rows, like lengths together."""
    mine = sorted(rows[ranks.rank :: ranks.world], key=lambda row: len(row[0]))
    for start in range(0, len(mine), cfg.micro):
        learner.read(
            *pad_batch(*zip(*mine[start : start + cfg.micro]), bucket=BUCKET, device=ranks.device), train=train
        )


def main(argv: list[str]):
    cfg = parse(Config, PRESETS, argv, __doc__)
    ranks = dist(None if cfg.device == "auto" else cfg.device)
    if cfg.batch % ranks.world:
        raise BadInput(f"--batch {cfg.batch} must be a multiple of the {ranks.world} processes")
    # before Run, so that what is refused leaves no directory
    policy, origin = ready(cfg, ranks)
    rows, counted = read_rollouts(cfg.rollouts, policy.codec.vocab_size, cfg.context)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed_of(cfg.seed, "held out"))).tolist()
    held, rows = ([rows[i] for i in part] for part in (order[: cfg.held_out], order[cfg.held_out :]))
    if not rows:
        raise BadInput(f"{counted}; nothing to train beside --held-out {cfg.held_out}")

    inputs = {"rollouts_digest": digest(*files_of(cfg.rollouts)), "model_digest": model_digest(cfg.model)}
    inputs |= {"head_digest": model_digest(cfg.init)}  # a word, where it is no directory
    record = Run(cfg.out, cfg, cfg.resume, f"runs/mtp-{cfg.config}", ranks, inputs=inputs)
    saved = load_checkpoint(record.dir, ranks) if checkpoints(record.dir) else None
    learner = Learner(policy, cfg.lr, cfg.grad_clip, cfg.temperature, cfg.targets == "soft", cfg.depth)
    before, after = {}, {}
    if saved:
        policy.mtp.load_state_dict(saved[2]["head"])
        learner.optimizer.load_state_dict(saved[2]["optimizer"])
        before, after = saved[2]["before"], saved[2]["after"]
    record.say(f"{counted}\n{origin}; {len(rows)} to train, {len(held)} held out")

    with Stop(ranks) as stop, tqdm(desc="steps", initial=record.start, total=cfg.steps, disable=ranks.rank > 0) as bar:
        for step in range(record.start + 1 if saved else 0, cfg.steps + 1):  # step 0 only evaluates
            started, log = time.perf_counter(), {}
            if step:
                lr = set_rate(learner.optimizer, learning_rate(step, cfg.steps, cfg))
                read_all(learner, batch_at(step, rows, cfg), cfg, ranks, train=True)
                norm = learner.step(ranks)
                log = learner.log(ranks) | {"grad_norm": norm, "lr": lr}
                log["seconds"] = time.perf_counter() - started
            if step in (0, cfg.steps) or (cfg.eval_every and step % cfg.eval_every == 0):
                read_all(learner, held, cfg, ranks, train=False)
                after = learner.log(ranks)
                before = before or after
                log |= {f"held_out/{name}": value for name, value in after.items()}
            record.log(step, **log)
            stopping = stop.requested
            if step == cfg.steps or step % cfg.save_every == 0 or stopping:
                state = {"head": policy.mtp.state_dict(), "optimizer": learner.optimizer.state_dict()}
                state |= {"before": before, "after": after}
                save_checkpoint(record.dir, step, lambda directory: None, state, ranks)  # the model stands in --model
            if step:
                bar.set_postfix({name: f"{log[name]:.3g}" for name in ("loss", "length", "greedy_length")})
                bar.update()
            if stopping:
                break

    if ranks.rank == 0:
        policy.publish(record.dir / "model")
        draw(record.dir, "loss.png", "D of each draft, nats", [f"loss_{d}" for d in range(1, cfg.depth + 1)])
        kinds = [f"held_out/{rule}length" for rule in RULES]
        draw(record.dir, "acceptance.png", f"tokens per forward, of {cfg.depth + 1}", kinds)
        record.say(f"{len(held)} rollouts held out     before       after")
        for name in after:
            record.say(f"{name:22} {before[name]:>10.3f}  {after[name]:>10.3f}")
        record.say(f"{record.dir}: model/, loss.png, acceptance.png")
    ranks.barrier()  # nobody leaves while another still writes


if __name__ == "__main__":
    cli(main)
