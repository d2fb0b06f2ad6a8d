"""The rows of the engine: what each rollout in flight has computed, and a forward pass over tokens of all of them.

    tokens  x_1 .. x_T        flat, in the order of the rows: of a row one, a few (a window), or a prompt (a span)
    full attention            softmax(q_t K_row^T / sqrt(D)) V_row over the keys of t's own row up to t's position
    gated delta               S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,   o_t = S_t^T q_t

Everything else of a model (projections, norms, rotary positions, experts) does not ask which row a token is of, and is
the model's own code on the flat list. Only the two mixers are replaced, while `by_rows` is open. Keys are rolled back
by forgetting a length. A recurrent state cannot be: delta.py has it after every token of a window, and a step with
drafts *holds* them all until it is known how many were right; then `Buffer.commit` takes that state of each row. From
layer to layer they add up: N rows x (k + 1) tokens x the states of a row, which are 63 MB in Qwen3.6-35B-A3B.

    buffer = Buffer(model, slots=8)
    buffer.reserve(longest)
    with by_rows(model):
        step = plan(buffer, tokens, past, new)           # numpy: tokens (slots, context), past and new (N,)
        hidden = forward(model, step)                    # (T, H)

A state is known only at the position where it was stored: of each row where it is now, and of SAVED prompts. Shared
prefixes end at such places. Knows the layers of Qwen3-Next, Qwen3.5 and Qwen3.6, dense and mixture of experts.
Left out: sliding windows, other recurrent layers, paged memory.
"""

import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import common  # noqa: F401  before torch: it sets the OpenMP environment
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from options import BadInput
from delta import conv_steps, recurrent

GROW = 64  # positions by which the KV buffer grows; multiples of 8 keep CUDA's masked attention on its fast path
SAVED = 16  # recurrent states of prompts that are kept for rows to come; the one unused for longest makes room
# of a config; where a model lists its layers, the list says which of them slide
UNKNOWN = ("sliding_window", "logits_scaling", "logit_scale", "final_logit_softcapping")
DELTA_RULE = "torch_chunk_gated_delta_rule"  # for prompts, in transformers' file of the model

# ---------------------------------------------------------------------------------------------------------------------
# what a row has computed


