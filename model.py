"""Policies: load or create a causal LM with its tokenizer, and read the log-probs of what it sampled.

    logp_t = log softmax(logits_{t-1} / temperature)[ids_t]        for each sampled token t, 0 elsewhere

Sequences are padded on the right, and attention is causal, so no token can see padding: no attention mask, the default
positions 0 .. T-1, and log-probs that do not depend on the batch. The LM head runs only on the positions that predict a
sampled token, a chunk at a time, and is computed again in the backward pass: tokens x vocabulary never exists at once.

    policy = load("data/base-small", device="cpu", dtype=torch.float32)
    ids, mask = pad_batch([t.ids for t in trajectories], [t.mask for t in trajectories])
    logps = token_logps(policy.model, ids, mask, temperature=1.0)  # (B, T)

An MTP head that stands in the checkpoint (tensors `mtp.*`, as in Qwen3.5 and 3.6) comes along as `policy.mtp`, and is
written back with the model under the same names. It says, from the final hidden state h_t and the token after it, what
the token after that will be; the layer is one of the model's own kind:

    x_t = fc(cat[norm_e(E[tok_{t+1}]), norm_h(h_t)])      g_t = norm(layer(x_t))      lm_head(g_t) -> tok_{t+2}

This file knows Hugging Face models; the stages above it see a `Policy`, and fsdp.py shards one. Left out: the
vision tower of a checkpoint that has one: it is neither read nor written, and config.json becomes that of the text.
"""

import copy
import filecmp
import inspect
import math
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import common  # noqa: F401  before torch: it sets the OpenMP environment
import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import create_causal_mask
from transformers.utils import logging

from chat import Codec
from options import BadInput
from common import Dist, fsync, no_leftovers, read_json, seed_of

HEAD_CHUNK = 2048  # sampled tokens per LM-head product: 2048 x 248k logits in fp32 are 2 GB
BUCKET = 128  # lengths are padded to multiples of this: on a CPU each new shape compiles new bf16 kernels

logging.disable_progress_bar()  # of reading and writing weights: noise between the lines of a log

# ---------------------------------------------------------------------------------------------------------------------
# a policy and its directory


