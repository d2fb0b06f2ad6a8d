"""The rollout engine: drives thousands of agent loops in one batch, with log-probs and with KV reuse across turns.

    u ~ U[0, 1) from the rollout's own generator         one number per token: same seed, same output in any batch
    token   = min { v : sum_{w <= v} p(w) > u }          p = softmax(logits / temperature), then top-k, then top-p
    logp    = log p(token)                               of the very distribution that was sampled from, in fp32

An agent loop is a generator: it yields a `Turn` (token ids to append) and is sent a `Sample` (what the policy said).
Each loop holds a *row* of a KV buffer until it returns, tools included. One step is one forward pass over a flat list
of tokens: one token of every row that is sampling, and all that is new of every row that begins a turn. Rows do not
wait for each other; attention alone is padded, to the longest row. A new row first copies the longest prefix that it
shares with some other row: the prompt of a group, or the system prompt of a harness, is computed once.

    engine = Engine(policy, slots=64, context=1024)
    loops = [run(harness, task.danmaku, task.open(), policy.codec, seed) for seed in seeds]
    trajectories = engine.run(loops, seeds)
    engine.stats                                         tokens_per_s, prefilled, reused, loop_ms_per_turn, ...

Without a deadline a run is reproducible bit for bit; in another batch, or with a deadline, up to float rounding.
`python bench/rollout.py` measures it: 3 to 6 times the tokens per second of `generate` on the whole history.

For Hugging Face causal LMs whose layers all have full attention and take an attention function of ours (tested with
Qwen2, Qwen3 and Llama); the others are refused. The device is the model's; tested on CPU, not yet on CUDA.
Left out: sliding-window and recurrent layers, paged memory, tensor parallelism; a serving engine has those.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import common  # noqa: F401  before torch: it sets the OpenMP environment
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from chat import Sample, Turn
from common import BadInput
from model import Policy

GROW = 64  # the KV buffer grows by this many positions; multiples of 8 keep CUDA's masked attention on its fast path
BUDGET = 4096  # tokens of new prompts in one step, the others wait for the next: bounds the activations
GRACE = 1.0  # seconds that a loop may run on after its deadline, to end in order, before it counts as stuck
SHARE = 16  # a shared prefix must be this much longer for a new row to wait a step until it can be copied

# ---------------------------------------------------------------------------------------------------------------------
# sampling


@torch.inference_mode()
def sample(logits, u, temperature=1.0, top_p=1.0, top_k=0):
    """Inverse-CDF sampling. logits (N, V), u (N,) fp32 in [0, 1) -> tokens (N,), their log-probs (N,) fp32.

    In the order of Hugging Face: temperature, top-k, then the smallest set of what is left whose mass reaches top_p.
    A row with NaN gives a token in range and a NaN log-prob.
    """
    p, tokens = (logits.float() / temperature).softmax(-1), None  # (N, V)
    if top_k > 0 or top_p < 1:
        p, tokens = _candidates(p, top_p, top_k)  # (N, K) descending
        ahead = p.cumsum(-1) - p  # the mass before each candidate
        p = p.masked_fill(ahead >= top_p, 0)
        p = p / p.sum(-1, keepdim=True)
    cdf = p.cumsum(-1)
    total = cdf[:, -1:]
    # strictly below the total, to which u * total may round up: what follows the last positive p has probability 0
    goal = torch.minimum(u[:, None] * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(cdf, goal, right=True).clamp_(max=cdf.shape[-1] - 1)  # (N, 1)
    return (index if tokens is None else tokens.gather(-1, index))[:, 0], p.gather(-1, index)[:, 0].log()


def _candidates(p, top_p, top_k):
    """Probabilities in descending order and their tokens: top_k, renormalised, or enough to hold top_p of the mass."""
    if top_k > 0:
        values, tokens = p.topk(min(top_k, p.shape[-1]), dim=-1)
        return values / values.sum(-1, keepdim=True), tokens
    for k in (128, 1024):  # on a CPU a full sort costs more than a small model does, and few batches need one
        if k < p.shape[-1]:
            values, tokens = p.topk(k, dim=-1)
            if bool((values.sum(-1) >= top_p).all()):
                return values, tokens
    return p.sort(dim=-1, descending=True)


@torch.inference_mode()
def argmax(logits):
    """logits (N, V) -> the likeliest tokens (N,) and their log-probs under softmax(logits), untempered, (N,) fp32."""
    x = logits.float()
    top, tokens = x.max(-1)
    return tokens, top - x.logsumexp(-1)


# ---------------------------------------------------------------------------------------------------------------------
# keys, values and attention, row by row


class Buffer:
    """Keys and values of all rows: per layer one (slots, KV, L, D) tensor each, L growing with the longest row.

    It grows, rather than being cut from one of full length, so that its first N rows are contiguous.
    """

    def __init__(self, model, slots):
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.device, self.dtype = model.device, model.dtype  # both walk over all weights: ask once, not in each step
        empty = torch.empty(slots, kv_heads, 0, head_dim, dtype=self.dtype, device=self.device)
        self.keys, self.values = [empty] * config.num_hidden_layers, [empty] * config.num_hidden_layers
        self.slots, self.length = slots, 0

    def reserve(self, length):
        if length > self.length:
            more = -(-length // GROW) * GROW - self.length
            for tensors in (self.keys, self.values):
                for i in range(len(tensors)):  # one at a time: the peak is little more than the result
                    tensors[i] = F.pad(tensors[i], (0, 0, 0, more))
            self.length += more

    @torch.inference_mode()
    def copy(self, source, target, length):
        """Give row `target` the first `length` positions of row `source`."""
        for tensor in self.keys + self.values:
            tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def clear(self, row):
        """Zero a row. A NaN that stays would reach the row's next rollout: a weight of 0 times NaN is NaN."""
        for tensor in self.keys + self.values:
            tensor[row] = 0