def recurrent_layers(model, name="the model"):
    """The gated-delta modules of a model, in order. Raises BadInput for a model that cannot be run by rows."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    more = {name: getattr(config, name, None) for name in UNKNOWN[getattr(config, "layer_types", None) is not None :]}
    if found := [f"{name} {value}" for name, value in more.items() if value not in (None, 1)]:
        raise BadInput(f"{name}: the engine does not know {', '.join(found)}")
    if unknown := sorted(set(kinds) - {"full_attention", "linear_attention"}):
        raise BadInput(f"{name}: the engine knows full_attention and linear_attention layers, not {', '.join(unknown)}")
    found = [m for m in model.modules() if all(hasattr(m, x) for x in ("layer_idx", "A_log", "dt_bias", "conv1d"))]
    found = [m for m in found if hasattr(sys.modules[type(m).__module__], DELTA_RULE) and m.activation == "silu"]
    if len(found) != kinds.count("linear_attention"):
        raise BadInput(f"{name}: the engine knows only gated-delta linear attention, not that of {config.model_type}")
    if not (found or model._supports_attention_backend):  # it would ignore ours: no cache, no mask, and no error
        raise BadInput(f"{name}: {config.model_type} models take no attention function of the engine's")
    return found


class Buffer:
    """Keys, values and recurrent states of all rows.

    keys, values: {layer: (slots, KV, L, D)}, L growing with the longest row, `grow` positions at a time; `extra` more
    layers after the model's own.
    conv (R, slots + SAVED, C, K - 1) and delta (R, slots + SAVED, H, Dk, Dv) fp32: the last inputs of the convolution
    and the S of R gated-delta layers; a row's stand where its next token will follow. Keys grow, rather than being cut
    from tensors of full length, so that the first N rows are contiguous.
    """

    @torch.inference_mode()
    def __init__(self, model, slots, extra=0, grow=GROW):
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.group = config.num_attention_heads // kv_heads
        self.device, self.dtype = model.device, model.dtype  # both walk over all weights: ask once, not in each step
        layers = recurrent_layers(model)
        self.order = {module.layer_idx: r for r, module in enumerate(layers)}
        empty = torch.empty(slots, kv_heads, 0, head_dim, dtype=self.dtype, device=self.device)
        self.keys = {i: empty for i in range(config.num_hidden_layers + extra) if i not in self.order}
        self.values = dict(self.keys)
        self.slots, self.length, self.grow = slots, 0, grow
        self.zero, self.never = torch.tensor([[0.0], [-math.inf]], dtype=self.dtype, device=self.device)
        self.saved = {}  # {place in conv and delta: (slot, position)}, the last used at the end
        self.conv = self.delta = None
        if layers:
            m, shape = layers[0], (len(layers), slots + SAVED)
            self.chunked = getattr(sys.modules[type(m).__module__], DELTA_RULE)
            channels, width = m.conv1d.weight.shape[0], m.conv1d.weight.shape[-1]
            self.conv = torch.zeros(*shape, channels, width - 1, dtype=self.dtype, device=self.device)
            heads = (m.num_v_heads, m.head_k_dim, m.head_v_dim)
            self.delta = torch.zeros(*shape, *heads, dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def reserve(self, length):
        if length > self.length:
            more = -(-length // self.grow) * self.grow - self.length
            for tensors in (self.keys, self.values):
                for i in tensors:  # one at a time: the peak is little more than the result
                    tensors[i] = F.pad(tensors[i], (0, 0, 0, more))
            self.length += more
            self.places = torch.arange(self.length, device=self.device)

    def ready(self, same, cached):
        """Leading tokens that a row can copy from each other row: of `same` common ones, `cached` computed. All (N,)"""
        if not self.order:
            return np.minimum(same, cached)
        out = np.where(cached <= same, cached, 0)
        for slot, position in self.saved.values():
            if slot < len(same) and position <= same[slot]:
                out[slot] = max(out[slot], position)
        return out

    @torch.inference_mode()
    def copy(self, source, target, length, cached):
        """Give row `target` the first `length` positions of row `source`, which has computed `cached` of them."""
        if source != target:
            for tensors in (self.keys, self.values):
                for tensor in tensors.values():
                    tensor[target, :, :length] = tensor[source, :, :length]
        if self.order:
            place = source
            if length != cached:
                place = next(p for p, where in self.saved.items() if where == (source, length))
                self.saved[place] = self.saved.pop(place)
            for states in (self.conv, self.delta):
                states[:, target] = states[:, place]

    @torch.inference_mode()
    def move(self, source, target, cached):
        """Row `source` goes on as row `target`."""
        self._forget(target)
        self.copy(source, target, cached, cached)
        self.saved = {p: (target if slot == source else slot, position) for p, (slot, position) in self.saved.items()}

    @torch.inference_mode()
    def save(self, slot, position):
        """Keep the recurrent states of a row, which stand at `position`."""
        place = self.slots + len(self.saved)
        if len(self.saved) == SAVED:
            del self.saved[place := next(iter(self.saved))]
        self.saved[place] = (slot, position)
        for states in (self.conv, self.delta):
            states[:, place] = states[:, slot]

    @torch.inference_mode()
    def rewind(self, slot, length, cached):
        """A new rollout begins in a row like the last one, for `length` tokens. -> how many of `cached` it can keep."""
        if not self.order:
            return min(length, cached)
        self._forget(slot, length)
        if cached <= length:
            return cached
        self.conv[:, slot] = self.delta[:, slot] = 0
        return 0

    @torch.inference_mode()
    def clear(self, slot):
        """Zero a row. A NaN that stays would reach the row's next rollout: a weight of 0 times NaN is NaN."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[slot] = 0
        if self.order:
            self._forget(slot)
            self.conv[:, slot] = self.delta[:, slot] = 0

    def _forget(self, slot, beyond=0):
        """Drop what was saved of a row beyond a position; the places stay dense."""
        kept = [(p, where) for p, where in self.saved.items() if where[0] != slot or where[1] <= beyond]
        if len(kept) < len(self.saved):
            for states in (self.conv, self.delta):
                states[:, self.slots : self.slots + len(kept)] = states[:, [p for p, _ in kept]]
            self.saved = {self.slots + i: where for i, (_, where) in enumerate(kept)}

    @torch.inference_mode()
    def commit(self, step, counts):
        """After a step that held them: the recurrent states advance by the first counts[i] tokens of row i's window."""
        at = _ends(counts, self.device)
        for r, (windows, states) in enumerate(step.held):
            _advance(self.conv[r], windows, at)
            _advance(self.delta[r], states, at)


