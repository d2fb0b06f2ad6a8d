"""The rollout engine: drives thousands of agent loops in one batch, with log-probs, KV reuse and speculative decoding.

    u ~ U[0, 1) from the rollout's own generator         one number per token: same seed, same output in any batch
    token   = min { v : sum_{w <= v} p(w) > u }          p = softmax(logits / temperature), then top-k, then top-p
    logp    = log p(token)                               of the very distribution that was sampled from, in fp32
    draft d accepted if u < p(d), else p without d       d = the likeliest guess of the policy's MTP head: lossless

An agent loop is a generator: it yields a `Turn` (token ids to append) and is sent a `Sample` (what the policy said).
Each loop holds a *row* (see rows.py) until it returns, tools included. One step is one forward pass over a flat list of
tokens: of every row that is sampling its last token and the drafts that may follow, and of every row that begins a turn
all that is new. Rows do not wait for each other. A new row first copies the longest prefix that it shares with some
other row: the prompt of a group, or the system prompt of a harness, is computed once.

    engine = Engine(policy, slots=64, context=1024, drafts=3)
    loops = [run(harness, task.danmaku, task.open(), policy.codec, seed) for seed in seeds]
    trajectories = engine.run(loops, seeds)
    engine.stats                                         tokens_per_s, prefilled, reused, loop_ms_per_turn, ...
    engine.times                                         of each rollout: start, first token, end

After each step the head reads the model's own hidden states of the tokens that stayed, never those of drafts, and
guesses `drafts` tokens on, one by one. The next step reads them at once with the token before; those that are accepted
are the context's, and one more token is always won. Without drafts all rows take the same way, one token at a time.

Without a deadline a run is reproducible, on a CPU bit for bit; in another batch, or with a deadline, up to rounding.
`python bench/rollout.py` measures it: 3 to 6 times the tokens per second of `generate` on the whole history;
`python bench/speculate.py` what the drafts add. Whole requests of an evaluation set, as they are served (replay.py):

    python infer.py replay --model DIR --set T1 --concurrency 1,2,4,8

For Hugging Face causal LMs whose layers have full attention and take an attention function of ours, or gated-delta
recurrence (tested with Qwen2, Qwen3, Llama, Qwen3-Next and the text model of Qwen3.5 and 3.6 with experts); others are
refused. The device is the model's; tested on CPU, not yet on CUDA, where steps of few rows are replayed (graphs.py).
Left out: trees of drafts and sampled drafts, sliding windows, paged memory, tensor parallelism; a serving engine has
those.
"""

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

import common  # noqa: F401  before torch: it sets the OpenMP environment
import numpy as np
import torch

from chat import Sample, Turn
from options import BadInput
from model import Policy
from verify import invert, target, verify
from rows import Buffer, by_rows, forward, guess, ones, plan, recurrent_layers
from graphs import CudaGraph, Graphs

BUDGET = 4096  # tokens of new prompts in one step, the others wait for the next: bounds the activations
GRACE = 1.0  # seconds that a loop may run on after its deadline, to end in order, before it counts as stuck
SHARE = 16  # a shared prefix must be this much longer for a new row to wait a step until it can be copied
PAUSE = (
    64  # and this much for a prompt to be computed up to its end first, where a recurrent model's state is then saved
)
ENOUGH = 200  # verifications before a warning that drafting does not pay

# ---------------------------------------------------------------------------------------------------------------------
# sampling


@torch.inference_mode()
def sample(logits, u, temperature=1.0, top_p=1.0, top_k=0):
    """Inverse-CDF sampling. logits (N, V), u (N,) fp32 in [0, 1) -> tokens (N,), their log-probs (N,) fp32.

    In the order of Hugging Face: temperature, top-k, then the smallest set of what is left whose mass reaches top_p.
    A row with NaN gives a token in range and a NaN log-prob.
    """
    p, tokens = target(logits, temperature, top_p, top_k)
    index = invert(p, u)[:, None]
    return (index if tokens is None else tokens.gather(-1, index))[:, 0], p.gather(-1, index)[:, 0].log()


@torch.inference_mode()
def argmax(logits):
    """logits (N, V) -> the likeliest tokens (N,) and their log-probs under softmax(logits), untempered, (N,) fp32."""
    x = logits.float()
    top, tokens = x.max(-1)
    return tokens, top - x.logsumexp(-1)


# ---------------------------------------------------------------------------------------------------------------------
# the engine