@dataclass
class Policy:
    """A model, its Hugging Face tokenizer, the codec over that tokenizer, where they came from, and its MTP head."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    codec: Codec
    path: str
    mtp: "MTP | None" = None  # no submodule of the model: neither its optimizer nor its gradient norm knows of it
    root: nn.Module | None = None  # once sharded: the module that all weights of the model hang on

    def __call__(self, function, *args, **kwargs):
        """function(model, *args, **kwargs), where a sharded model gathers what it needs. Every rank calls it then."""
        return (self.root or partial(_call, self.model))(function, *args, **kwargs)

    def save(self, directory, weights=None):
        """Write model.safetensors, config.json and the tokenizer's files. The caller gives a temporary directory.

        weights: those of a sharded model, by name.
        """
        if self.mtp:
            weights = (weights or self.model.state_dict()) | self.mtp.tensors(self.model.dtype)
        self.model.save_pretrained(directory, state_dict=weights)
        self.tokenizer.save_pretrained(directory)

    def publish(self, path, weights=None):
        """`save` as the directory `path`, whole or not at all: what stood there goes when all has reached the disk.

        Where it is the same to the byte, it stays, and with it what was measured of it (eval.json).
        """
        path = Path(path)
        temp, old = (path.with_name(f"{path.name}.{end}.tmp") for end in ("new", "old"))
        for torn in (temp, old):
            shutil.rmtree(torn, ignore_errors=True)
        with no_leftovers(temp, path):
            temp.mkdir(parents=True)
            self.save(temp, weights)
            if all(same_file(file, path / file.name) for file in temp.iterdir()):
                shutil.rmtree(temp)
                return
            for each in (*temp.rglob("*"), temp):
                fsync(each)
            if path.exists():
                path.rename(old)
            temp.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def same_file(a, b):
    return b.is_file() and filecmp.cmp(a, b, shallow=False)


def _call(model, function, *args, **kwargs):
    return function(model, *args, **kwargs)


def load(path, device="cpu", dtype=torch.float32, attn="sdpa") -> Policy:
    """Read a Hugging Face directory (or, if there is none of that name, a hub id already in the cache).

    Every weight of the model must be in the file with the right shape, and every one of the MTP head if there is any.
    Raises BadInput, one line naming the path, for a missing directory, config or tokenizer, a damaged or partial
    weight file, or a tokenizer without ChatML tokens.
    """
    path = Path(path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise BadInput(f"{path}: no config.json; a Hugging Face model directory was expected")
    if (path / "metrics.jsonl").is_file():
        raise BadInput(f"{path}: a run, and no model; did you mean {path / 'model'}?")
    if not path.is_dir() and (path.is_absolute() or len(path.parts) != 2 or path.exists()):
        raise BadInput(f"{path}: no such model directory")
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its load report would say again what is raised below
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # for what is wrong in a config or a file these libraries raise nearly anything
        if not path.is_dir():
            raise BadInput(f"{path}: no such model directory, nor a model in the hub's cache") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(f"{path}: not a readable model directory: {reason}") from error
    finally:
        logging.set_verbosity(level)
    if bad := sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"])):
        raise BadInput(f"{path}: {len(bad)} weights are missing or of another shape, the first is {bad[0]}")
    policy = _policy(model.to(device), tokenizer, str(path))
    policy.mtp = read_mtp(path, policy.model)
    return policy


def create(
    tokenizer: PreTrainedTokenizerFast,
    hidden=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=384,
    positions=4096,
    rope_theta=10_000.0,
    seed=0,
    device="cpu",
    dtype=torch.float32,
) -> Policy:
    """A new dense Qwen3 model with tied embeddings over `tokenizer`; the same seed gives the same weights.

    The embedding has a multiple of 64 rows. Global random state is neither read nor changed.
    """
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return _policy(model.to(device=device, dtype=dtype), tokenizer, "<new>")


def _policy(model, tokenizer, path) -> Policy:
    template = tokenizer.chat_template  # it shows which tool-call format the checkpoint was trained on
    template = template if isinstance(template, str) else "".join((template or {}).values())
    try:
        codec = Codec(tokenizer, calls="xml" if "<function=" in template else "hermes")
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    if codec.vocab_size > model.get_output_embeddings().weight.shape[0]:
        raise BadInput(f"{path}: the tokenizer has {codec.vocab_size} tokens, more than the model's embedding")
    model.valid_vocab = codec.vocab_size  # further rows of the head are padding: engine and trainer both leave them out
    return Policy(model.eval(), tokenizer, codec, path)


# ---------------------------------------------------------------------------------------------------------------------
# the MTP head


class MTP(nn.Module):
    """The head of the header over `model`, its parameters named as in the checkpoints: 19 for Qwen3.6, 15 if dense.

    seed: a new head has the model's own initialisation; the same seed gives the same weights. None: no weights yet.
    Embedding, LM head and rotary table stay the model's. `before_norm`, kept in the model's config as mtp_before_norm:
    the head takes h_t before the model's final norm, as some implementations do.
    """

    def __init__(self, model, seed: int | None = 0):
        super().__init__()
        config, base = model.config.get_text_config(), model.base_model
        width, deeper = config.hidden_size, copy.deepcopy(config)
        deeper.layer_types = [*(getattr(config, "layer_types", None) or []), "full_attention"]
        norm = type(base.norm)
        self.single_experts = False  # how the file holds its experts: fused (Qwen3.6), or one by one (Qwen3.5)
        self.before_norm = bool(getattr(config, "mtp_before_norm", False))
        with torch.random.fork_rng(devices=[]), torch.device("meta" if seed is None else "cpu"):
            torch.manual_seed(seed or 0)
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
            self.pre_fc_norm_hidden = norm(width, eps=config.rms_norm_eps)
            self.layers = nn.ModuleList([type(base.layers[0])(deeper, config.num_hidden_layers)])
            self.norm = norm(width, eps=config.rms_norm_eps)
            if seed is not None:
                self.apply(model._init_weights)
        self.cache = cache_name(self.layers[0])
        self.to(dtype=model.dtype, device=None if seed is None else model.device)
        for module in self.modules():
            if hasattr(module, "config"):
                module.config = config  # the very object: the layer follows the model's choice of attention function
        self.eval()

    def forward(self, model, ids, hidden, own=False, **attention):
        """ids (B, T): the tokens that follow the positions of `hidden` (B, T, H) -> g (B, T, H).

        hidden: the model's final hidden states, as its LM head reads them; or, to draft on, g itself (own), the drafted
        token and the next position. attention: position_ids (B, T), by default 0 .. T-1; attention_mask, by
        default causal; cache, with a layer more than the model; and what the attention function of the config wants.
        """
        base, dtype = model.base_model, self.fc.weight.dtype
        with torch.no_grad():  # the embedding is the policy's, and so is the final norm
            embedded = model.get_input_embeddings()(ids).to(dtype)  # (B, T, H)
            # norm_h takes out the length of a vector, so that this is the state before the norm, but for a factor
            norm = self.norm if own else base.norm
            scale = norm(torch.ones_like(embedded[0, 0])) if self.before_norm else 1
        x = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden.to(dtype) / scale)]
        x = self.fc(torch.cat(x, dim=-1))
        position, mask, cache = (attention.pop(name, None) for name in ("position_ids", "attention_mask", "cache"))
        if position is None:
            position = torch.arange(ids.shape[1], device=ids.device)[None]
        attention |= {"attention_mask": create_causal_mask(base.config, x, mask, cache, position), self.cache: cache}
        axes = 3 if hasattr(base.rotary_emb, "mrope_section") else 1  # time, height and width: of text they are one
        rotary = base.rotary_emb(x, position.expand(axes, -1, -1) if axes > 1 else position)
        return self.norm(self.layers[0](x, position_embeddings=rotary, position_ids=position, **attention))

    def tensors(self, dtype=None):
        """Name -> tensor, as the checkpoint has them. They are views of the weights, or copies in another dtype."""
        out = {}
        for name, tensor in self.state_dict().items():
            path, _, last = name.rpartition(".")
            if self.single_experts and path.endswith(".experts"):
                both = last == "gate_up_proj"
                for part, experts in zip(("gate_proj", "up_proj") if both else (last,), tensor.chunk(1 + both, dim=1)):
                    out |= {f"mtp.{path}.{e}.{part}.weight": expert for e, expert in enumerate(experts)}
            else:
                out[f"mtp.{name}"] = tensor
        return {name: tensor.to(dtype or tensor.dtype) for name, tensor in out.items()}


def cache_name(module) -> str:
    """What a model or a layer calls the cache that its forward is given: another name before transformers 5.23."""
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def read_mtp(path, model) -> MTP | None:
    """The MTP head that stands in the checkpoint `path`, over `model`; None if it has no tensor `mtp.*`.

    Its experts may be fused or single; its config says which states it reads. BadInput, naming the first, for tensors
    that are missing, of another shape, or not known: a head must never start at random, nor half of it get lost,
    without a word.
    """
    try:
        directory = Path(path) if Path(path).is_dir() else Path(snapshot_download(str(path), local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache, or not even a hub id
        raise BadInput(f"{path}: no such model directory") from error
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    files = [whole] if whole.is_file() else []
    if not files and index.is_file():
        places = read_json(index).get("weight_map", {})
        files = sorted({directory / file for name, file in places.items() if name.startswith("mtp.")})
    found = {}
    for file in files:
        try:
            with safe_open(file, "pt") as source:
                names = source.keys()
                found |= {name: source.get_tensor(name) for name in names if name.startswith("mtp.")}
        except Exception as error:  # safetensors has its own error, and the file may be missing
            raise BadInput(f"{file}: not a readable weight file: {error}") from error
    if not found:
        return None
    head = MTP(model, seed=None)
    settings = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    head.before_norm = bool(settings.get("text_config", settings).get("mtp_before_norm", False))
    head.single_experts = any(re.search(r"\.experts\.\d+\.", name) for name in found)
    wanted = head.tensors()
    other = {name for name in wanted.keys() & found.keys() if wanted[name].shape != found[name].shape}
    kinds = {
        "missing": wanted.keys() - found.keys(),
        "unknown": found.keys() - wanted.keys(),
        "of another shape": other,
    }
    for what, names in kinds.items():
        if names:
            raise BadInput(f"{path}: {len(names)} tensors of the MTP head are {what}: {', '.join(sorted(names)[:5])}")
    head.to_empty(device=model.device)
    for name, tensor in head.tensors().items():
        tensor.copy_(found[name])
    return head


# ---------------------------------------------------------------------------------------------------------------------
# batches and log-probs


def pad_batch(ids, *columns, bucket=BUCKET, device="cpu"):
    """Lists of lists -> right-padded tensors (B, T), T the longest length rounded up to a multiple of `bucket`.

    ids become int64 padded with 0. Each further column (mask, logps, ...) is aligned with ids; ints become int64 and
    floats fp32. Padding is told by mask == 0 alone, never by an id: the padding id may be a real token.
    """
    width = -(-max(1, *map(len, ids)) // bucket) * bucket
    out = []
    for column in (ids, *columns):
        assert list(map(len, column)) == list(map(len, ids)), "columns are not aligned with ids"
        whole = all(isinstance(x, int) for row in column for x in row)
        tensor = torch.zeros(len(ids), width, dtype=torch.int64 if whole else torch.float32)
        for b, row in enumerate(column):
            tensor[b, : len(row)] = torch.tensor(row, dtype=tensor.dtype)
        out.append(tensor.to(device))
    return out[0] if not columns else tuple(out)


def shared_prefix(model, rows, bucket=32) -> int:
    """Leading tokens that all rows (lists of ids) have in common, rounded down; 0 where sharing them would not pay.

    Less than the shortest row. A recurrent layer, or a sliding window, has no keys and values to share; and where the
    prompt is a small part of a row, its mask costs more than what is saved.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
    if len(rows) < 2 or {*kinds} != {"full_attention"}:
        return 0
    low, high = min(rows), max(rows)  # what these two have in common, all between them have
    same = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))
    return max(0, same - 1) // bucket * bucket if 4 * same >= max(map(len, rows)) else 0