# ---------------------------------------------------------------------------------------------------------------------
# one forward pass


@dataclass
class Step:
    """One forward pass over T flat tokens of rows 0 .. N-1, in the order of the rows.

    The rows with up to Q tokens are computed together: windows Q tokens wide, padded with the row's last token. For a
    row with more tokens, a span, its last token stands there.
    """

    ids: torch.Tensor  # (T,)
    row: torch.Tensor  # (T,) the row of each token
    position: torch.Tensor  # (T,) its position there
    shape: tuple[int, int]  # (N, Q)
    window: torch.Tensor | None  # (N, Q) where among the T the window's tokens stand; None when that is 0 .. N Q - 1
    place: torch.Tensor | None  # (T,) where each token stands among the N Q of the windows; 0 for those of spans
    bias: torch.Tensor  # (N, 1, G Q, L), G repeats for Q > 1: 0 where a token of the window may look, -inf elsewhere
    spans: list[tuple[int, int, int, int]]  # (row, start, stop, past) of each row with more than Q tokens
    buffer: Buffer
    ends: torch.Tensor | None = None  # (2, M) rows whose recurrent states advance, to which token; None: all, the last
    held: list | None = None  # states of each gated-delta layer (N, Q, ...), when to which is for `commit` to decide

    def windows(self, x):
        """x (T, ...) -> (N, Q, ...)"""
        return x.view(*self.shape, *x.shape[1:]) if self.window is None else x[self.window]

    def flat(self, x):
        """x (N Q, ...) -> (T, ...); the places of spans are for the caller to fill."""
        return x if self.window is None else x[self.place]


@torch.inference_mode()
def plan(buffer, tokens, past, new, width=1, counts=None, hold=False, ahead=0) -> Step:
    """The forward pass of new[i] > 0 tokens of each row i that follow its first past[i].

    tokens (slots, context), past (N,), new (N,): numpy. width: Q. counts (N,): tokens by which the recurrent states
    advance, at most new; with `hold` they wait for `commit`. ahead: feed the token that stands so much further on.
    """
    n, window, place, spans = len(new), None, None, []
    if (new == width).all():
        row = np.arange(n).repeat(width)  # (T,)
        position = (past[:, None] + np.arange(width)).ravel()
    else:
        stop, short = new.cumsum(), new <= width
        start, row = stop - new, np.arange(n).repeat(new)
        offset = np.arange(stop[-1]) - start[row]
        position = past[row] + offset
        window = np.minimum(np.where(short, start, stop - 1)[:, None] + np.arange(width), stop[:, None] - 1)
        place = np.where(short[row], row * width + offset, 0)
        window, place = torch.from_numpy(window).to(buffer.device), torch.from_numpy(place).to(buffer.device)
        spans = [(int(i), int(start[i]), int(stop[i]), int(past[i])) for i in np.flatnonzero(~short)]
    flat = torch.from_numpy(np.stack([tokens[row, position + ahead], row, position])).to(buffer.device)
    seen = flat[2].view(n, width) if window is None else flat[2][window]
    step = Step(*flat, (n, width), window, place, visible(buffer, seen), spans, buffer)
    if buffer.order and counts is not None:
        counts = np.where(new <= width, counts, 0)
        step.ends = None if (counts == width).all() else _ends(counts, buffer.device)
        step.held = [] if hold else None
    return step