@dataclass(eq=False)
class Row:
    """A rollout in flight. Its context stands in Engine.tokens[slot, :length], what may follow right after it."""

    index: int  # among the rollouts
    slot: int  # among the rows
    loop: Generator
    rng: np.random.Generator
    deadline: float
    cached: int  # leading tokens that the model has read: their keys and values are in the buffer
    length: int = 0  # tokens of the context, sampled ones included
    drafts: int = 0  # tokens after those that are only guessed
    state: str = "away"  # away: its loop is running; new: its prompt is not yet computed; live: it is sampled
    known: int = 0  # leading tokens that the slot's last rollout had too
    resumed: float = 0.0  # when its loop was last sent something
    limit: int = 0  # tokens that this turn may sample
    cut: str = "length"  # the finish when it reaches the limit
    ids: list[int] = field(default_factory=list)  # sampled in this turn
    logps: list[float] = field(default_factory=list)
    failed: bool = False
    spoilt: bool = False  # by a NaN: the slot is to be cleared


class Engine:
    """Batched sampling for agent loops.

    slots: rollouts in flight at once. context: most tokens of a rollout, prompt and samples together.
    temperature > 0, top_p, top_k (0 = off): the distribution that is sampled. deadline_s: wall-clock seconds of a
    rollout from its start; a turn that it cuts ends with finish "error", and a loop that is stuck in a tool is given
    up. drafts: tokens that the policy's MTP head guesses ahead, for the model to verify at once; 0, or a policy without
    a head: one token at a time. Raises BadInput for values out of range and for models that `rows` does not know.
    KV memory is slots x longest context in use, in the model's dtype; it is freed when `run` returns.
    """

    def __init__(
        self, policy: Policy, slots=64, context=1024, temperature=1.0, top_p=1.0, top_k=0, deadline_s=None, drafts=0
    ):
        recurrent_layers(policy.model, policy.path)
        if not (temperature > 0 and 0 < top_p <= 1 and top_k >= 0 and slots >= 1 and context >= 2 and drafts >= 0):
            raise BadInput(
                "engine: needs temperature > 0, 0 < top_p <= 1, top_k >= 0, slots >= 1, context >= 2 and drafts >= 0"
            )
        positions = policy.model.config.get_text_config().max_position_embeddings
        if context > positions:
            raise BadInput(f"engine: context {context} is beyond {policy.path}'s {positions} positions")
        self.policy, self.slots, self.context, self.deadline_s = policy, slots, context, deadline_s
        self.temperature, self.top_p, self.top_k, self.drafts = temperature, top_p, top_k, drafts
        self.vocab = policy.codec.vocab_size  # ids from here on are padding of the head and are never sampled
        self.stop_ids = frozenset(policy.codec.stop_ids)
        self.stats: dict[str, float] = {}
        self.times = np.empty((0, 3))

    def run(self, rollouts: list[Generator], seeds: list[int], greedy=False, progress: Callable | None = None) -> list:
        """Drive the generators to their ends; what they returned, in their order. `stats` and `times` tell how it went.

        seeds: one per rollout. greedy: the likeliest token instead, with its log-prob at temperature 1 and without
        top-k and top-p. progress(1) is called as each rollout ends. An exception inside a generator is a fault of the
        program and comes through. None stands for a loop that was stuck in a tool at its deadline.

        stats: sampled, prefilled (tokens computed at the start of turns), reused (tokens that were not), turns, steps,
        expired, stuck, nan (rollouts cut by a NaN), seconds, model_s, loop_s, tokens_per_s (sampled), loop_ms_per_turn,
        replayed (passes that came from CUDA graphs).
        With an MTP head also draft_s, drafted (tokens), accepted (how often 0, 1, .. drafts of a row were right),
        yielded (tokens of these verifications) and accepted_length (of each), in its two conventions acceptance =
        accepted_length / (drafts + 1) and draft_acceptance = right drafts / drafted.
        times (rollouts, 3): seconds from the start of `run` at which each began, had sampled its first token, and ended
        (NaN: it never did).
        """
        assert len(rollouts) == len(seeds), f"{len(rollouts)} rollouts but {len(seeds)} seeds"
        self.head = getattr(self.policy, "mtp", None) if self.drafts else None
        heads = [] if self.head is None else [self.head]
        counts = ("sampled", "prefilled", "reused", "turns", "steps", "expired", "stuck", "nan", "drafted", "yielded")
        self.stats = stats = dict.fromkeys(counts, 0) | {"seconds": 0.0, "model_s": 0.0, "loop_s": 0.0, "draft_s": 0.0}
        stats["accepted"] = [0] * (1 + self.drafts * len(heads))
        self.greedy, self.progress = greedy, progress or (lambda n: None)
        self.results = [None] * len(rollouts)
        self.waiting = deque(zip(range(len(rollouts)), rollouts, seeds, strict=True))
        self.rows: list[Row] = []  # rows[i] owns row i of the buffer; a gap is closed at once
        self.inbox = SimpleQueue()  # (row, what its loop answered, seconds it took)
        self.graphs = Graphs(self.recorder())
        slots, grow = min(self.slots, len(rollouts)), self.graphs.grow
        self.buffer = Buffer(self.policy.model, slots, extra=len(heads), grow=grow)
        self.tokens = np.zeros((self.buffer.slots, self.context + 1), dtype=np.int64)
        self.times = np.full((len(rollouts), 3), math.nan)
        self.began = began = time.perf_counter()
        try:
            with by_rows(self.policy.model, *heads):
                while self.waiting or self.rows:
                    self._serve_loops()
                    if any(row.state != "away" for row in self.rows):
                        self._step()
        finally:
            stats["replayed"] = self.graphs.replayed.total()
            self.buffer = self.graphs = None  # their memory is the trainer's now
            if stats["replayed"]:
                torch.cuda.empty_cache()  # that of graphs is theirs until then
        stats["seconds"] = time.perf_counter() - began
        stats["tokens_per_s"] = stats["sampled"] / stats["seconds"]
        stats["loop_ms_per_turn"] = 1000 * stats["loop_s"] / max(1, stats["turns"])
        if times := sum(stats["accepted"]):
            right = sum(i * count for i, count in enumerate(stats["accepted"]))
            stats["accepted_length"] = stats["yielded"] / times  # less than 1 + right / times: a right end ends it
            stats["acceptance"] = stats["accepted_length"] / (1 + self.drafts)
            stats["draft_acceptance"] = right / stats["drafted"]
            price = 1 + stats["draft_s"] / stats["model_s"]
            if times >= ENOUGH and stats["accepted_length"] < price:
                warnings.warn(
                    f"drafting does not pay: with {self.drafts} drafts a step takes {price:.2f} times as long as its"
                    f" forward and has {stats['accepted_length']:.2f} tokens; train the MTP head on this policy, or set"
                    " drafts to 0",
                    stacklevel=2,
                )
        return self.results

    def recorder(self) -> type | None:
        """What records small steps: CudaGraph, where there is CUDA and this process has all weights; else None."""
        return CudaGraph if self.policy.model.device.type == "cuda" and self.policy.root is None else None

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
        now = time.perf_counter()
        self.times[index, 0] = now - self.began
        deadline = now + (math.inf if self.deadline_s is None else self.deadline_s)
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
            raise RuntimeError(f"rollout {row.index} asks for another turn after one that could not be sampled")
        self.stats["turns"] += 1
        stop, row.ids, row.logps = row.length + len(turn.ids), [], []
        room = self.context - stop
        row.limit, row.cut = (turn.max_new_tokens, "length") if turn.max_new_tokens <= room else (room, "context")
        if time.perf_counter() > row.deadline:
            return self._fail(row, "expired")
        if row.limit < 1:
            row.failed = True  # its ids are in no context: another turn could not follow
            return self._close_turn(row, row.cut)
        if row.length:
            row.state = "live"
        else:  # what the slot's previous rollout left behind may begin like this one
            row.state = "new"
            row.known = int(self._common(self.tokens[row.slot, None, :stop], np.array(turn.ids))[0])
            row.cached = self.buffer.rewind(row.slot, row.known, row.cached)
        self.stats["reused"] += row.cached
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
        self.times[row.index, 2] = time.perf_counter() - self.began
        if self.waiting:
            self.rows[row.slot] = self._start(row.slot, row.cached)
        elif (last := self.rows.pop()) is not row:
            self.buffer.move(last.slot, row.slot, last.cached)
            self.tokens[row.slot] = self.tokens[last.slot]
            last.slot, self.rows[row.slot] = row.slot, last

    # -- the model

    def _step(self):
        """One forward pass, and a token for each row whose context it completes; more where its drafts were right."""
        start = time.perf_counter()
        fresh = self._choose()  # (N,)
        past, drafts = np.array([(r.cached, r.drafts) for r in self.rows]).T
        # a row that sits out feeds its next token and forgets it: the place is written again when its turn comes
        new = np.maximum(fresh + drafts, 1)
        width = 1 + int(drafts.max())
        self.buffer.reserve(int((past + new).max()))
        step = plan(self.buffer, self.tokens, past, new, width, counts=fresh + drafts, hold=width > 1)
        hidden = self.graphs("model", partial(forward, self.policy.model), step)  # (T, H)
        done = [n > 0 and r.cached + n == r.length for r, n in zip(self.rows, fresh.tolist())]
        tokens, logps, right = self._sample(self._logits(hidden, new, drafts), drafts, done)
        now = time.perf_counter()
        self.stats["steps"] += 1
        self.stats["model_s"] += now - start
        kept = [1] * len(new)  # of the tokens, by row: none follows one that ends the turn
        for i, (row, n) in enumerate(zip(self.rows, fresh.tolist())):
            self.stats["prefilled"] += 0 if row.ids else n
            row.cached += n
            if done[i]:
                kept[i] = self._append(row, tokens[i][: right[i] + 1], logps[i], now)
                if drafts[i]:
                    self.stats["drafted"] += int(drafts[i])
                    self.stats["yielded"] += kept[i]
                    self.stats["accepted"][min(right[i], kept[i])] += 1
        read = np.where(fresh > 0, fresh + kept - 1, 0)  # tokens that now belong to the context
        if step.held:
            self.buffer.commit(step, np.where(new > width, 0, read))
        if self.buffer.order:
            for row in (r for r, n, ends in zip(self.rows, fresh, done) if n and not ends):
                self.buffer.save(row.slot, row.cached)
        if self.head is not None:
            start = time.perf_counter()  # loops have run since
            self._draft(hidden, past, new, np.maximum(read, 1))
            self.stats["draft_s"] += time.perf_counter() - start
        for row in self.rows:
            if row.spoilt:
                self.buffer.clear(row.slot)
                row.spoilt = False

    @torch.inference_mode()
    def _logits(self, hidden, new, drafts):
        """hidden (T, H) -> logits after the last token of each row's context, and after each of its drafts (N, Q, V).

        Rows with fewer than Q - 1 drafts repeat their last.
        """
        n, last, width = len(new), new.cumsum() - 1, 1 + int(drafts.max())
        if len(hidden) > n * width or (drafts < width - 1).any():
            index = (last - drafts)[:, None] + np.minimum(np.arange(width), drafts[:, None])  # (N, Q)
            hidden = hidden[torch.from_numpy(index.ravel()).to(hidden.device)]
        logits = self.policy.model.get_output_embeddings()(hidden[None])[0]
        return logits.view(n, width, -1)

    @torch.inference_mode()
    def _sample(self, logits, drafts, done):
        """logits (N, Q, V) -> by row: tokens and their log-probs, Q of each, and how many of its drafts were right."""
        if self.head is None:
            if self.greedy:
                tokens, logps = argmax(logits[:, 0, : self.vocab])
            else:
                u = [r.rng.random(dtype=np.float32) if ends else 0.0 for r, ends in zip(self.rows, done)]
                u = torch.tensor(u, dtype=torch.float32, device=logits.device)
                tokens, logps = sample(logits[:, 0, : self.vocab], u, self.temperature, self.top_p, self.top_k)
            return tokens[:, None].tolist(), logps[:, None].tolist(), [0] * len(self.rows)
        n, width, _ = logits.shape
        guessed = np.full((n, width - 1), -1)
        u = np.zeros((n, width), dtype=np.float32)
        for i, row in enumerate(self.rows):
            k = row.drafts
            guessed[i, :k] = self.tokens[row.slot, row.length : row.length + k]
            if done[i] and not self.greedy:
                u[i, : k + 1] = row.rng.random(k + 1, dtype=np.float32)
        guessed, u = torch.from_numpy(guessed).to(logits.device), torch.from_numpy(u).to(logits.device)
        options = dict(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, greedy=self.greedy)
        right, tokens, logps = verify(logits, guessed, u, **options, valid_vocab=self.vocab)
        return tokens.tolist(), logps.tolist(), right.tolist()

    def _append(self, row, tokens, logps, now):
        """Add sampled tokens to a row, up to one that ends its turn. -> the number that belong to its context."""
        row.drafts = 0
        for kept, (token, logp) in enumerate(zip(tokens, logps), 1):
            if math.isnan(logp):
                self.tokens[row.slot] = row.cached = 0
                row.spoilt = True
                self._fail(row, "nan")
                return kept
            self.tokens[row.slot, row.length] = token
            row.length += 1
            row.ids.append(token)
            row.logps.append(logp)
            self.stats["sampled"] += 1
            if token in self.stop_ids:
                self._close_turn(row, "stop")
                break
            if len(row.ids) == row.limit:
                self._close_turn(row, row.cut)
                break
        else:
            if now > row.deadline:
                self._fail(row, "expired")
        row.cached = row.length - 1
        if math.isnan(self.times[row.index, 1]):
            self.times[row.index, 1] = now - self.began
        return kept

    def _choose(self):
        """How many tokens of its context each row computes in this step (N,); 0: it sits out, or its loop is running.

        A new row first gets the longest prefix that it shares with another, and waits a step if some row is about to
        compute what it could then copy; the first in line never does. Recurrent states can be copied only where they
        stand: a prompt is computed up to the end of what it shares with others, and then from there.
        """
        n, spent = len(self.rows), 0
        cached = np.array([r.cached for r in self.rows])
        coming = np.zeros(n, dtype=np.int64)  # what new rows that take part will have after this step
        fresh = np.zeros(n, dtype=np.int64)
        for row in self.rows:
            if row.state == "away":
                continue
            stop, waits = row.length, False
            if row.state == "new":
                same = self._common(self.tokens[:n, :stop], self.tokens[row.slot, :stop])  # (N,)
                same[row.slot] = row.known
                ready = self.buffer.ready(same, cached)
                source = int(ready.argmax())
                if (more := int(ready[source]) - row.cached) > 0:
                    self.buffer.copy(source, row.slot, row.cached + more, int(cached[source]))
                    row.cached += more
                    cached[row.slot] = row.cached
                    self.stats["reused"] += more
                waits = self.buffer.ready(same, coming).max() >= row.cached + SHARE
                if self.buffer.order:
                    stop = min(same[same >= row.cached + PAUSE], default=stop)
            pending = int(stop) - row.cached
            if waits or (pending > 1 and spent and spent + pending > BUDGET):
                continue
            spent += pending if pending > 1 else 0
            fresh[row.slot] = pending
            if row.state == "new":
                coming[row.slot] = stop
                row.state = "live" if stop == row.length else "new"
        return fresh

    def _common(self, contexts, ids):
        """Leading tokens of each context (N, T) that a row with `ids` (T,) could take over: all but its last. (N,)"""
        lag = 0 if self.head is None else 1  # the head's keys at a position know of the token after it
        return np.clip(_same(contexts, ids) - lag, 0, len(ids) - 1)

    @torch.inference_mode()
    def _draft(self, hidden, past, new, read):
        """Feed the head what the model has read, hidden (T, H) and the token that follows, and let it guess on.

        Row i fed new[i] tokens after past[i], read[i] of which are in its context. Each guess is the likeliest token.
        """
        n, last = len(read), read.cumsum() - 1
        want = [min(self.drafts, r.limit - len(r.ids) - 1) if r.state == "live" and r.ids else 0 for r in self.rows]
        most = max(want)
        self.buffer.reserve(int((past + read).max()) + most)
        if (read < new).any():
            index = np.repeat(new.cumsum() - new - (last + 1 - read), read) + np.arange(read.sum())
            hidden = hidden[torch.from_numpy(index).to(hidden.device)]
        width = int(max(read[read <= self.drafts + 1], default=1))
        step = plan(self.buffer, self.tokens, past, read, width, ahead=1)
        first = partial(guess, self.policy.model, self.head)
        state, guesses = self.graphs("head", first, step, hidden), []  # (T, H)
        position = step.position
        if len(state) > n:
            last = torch.from_numpy(last).to(state.device)
            state, position = state[last], position[last]
        for _ in range(most):
            if guesses:
                position = position + 1
                state = self.graphs("own", partial(first, own=True), ones(self.buffer, guesses[-1], position), state)
            logits = self.policy.model.get_output_embeddings()(state)[:, : self.vocab]
            guesses.append(logits.argmax(-1))  # (N,)
        if most:
            guesses = torch.stack(guesses, dim=1).cpu().numpy()  # (N, most)
        for i, row in enumerate(self.rows):
            row.drafts = want[i]
            self.tokens[row.slot, row.length : row.length + want[i]] = guesses[i, : want[i]] if want[i] else 0


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


def main(argv: list[str]) -> None:
    command, *rest = argv or [""]
    if command in ("-h", "--help"):
        print(__doc__)
        return
    if command != "replay":
        raise BadInput("infer.py takes a command: replay; `python infer.py replay --help` lists its options")
    import replay  # a room below this one

    replay.main(rest)


if __name__ == "__main__":
    import infer  # run as a script this file is __main__, while replay.py imports `infer`: use that

    common.cli(infer.main)