def hidden_states(model, ids, shared=0):
    """ids (B, T) right-padded -> the hidden states that the LM head reads (B, T, H).

    shared: leading tokens that are the same in all rows. They are read once, and every row attends to that one reading:
    a group of G rollouts costs one prompt instead of G, with the same result and the same gradient.
    """
    if not shared:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    base, cache = model.base_model, DynamicCache(config=model.config)
    given = {cache_name(base): cache}
    first = base(input_ids=ids[:1, :shared], **given).last_hidden_state  # (1, S, H)
    cache.batch_repeat_interleave(len(ids))
    mask = None  # of floats for each row, if the library is to make it; a ready one of booleans is known to sdpa alone
    if model.config._attn_implementation == "sdpa":
        mask = torch.ones(ids.shape[1] - shared, ids.shape[1], dtype=torch.bool, device=ids.device)
        mask = mask.tril(shared)[None, None]
    rest = base(input_ids=ids[:, shared:], attention_mask=mask, **given).last_hidden_state  # (B, T - S, H)
    return torch.cat([first.expand(len(ids), -1, -1), rest], dim=1)


def layers_of(model) -> list[nn.Module]:
    """The decoder layers, sharded or not."""
    return [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in model._no_split_modules]


def recompute(model) -> None:
    """From now on a backward computes each layer again from its input: memory for one layer's activations, not for all.

    For the price of another forward. The library's own switch asks for a model in training mode. A cache would be
    written twice, so that no prompt can be shared.
    """
    for layer in layers_of(model):
        layer.forward = partial(_again, layer.forward)