def ones(buffer, ids, position) -> Step:
    """The forward pass of one token of each row, ids (N,) at position (N,), through full attention only."""
    row = torch.arange(len(ids), device=buffer.device)
    return Step(ids, row, position, (len(ids), 1), None, None, visible(buffer, position[:, None]), [], buffer)


def visible(buffer, position):
    """position (N, Q) -> the additive mask of what tokens there may look at, as in Step."""
    bias = torch.where(buffer.places <= position[..., None], buffer.zero, buffer.never)[:, None]  # (N, 1, Q, L)
    return bias if bias.shape[2] == 1 else bias.repeat(1, 1, buffer.group, 1)


@torch.inference_mode()
def forward(model, step):
    """The hidden states after the model's final norm (T, H). Rows and states are written on the way."""
    out = model.base_model(
        input_ids=step.ids[None],
        position_ids=step.position[None],
        attention_mask=step.bias[:1],  # ready-made, in four dimensions: transformers builds none of its own
        use_cache=False,
        step=step,
    )
    return out.last_hidden_state[0]


@torch.inference_mode()
def guess(model, head, step, hidden, own=False):
    """One pass of an MTP head: hidden (T, H) at the step's positions, its ids the tokens that follow -> (T, H).

    own: hidden is what the head said before, not the model.
    """
    options = dict(position_ids=step.position[None], attention_mask=step.bias[:1], own=own, step=step)
    return head(model, step.ids[None], hidden[None], **options)[0]