@dataclass
class Step:
    """One forward pass over T flat tokens of rows 0 .. N-1, in the order of the rows."""

    row: torch.Tensor  # (T,) the row of each token
    position: torch.Tensor  # (T,) its position there
    last: torch.Tensor | None  # (N,) where each row's last token stands; None when every row has one (T == N)
    bias: torch.Tensor  # (N, 1, 1, L) 0 where that last token may look, -inf elsewhere
    spans: list[tuple[int, int, int, int]]  # (row, start, stop, past) of each row with more than one token
    buffer: Buffer


def attend(module, query, key, value, attention_mask, scaling, step: Step, **_):
    """The attention function that transformers calls. query (1, H, T, D); key, value (1, KV, T, D) -> (1, T, H, D).

    Stores the new keys and values in their rows. Then attends: the last tokens of all rows in one batched product, and
    the few rows with several new tokens one by one (causal among the new, everything before them).
    """
    keys, values = step.buffer.keys[module.layer_idx], step.buffer.values[module.layer_idx]
    keys[step.row, :, step.position] = key[0].transpose(0, 1)
    values[step.row, :, step.position] = value[0].transpose(0, 1)
    n, kv_heads, group = len(step.bias), key.shape[1], query.shape[1] // key.shape[1]
    q = query[0].transpose(0, 1)  # (T, H, D)
    last = (q if step.last is None else q[step.last]).reshape(n, kv_heads, group, -1)  # heads of one key side by side
    if q.dtype == torch.float32:  # two thin products; SDPA takes 1.5 times as long for one query on a CPU
        weights = torch.matmul(last * scaling, keys[:n].transpose(2, 3)).add_(step.bias).softmax(-1)
        out = torch.matmul(weights, values[:n])
    else:  # SDPA keeps the scores of half-precision queries and keys in fp32
        bias = step.bias.expand(-1, -1, group, -1)
        out = F.scaled_dot_product_attention(last, keys[:n], values[:n], bias, scale=scaling)
    out = out.reshape(n, kv_heads * group, -1)
    if step.last is None:
        return out[None], None
    flat = torch.empty_like(q)
    flat[step.last] = out
    for row, start, stop, past in step.spans:
        k, v = (x[row : row + 1, :, : past + stop - start].repeat_interleave(group, dim=1) for x in (keys, values))
        mask = torch.ones(stop - start, k.shape[2], dtype=torch.bool, device=k.device).tril_(past) if past else None
        out = F.scaled_dot_product_attention(query[:, :, start:stop], k, v, mask, is_causal=not past, scale=scaling)
        flat[start:stop] = out[0].transpose(0, 1)
    return flat[None], None


AttentionInterface.register("hat_rows", attend)


@contextmanager
def _row_attention(model):
    """Inside, the model attends by rows and is in eval mode; the trainer's own state comes back afterwards."""
    config, training = model.config.get_text_config(), model.training
    before, config._attn_implementation = config._attn_implementation, "hat_rows"
    model.eval()
    try:
        yield
    finally:
        config._attn_implementation = before
        model.train(training)