def _again(forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def token_logps(model, ids, mask, temperature=1.0, entropy=False, hidden=None):
    """Log-probs of the sampled tokens under softmax(logits / temperature), in fp32 and differentiable.

    ids (B, T) int64, right-padded; mask (B, T), nonzero where a token was sampled (never the first, which nothing
    predicts). -> (B, T), 0 where mask is 0; with entropy=True also the entropies (B, T) in nats of the distributions
    those tokens were drawn from, for the log: they carry no gradient. hidden (B, T, H): the hidden states when the
    caller has them. An all-zero mask gives zeros that carry no gradient.
    """
    sampled = mask.bool()
    assert not sampled[:, 0].any(), "the first token of a sequence cannot have been sampled"
    hidden = hidden_states(model, ids) if hidden is None else hidden
    source = hidden[:, :-1][sampled[:, 1:]]  # (N, H): position t - 1 predicts token t
    target = ids[sampled]  # (N,) in the same order
    head, vocab = model.get_output_embeddings(), getattr(model, "valid_vocab", None)
    values = in_chunks(_head_logps, HEAD_CHUNK, (source, target), head, vocab, temperature, entropy)  # (N, 2)
    out = torch.zeros(*ids.shape, 2, dtype=torch.float32, device=ids.device)
    out = out.masked_scatter(sampled[..., None].expand_as(out), values)
    logps, entropies = (x.contiguous() for x in out.unbind(-1))  # no views: FSDP2 warns of those at its root
    return (logps, entropies) if entropy else logps


def in_chunks(function, size, columns, *same):
    """function(*rows of the columns, *same) for `size` rows at a time, as one tensor: few logits are in memory at once.

    With gradients each chunk is computed again backward, but for a single one, which may as well keep its activations.
    """
    pieces = list(zip(*(column.split(size) for column in columns), strict=True))
    if torch.is_grad_enabled() and len(pieces) > 1:
        function = partial(checkpoint, function, use_reentrant=False)
    return torch.cat([function(*piece, *same) for piece in pieces])


def _head_logps(hidden, target, head, vocab, temperature, entropy):
    """hidden (n, H), target (n,) -> (n, 2) log-prob and entropy (0 unless asked for), fp32."""
    logp = F.log_softmax(head(hidden)[:, :vocab].float() / temperature, dim=-1)  # (n, V)
    chosen = logp.gather(-1, target[:, None])[:, 0]
    logp = logp.detach()
    nats = -(logp.exp() * logp).sum(-1) if entropy else torch.zeros_like(chosen)
    return torch.stack([chosen, nats], dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# what every stage does with an optimizer


def learning_rate(step: int, steps: int, cfg) -> float:
    """Of step 1 .. steps: linear warmup times a linear way to lr_end. cfg: lr, warmup (steps), lr_end (fraction)."""
    decay = 1 - (1 - cfg.lr_end) * (step - 1) / max(1, steps - 1)
    return cfg.lr * min(1.0, step / max(1, cfg.warmup)) * decay


def set_rate(optimizer, rate: float) -> float:
    """Every group of the optimizer at this learning rate; the rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def in_turn(places, count: int, seed: int) -> list[int]:
    """Which of `count` samples stand at these places of a run: all of them, in another order each epoch."""
    at = [divmod(place, count) for place in places]
    seeds = {epoch: seed_of(seed, "order", epoch) for epoch, _ in at}
    order = {e: torch.randperm(count, generator=torch.Generator().manual_seed(s)) for e, s in seeds.items()}
    return [int(order[epoch][i]) for epoch, i in at]


def optimizer_step(model, optimizer, grad_clip: float, ranks: Dist) -> float:
    """Sum the gradients over all ranks, clip, step; the norm before clipping. grad_clip 0 = no clip.

    A rank without samples takes part all the same. RuntimeError for a norm that is not finite.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if isinstance(p, DTensor):  # a share: FSDP2 has put the mean over the ranks there
            p.grad.mul_(ranks.world)
        else:
            ranks.all_reduce_sum(p.grad)
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