def attend(module, query, key, value, attention_mask, scaling, step: Step, **_):
    """The attention function that transformers calls. query (1, H, T, D); key, value (1, KV, T, D) -> (1, T, H, D).

    Stores the new keys and values in their rows. Then attends: the windows of all rows in one batched product, and the
    few rows with a longer span one by one (causal among the new, everything before them).
    """
    keys, values = step.buffer.keys[module.layer_idx], step.buffer.values[module.layer_idx]
    keys[step.row, :, step.position] = key[0].transpose(0, 1)
    values[step.row, :, step.position] = value[0].transpose(0, 1)
    (n, width), heads = step.shape, (key.shape[1], query.shape[1] // key.shape[1])  # heads: KV, G
    q = query[0].transpose(0, 1)  # (T, H, D)
    q = (q if step.window is None else q[step.window]).reshape(n * width, *heads, -1)  # heads of one key side by side
    if width > 1:
        q = q.view(n, width, *heads, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (N, KV, G Q, D)
    if q.dtype == torch.float32:  # two thin products; SDPA takes 1.5 times as long for one query on a CPU
        weights = torch.matmul(q * scaling, keys[:n].transpose(2, 3)).add_(step.bias).softmax(-1)
        out = torch.matmul(weights, values[:n])
    else:  # SDPA keeps the scores of half-precision queries and keys in fp32
        bias = step.bias.expand(-1, -1, q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, keys[:n], values[:n], bias, scale=scaling)
    if width > 1:
        out = out.view(n, *heads, width, -1).permute(0, 3, 1, 2, 4)  # (N, Q, KV, G, D)
    flat = step.flat(out.reshape(n * width, query.shape[1], -1))
    for row, start, stop, past in step.spans:
        k, v = (x[row : row + 1, :, : past + stop - start].repeat_interleave(heads[1], dim=1) for x in (keys, values))
        mask = torch.ones(stop - start, k.shape[2], dtype=torch.bool, device=k.device).tril_(past) if past else None
        out = F.scaled_dot_product_attention(query[:, :, start:stop], k, v, mask, is_causal=not past, scale=scaling)
        flat[start:stop] = out[0].transpose(0, 1)
    return flat[None], None


def recur(module, hidden_states, step: Step, **_):
    """The forward of a gated-delta layer by rows. hidden_states (1, T, H) -> (1, T, H).

    A span's states advance at once. So do those of the windows, to `step.ends`, unless the step holds them.
    """
    buffer, r = step.buffer, step.buffer.order[module.layer_idx]
    conv, delta, n = buffer.conv[r], buffer.delta[r], step.shape[0]
    x, z, b, a = _project(module, hidden_states[0])  # (T, C), (T, Hv, Dv), (T, Hv), (T, Hv)
    beta = b.sigmoid()
    g = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    spans = []
    for row, start, stop, _past in step.spans:
        windows, q, k, v = _convolve(module, conv[row : row + 1], x[None, start:stop])
        q, k = (y.repeat_interleave(v.shape[2] // y.shape[2], dim=2) for y in (q, k))
        options = dict(initial_state=delta[row : row + 1], output_final_state=True, use_qk_l2norm_in_kernel=True)
        out, state = buffer.chunked(q, k, v, g=g[None, start:stop], beta=beta[None, start:stop], **options)
        conv[row], delta[row] = windows[0, -1], state[0]
        spans.append((start, stop, out[0]))
    out = torch.empty_like(z)
    if len(spans) < n:
        windows, q, k, v = _convolve(module, conv[:n], step.windows(x))
        out, states = recurrent(q, k, v, step.windows(g), step.windows(beta), delta[:n])
        out = step.flat(out.flatten(0, 1))
        if step.held is None:
            _advance(conv, windows, step.ends)
            _advance(delta, states, step.ends)
        else:
            step.held.append((windows, states))
    for start, stop, part in spans:
        out[start:stop] = part
    out = module.norm(out.flatten(0, 1), z.flatten(0, 1)).view(1, len(z), -1)
    return module.out_proj(out)


def _project(module, x):
    """x (T, H) -> inputs of the convolution (T, C), output gate z (T, Hv, Dv), and b, a (T, Hv): beta and decay."""
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next interleaves them by key head
        q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x)[None], module.in_proj_ba(x)[None])
        return torch.cat([y[0].flatten(1) for y in (q, k, v)], dim=-1), z[0], b[0], a[0]
    z = module.in_proj_z(x).unflatten(-1, (-1, module.head_v_dim))
    return module.in_proj_qkv(x), z, module.in_proj_b(x), module.in_proj_a(x)


def _convolve(module, before, x):
    """before (N, C, K - 1), x (N, Q, C) -> the last inputs after each (N, Q, C, K - 1); q, k, v (N, Q, heads, D)."""
    x, windows = conv_steps(x, before, module.conv1d.weight[:, 0], module.conv1d.bias)
    parts, dims = (module.key_dim, module.key_dim, module.value_dim), (module.head_k_dim,) * 2 + (module.head_v_dim,)
    return windows, *(y.unflatten(-1, (-1, d)) for y, d in zip(x.split(parts, dim=-1), dims, strict=True))


def _ends(counts, device):
    """counts (N,) numpy -> the rows that advance by one token or more, and the last of these. (2, M)"""
    rows = np.flatnonzero(counts)
    return torch.from_numpy(np.stack([rows, counts[rows] - 1])).to(device)


def _advance(kept, states, ends):
    """kept (slots, ...) of rows 0 .. N-1 becomes what it is after the token at their `ends`: states (N, Q, ...)."""
    if ends is None:
        kept[: len(states)] = states[:, -1]
    else:
        kept[ends[0]] = states[ends[0], ends[1]]


AttentionInterface.register("hat_rows", attend)


@contextmanager
def by_rows(model, *heads):
    """Inside, a model and MTP heads beside it mix tokens by rows and are in eval mode; afterwards all is as before."""
    parts = (model, *heads)
    configs = {
        id(m.config): m.config
        for part in parts
        for m in part.modules()
        if hasattr(m, "layer_idx") and hasattr(m, "config")
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    training, recurrent = [part.training for part in parts], recurrent_layers(model)
    try:
        for config, _ in before:
            config._attn_implementation = "hat_rows"
        for module in recurrent:
            module.forward = partial(recur, module)
        for part in parts:
            part.eval()
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
        for module in recurrent:
            vars(module).pop("forward", None)
        for part, mode in zip(parts, training, strict=True):
            part.train(mode)