# ---------------------------------------------------------------------------------------------------------------------
# the engine


@dataclass(eq=False)
class Row:
    """A rollout in flight. Its context stands in Engine.tokens[slot, :length]."""

    index: int  # among the rollouts
    slot: int  # among the rows
    loop: Generator
    rng: np.random.Generator
    deadline: float
    cached: int  # leading tokens whose keys and values are in the buffer
    length: int = 0  # tokens of the context, sampled ones included
    state: str = "away"  # away: its loop is running; new: nothing of it has been computed; live: it is sampled
    resumed: float = 0.0  # when its loop was last sent something
    limit: int = 0  # tokens that this turn may sample
    cut: str = "length"  # the finish when it reaches the limit
    ids: list[int] = field(default_factory=list)  # sampled in this turn
    logps: list[float] = field(default_factory=list)
    failed: bool = False


class Engine:
    """Batched sampling for agent loops.

    slots: rollouts in flight at once. context: most tokens of a rollout, prompt and samples together.
    temperature > 0, top_p, top_k (0 = off): the distribution that is sampled. deadline_s: wall-clock seconds of a
    rollout from its start; a turn that it cuts ends with finish "error", and a loop that is stuck in a tool is given
    up. Raises BadInput for values out of range and for models with other than full-attention layers.
    KV memory is slots x longest context in use, in the model's dtype; it is freed when `run` returns.
    """

    def __init__(self, policy: Policy, slots=64, context=1024, temperature=1.0, top_p=1.0, top_k=0, deadline_s=None):
        config = policy.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not policy.model._supports_attention_backend:  # it would ignore ours: no cache, no mask, and no error
            raise BadInput(f"{policy.path}: {config.model_type} models take no attention function of the engine's")
        if kinds != {"full_attention"}:
            raise BadInput(
                f"{policy.path}: the engine knows full_attention layers only, not {', '.join(sorted(kinds))}"
            )
        if not (temperature > 0 and 0 < top_p <= 1 and top_k >= 0 and slots >= 1 and context >= 2):
            raise BadInput("engine: needs temperature > 0, 0 < top_p <= 1, top_k >= 0, slots >= 1 and context >= 2")
        if context > config.max_position_embeddings:
            raise BadInput(
                f"engine: context {context} is beyond {policy.path}'s {config.max_position_embeddings} positions"
            )
        self.policy, self.slots, self.context, self.deadline_s = policy, slots, context, deadline_s
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.vocab = policy.codec.vocab_size  # ids from here on are padding of the head and are never sampled
        self.stop_ids = frozenset(policy.codec.stop_ids)
        self.stats: dict[str, float] = {}

    def run(self, rollouts: list[Generator], seeds: list[int], greedy=False, progress: Callable | None = None) -> list:
        """Drive the generators to their ends; what they returned, in their order. `stats` tells how it went.

        seeds: one per rollout. greedy: the likeliest token instead, with its log-prob at temperature 1 and without
        top-k and top-p. progress(1) is called as each rollout ends. An exception inside a generator is a fault of the
        program and comes through. None stands for a loop that was stuck in a tool at its deadline.

        stats: sampled, prefilled (tokens computed at the start of turns), reused (tokens that were not), turns, steps,
        expired, stuck, nan (rollouts cut by a NaN), seconds, model_s, loop_s, tokens_per_s (sampled), loop_ms_per_turn.
        """
        assert len(rollouts) == len(seeds), f"{len(rollouts)} rollouts but {len(seeds)} seeds"
        counts = ("sampled", "prefilled", "reused", "turns", "steps", "expired", "stuck", "nan")
        self.stats = stats = dict.fromkeys(counts, 0) | {"seconds": 0.0, "model_s": 0.0, "loop_s": 0.0}
        self.greedy, self.progress = greedy, progress or (lambda n: None)
        self.results = [None] * len(rollouts)
        self.waiting = deque(zip(range(len(rollouts)), rollouts, seeds, strict=True))
        self.rows: list[Row] = []  # rows[i] owns row i of the buffer; a gap is closed at once
        self.inbox = SimpleQueue()  # (row, what its loop answered, seconds it took)
        self.buffer = Buffer(self.policy.model, min(self.slots, len(rollouts)))
        self.tokens = np.zeros((self.buffer.slots, self.context), dtype=np.int64)
        began = time.perf_counter()
        try:
            with _row_attention(self.policy.model):
                while self.waiting or self.rows:
                    self._serve_loops()
                    if any(row.state != "away" for row in self.rows):
                        self._step()
        finally:
            self.buffer = None  # its memory is the trainer's now
        stats["seconds"] = time.perf_counter() - began
        stats["tokens_per_s"] = stats["sampled"] / stats["seconds"]
        stats["loop_ms_per_turn"] = 1000 * stats["loop_s"] / max(1, stats["turns"])
        return self.results

    # -- the loops

    def _serve_loops(self):
        """Start rollouts while there are slots, and take in what the loops have answered."""
        while self.waiting and len(self.rows) < self.buffer.slots:
            self.rows.append(self._start(len(self.rows), cached=0))
        idle = all(row.state == "away" for row in self.rows)
        while self.rows:
            try:
                row, answer, seconds = self.inbox.get(timeout=0.01) if idle else self.inbox.get_nowait()
            except Empty:
                break
            idle = False
            self.stats["loop_s"] += seconds
            if row not in self.rows:
                continue  # it was stuck and given up
            if isinstance(answer, Turn):
                self._open_turn(row, answer)
            elif isinstance(answer, StopIteration):
                self.results[row.index] = answer.value
                self._end(row)
            else:
                raise answer
        if self.deadline_s is not None:
            now = time.perf_counter()
            for row in [r for r in self.rows if r.state == "away" and now > max(r.deadline, r.resumed + GRACE)]:
                self.stats["stuck"] += 1
                self._end(row)

    def _start(self, slot, cached):
        index, loop, seed = self.waiting.popleft()
        deadline = time.perf_counter() + (math.inf if self.deadline_s is None else self.deadline_s)
        row = Row(index, slot, loop, np.random.default_rng(seed), deadline, cached)
        self._resume(row, None)
        return row

    def _resume(self, row, answer: Sample | None):
        """Let the loop run. Under a deadline it gets a thread: a tool that hangs then stops nobody else."""
        row.state, row.resumed = "away", time.perf_counter()
        if self.deadline_s is None:
            _talk(row, answer, self.inbox)
        else:
            threading.Thread(target=_talk, args=(row, answer, self.inbox), daemon=True).start()

    def _open_turn(self, row, turn):
        """Append the turn's ids to the row's context. A turn that leaves nothing to sample is answered at once."""
        if row.failed:
            raise RuntimeError(f"rollout {row.index} asks for another turn although it was told of an error")
        self.stats["turns"] += 1
        stop, row.ids, row.logps = row.length + len(turn.ids), [], []
        room = self.context - stop
        row.limit, row.cut = (turn.max_new_tokens, "length") if turn.max_new_tokens <= room else (room, "context")
        if time.perf_counter() > row.deadline:
            return self._fail(row, "expired")
        if row.limit < 1:
            return self._close_turn(row, row.cut)
        if row.length:
            row.state = "live"
            self.stats["reused"] += row.cached
        else:  # what the slot's previous rollout left behind may begin like this one
            row.state = "new"
            row.cached = min(row.cached, stop - 1, int(_same(self.tokens[row.slot, None, :stop], turn.ids)[0]))
        self.tokens[row.slot, row.length : stop] = turn.ids
        row.length = stop

    def _close_turn(self, row, finish):
        self._resume(row, Sample(row.ids, row.logps, finish))

    def _fail(self, row, why):
        row.failed = True
        self.stats[why] += 1
        self._close_turn(row, "error")

    def _end(self, row):
        """A rollout is over: its slot goes to a waiting one, or else to the last row, so that the rows stay compact."""
        self.progress(1)
        if self.waiting:
            self.rows[row.slot] = self._start(row.slot, row.cached)
        elif (last := self.rows.pop()) is not row:
            self.buffer.copy(last.slot, row.slot, last.cached)
            self.tokens[row.slot] = self.tokens[last.slot]
            last.slot, self.rows[row.slot] = row.slot, last

    # -- the model

    def _step(self):
        """One forward pass, and one more token for each row that takes part."""
        start = time.perf_counter()
        part = self._choose()
        # a row that sits out feeds its next token and forgets it: the place is written again when its turn comes
        new = np.array([r.length - r.cached if takes else 1 for r, takes in zip(self.rows, part, strict=True)])
        past = np.array([r.cached for r in self.rows])
        logits = self._forward(new, past)  # (N, V)
        if self.greedy:
            tokens, logps = argmax(logits)
        else:
            u = [r.rng.random(dtype=np.float32) if takes else 0.0 for r, takes in zip(self.rows, part, strict=True)]
            u = torch.tensor(u, dtype=torch.float32, device=logits.device)
            tokens, logps = sample(logits, u, self.temperature, self.top_p, self.top_k)
        tokens, logps, now = tokens.tolist(), logps.tolist(), time.perf_counter()
        self.stats["steps"] += 1
        self.stats["model_s"] += now - start
        self.stats["sampled"] += sum(part)
        for row, takes, token, logp in zip(self.rows, part, tokens, logps, strict=True):
            if takes:
                self._append(row, token, logp, now)

    def _append(self, row, token, logp, now):
        if not row.ids:
            self.stats["prefilled"] += row.length - row.cached
        row.cached = row.length
        if math.isnan(logp):
            self.buffer.clear(row.slot)
            self.tokens[row.slot] = row.cached = 0
            return self._fail(row, "nan")
        self.tokens[row.slot, row.length] = token
        row.length += 1
        row.ids.append(token)
        row.logps.append(logp)
        if token in self.stop_ids:
            self._close_turn(row, "stop")
        elif len(row.ids) == row.limit:
            self._close_turn(row, row.cut)
        elif now > row.deadline:
            self._fail(row, "expired")

    def _choose(self):
        """Which rows take part in this step, as booleans; new rows get the prefix that they share with another.

        A new row waits a step if some row is about to compute what it could then copy; the first in line never does.
        """
        n, part, spent = len(self.rows), [], 0
        cached = np.array([r.cached for r in self.rows])
        coming = np.zeros(n, dtype=np.int64)  # what new rows that take part will have after this step
        for row in self.rows:
            takes = row.state == "live"
            if row.state == "new":
                same = _same(self.tokens[:n, : row.length - 1], self.tokens[row.slot, : row.length - 1])  # (N,)
                ready = np.minimum(same, cached)
                source = int(ready.argmax())
                if ready[source] > row.cached:
                    self.buffer.copy(source, row.slot, int(ready[source]))
                    row.cached = cached[row.slot] = int(ready[source])
                takes = bool(np.minimum(same, coming).max() < row.cached + SHARE)
            pending = row.length - row.cached
            if takes and pending > 1:
                takes = spent == 0 or spent + pending <= BUDGET
                spent += takes * pending
            if takes and row.state == "new":
                row.state, coming[row.slot] = "live", row.length
                self.stats["reused"] += row.cached
            part.append(takes)
        return part

    @torch.inference_mode()
    def _forward(self, new, past):
        """Feed new[i] tokens of each row i, after the past[i] that are cached -> logits after its last one (N, V)."""
        model, buffer, n = self.policy.model, self.buffer, len(new)
        buffer.reserve(int((past + new).max()))
        stop = new.cumsum()
        row = np.repeat(np.arange(n), new)  # (T,)
        position = np.arange(stop[-1]) + np.repeat(past + new - stop, new)  # (T,)
        ids, row_, position_, last = (
            torch.from_numpy(x).to(buffer.device) for x in (self.tokens[row, position], row, position, stop - 1)
        )
        seen = torch.arange(buffer.length, device=buffer.device) <= position_[last][:, None]  # (N, L)
        bias = torch.zeros(seen.shape, dtype=buffer.dtype, device=buffer.device).masked_fill_(~seen, -math.inf)
        spans = [(i, int(stop[i] - new[i]), int(stop[i]), int(past[i])) for i in np.flatnonzero(new > 1)]
        step = Step(row_, position_, last if spans else None, bias[:, None, None], spans, buffer)
        out = model(
            input_ids=ids[None],
            position_ids=position_[None],
            attention_mask=bias[:1, None, None],  # ready-made, in four dimensions: transformers builds none of its own
            use_cache=False,
            logits_to_keep=last if spans else 0,
            step=step,
        )
        return out.logits[0, :, : self.vocab]


def _talk(row, answer, inbox):
    """Run the loop to its next turn or its end, and put what came of it into the engine's inbox."""
    start = time.perf_counter()
    try:
        reply = row.loop.send(answer)
    except Exception as end:  # StopIteration among them; the engine's own thread raises what is an error
        reply = end
    inbox.put((row, reply, time.perf_counter() - start))


def _same(contexts, ids):
    """Length of the common beginning of each context (N, T) and ids (T,). -> (N,)"""
    differs = np.ones((len(contexts), len(ids) + 1), dtype=bool)
    np.not_equal(contexts, ids, out=differs[:, :-1])
    return differs.argmax(-1)
