"""The MTP head: module, drafts, loss, acceptance and learning, on a dense model and on a hybrid one."""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

import mtp
from options import BadInput
from common import ALONE
from model import MTP, hidden_states, load, optimizer_step, pad_batch, token_logps
from test_model import small

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def path(request, dense_dir, qwen36_dir):
    return dense_dir if request.param == "dense" else qwen36_dir


@pytest.fixture(scope="module")
def shared(path):
    """Not to be changed."""
    return load(path)


@pytest.fixture
def policy(path):
    return load(path)


def sequences(lengths=(24, 40, 9), seed=0, vocab=73):
    """Ids, and masks with a long message, a short one and one of a single token; the last row has none but a pair."""
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, vocab, (n,), generator=g).tolist() for n in lengths]
    mask = [[0] * 3 + [1] * (n - 13) + [0] * 2 + [1] * 2 + [0] * 2 + [1] + [0] * 3 for n in lengths[:-1]]
    return ids, [*mask, [0] * (lengths[-1] - 2) + [1] * 2]


def batch(**options):
    return pad_batch(*sequences(**options), bucket=8)


def bytes_of(tensors):
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def stored(directory):
    """All tensors of a checkpoint, whatever its files are."""
    return {name: t for file in sorted(Path(directory).glob("*.safetensors")) for name, t in load_file(file).items()}


def heads(directory):
    return {name: t for name, t in stored(directory).items() if name.startswith("mtp.")}


def rewrite(path, out, change):
    """A copy of a checkpoint with other tensors, in one file."""
    tensors = stored(path)
    change(tensors)
    out.mkdir()
    for file in Path(path).iterdir():
        if "safetensors" not in file.name:
            (out / file.name).write_bytes(file.read_bytes())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def without_head(path, out):
    return rewrite(path, out, lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")])


# ---------------------------------------------------------------------------------------------------------------------
# the module


def by_hand(policy, tensors, ids, hidden):
    """g (T, H) of one sequence from the stored tensors, in plain arithmetic, without any module of the model's."""
    config = policy.model.config
    w = {name.removeprefix("mtp.").removesuffix(".weight"): t.float() for name, t in tensors.items()}
    hybrid, heads_, kv, size = (
        "linear_num_key_heads" in config.to_dict(),
        *(getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")),
    )

    def norm(x, name):
        x = x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        return x * (w[name] + (1 if hybrid else 0))  # zero-centred in the hybrid family

    def rotate(x, fraction):  # (T, heads, size)
        n = int(size * fraction)
        angle = torch.arange(len(x))[:, None] / config.rope_parameters["rope_theta"] ** (torch.arange(0, n, 2) / n)
        a, b, rest = x[..., : n // 2], x[..., n // 2 : n], x[..., n:]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def swiglu(x, gate, up, down):
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    embedded = policy.model.get_input_embeddings().weight[ids]
    x = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], -1) @ w["fc"].T
    y, layer = norm(x, "layers.0.input_layernorm"), "layers.0.self_attn."
    q = (y @ w[layer + "q_proj"].T).view(len(x), heads_, -1)
    q, gate = q[..., :size], q[..., size:]
    k, v = ((y @ w[layer + f"{n}_proj"].T).view(len(x), kv, size) for n in "kv")
    fraction = config.rope_parameters.get("partial_rotary_factor", 1.0)
    q, k = rotate(norm(q, layer + "q_norm"), fraction), rotate(norm(k, layer + "k_norm"), fraction)
    out = torch.zeros(len(x), heads_, size)
    for t, h in itertools.product(range(len(x)), range(heads_)):
        group = h // (heads_ // kv)
        weight = (k[: t + 1, group] @ q[t, h] / math.sqrt(size)).softmax(0)
        out[t, h] = weight @ v[: t + 1, group]
    out = out * gate.sigmoid() if hybrid else out
    x = x + out.flatten(1) @ w[layer + "o_proj"].T
    y, layer = norm(x, "layers.0.post_attention_layernorm"), "layers.0.mlp."
    if not hybrid:
        return norm(x + swiglu(y, *(w[layer + f"{n}_proj"] for n in ("gate", "up", "down"))), "norm")
    best = (y @ w[layer + "gate"].T).softmax(-1).topk(config.num_experts_per_tok)
    share = best.values / best.values.sum(-1, keepdim=True)
    out = swiglu(y, *(w[layer + f"shared_expert.{n}_proj"] for n in ("gate", "up", "down")))
    out = out * (y @ w[layer + "shared_expert_gate"].T).sigmoid()
    for t, i in itertools.product(range(len(x)), range(config.num_experts_per_tok)):
        e = best.indices[t, i]
        gate, up = w[layer + "experts.gate_up_proj"][e].chunk(2)
        out[t] += share[t, i] * swiglu(y[t], gate, up, w[layer + "experts.down_proj"][e])
    return norm(x + out, "norm")


def test_forward_is_the_formula(shared, path):
    """FAULTS 43: embedding first, the right norm on each half, the final norm, positions, causal attention."""
    ids, hidden = torch.randint(0, 73, (9,), generator=torch.Generator().manual_seed(1)), torch.randn(9, 64)
    hidden = hidden[:, : shared.model.config.hidden_size]
    tensors = heads(path)
    with torch.no_grad():
        got = shared.mtp(shared.model, ids[None], hidden[None])[0]
        want = by_hand(shared, tensors, ids, hidden)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        for a, b in (("pre_fc_norm_embedding", "pre_fc_norm_hidden"), ("norm", "pre_fc_norm_hidden")):
            a, b = f"mtp.{a}.weight", f"mtp.{b}.weight"
            swapped = by_hand(shared, tensors | {a: tensors[b], b: tensors[a]}, ids, hidden)
            assert (swapped - want).abs().max() > 0.01  # the golden would see it
        half = tensors["mtp.fc.weight"].roll(hidden.shape[1], dims=1)
        assert (by_hand(shared, tensors | {"mtp.fc.weight": half}, ids, hidden) - want).abs().max() > 0.1


def test_a_head_is_one_more_layer_of_the_model(shared):
    config, layer = shared.model.config, shared.mtp.layers[0]
    assert type(layer) is type(shared.model.base_model.layers[0])
    assert layer.self_attn.layer_idx == config.num_hidden_layers == len(config.layer_types)
    assert layer.self_attn.config is config  # so the engine's attention function is the head's, too
    assert not {id(p) for p in shared.model.parameters()} & {id(p) for p in shared.mtp.parameters()}
    assert len(shared.mtp.state_dict()) == (19 if hasattr(config, "num_experts") else 15)


def test_new_heads_are_seeded_and_leave_global_state_alone(shared):
    state = torch.random.get_rng_state()
    a, b, c = (MTP(shared.model, seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert bytes_of(a.tensors()) == bytes_of(b.tensors()) != bytes_of(c.tensors())
    assert {n: t.shape for n, t in a.tensors().items()} == {n: t.shape for n, t in shared.mtp.tensors().items()}
    std = shared.model.config.initializer_range
    assert a.fc.weight.std().item() == pytest.approx(std, rel=0.1)
    assert torch.equal(a.norm.weight, torch.full_like(a.norm.weight, a.norm.weight[0].item()))


def test_before_norm_is_the_state_before_the_final_norm(policy, tmp_path):
    """Computed from the state after it, of the model or of the head itself: norm_h reads its direction alone."""
    ids, _ = batch()
    norm, seen = policy.model.base_model.norm, []
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    hidden = hidden_states(policy.model, ids)
    hook.remove()
    want = policy.mtp(policy.model, ids, seen[0])
    plain = policy.mtp(policy.model, ids, hidden)
    hook = policy.mtp.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    g = policy.mtp(policy.model, ids, hidden)
    hook.remove()
    chained = policy.mtp(policy.model, ids, seen[1])
    policy.mtp.before_norm = policy.model.config.mtp_before_norm = True
    torch.testing.assert_close(policy.mtp(policy.model, ids, hidden), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(policy.mtp(policy.model, ids, g, own=True), chained, rtol=1e-3, atol=1e-3)
    assert (plain - want).abs().max() > 0.05
    policy.publish(tmp_path / "model")
    assert load(tmp_path / "model").mtp.before_norm


# ---------------------------------------------------------------------------------------------------------------------
# drafts and loss


def test_where_drafts_start():
    """FAULTS 42: only inside one message. Tokens 2 .. 5 are one, token 7 is one of its own, 9 and 10 are the last."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1]])
    starts = mtp.starts_of(mask, 3)[0]
    assert [starts[:, d].nonzero()[:, 0].tolist() for d in range(3)] == [[1, 2, 3, 8], [1, 2], [1]]


def one_by_one(policy, ids, hidden, t, depth):
    """gd_t (H) for d = 1 .. depth as an engine drafts: a cache, one token after the other."""
    cache = DynamicCache()
    g = policy.mtp(policy.model, ids[None, 1 : t + 2], hidden[None, : t + 1], cache=cache)[:, -1:]
    yield g[0, 0]
    for d in range(2, depth + 1):
        where = {"position_ids": torch.tensor([[t + d - 1]])}
        g = policy.mtp(policy.model, ids[None, t + d : t + d + 1], g, cache=cache, **where)
        yield g[0, 0]


@torch.no_grad()
def test_chains_are_those_of_an_engine(shared):
    """FAULTS 42: draft d reads tok_{t+d} at position t + d - 1 and sees its own chain only; padding is not seen."""
    ids, mask = batch()
    hidden, starts = hidden_states(shared.model, ids), mtp.starts_of(mask, 3)
    count = 0
    for d, (row, t, g) in enumerate(mtp.chain(shared.mtp, shared.model, ids, starts, hidden), 1):
        assert torch.stack([row, t], 1).tolist() == starts[..., d - 1].nonzero().tolist()
        for b, s, got in list(zip(row.tolist(), t.tolist(), g))[::4]:
            *_, want = one_by_one(shared, ids[b], hidden[b], s, d)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
            count += 1
    assert count > 15


@torch.no_grad()
def test_depth_two_is_the_head_on_its_own_output(shared):
    """With nothing before it, the chain is two tokens long: the same as both at once, the first being the only past."""
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 1]])
    hidden = hidden_states(shared.model, ids)
    (_, _, first), (_, _, second) = mtp.chain(shared.mtp, shared.model, ids, mtp.starts_of(mask, 2), hidden)
    states = torch.stack([hidden[0, 0], first[0]])[None]  # h_0, then g_0
    both = shared.mtp(shared.model, ids[:, 1:3], states)[0]
    torch.testing.assert_close(torch.stack([first[0], second[0]]), both, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("soft, temperature", [(True, 1.0), (False, 0.7)])
def test_loss_is_the_formula(shared, soft, temperature):
    """Every chain on its own, all logits at once, rows beyond the vocabulary left out."""
    ids, mask = batch()
    total, columns, starts = mtp.loss(shared.model, shared.mtp, ids, mask, None, soft, temperature)
    hidden, lm_head = hidden_states(shared.model, ids), shared.model.get_output_embeddings()

    def logp(state):
        return (lm_head(state)[: shared.codec.vocab_size] / temperature).log_softmax(-1)

    want = torch.zeros_like(columns)
    for b, t in [(b, t) for b in range(3) for t in range(ids.shape[1]) if starts[b, t, 0]][::3]:
        depth = next((d for d in range(3) if not mask[b, t + d + 2]), 3) if t + 4 < ids.shape[1] else 1
        for d, g in enumerate(one_by_one(shared, ids[b], hidden[b], t, depth), 1):
            p, q = logp(hidden[b, t + d]), logp(g)
            kl = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist()))
            want[b, t, d - 1, 0] = kl if soft else -q[ids[b, t + d + 1]]
            want[b, t, d - 1, 1] = math.exp(p[q.argmax()])
            want[b, t, d - 1, 2] = p.argmax() == q.argmax()
        torch.testing.assert_close(columns[b, t], want[b, t], rtol=1e-3, atol=1e-4)
        assert starts[b, t].sum() == depth
    weights = torch.tensor([0.51, 0.31, 0.18])
    assert total.item() == pytest.approx((columns[..., 0] * weights).sum().item(), rel=1e-5)
    assert (columns[~starts] == 0).all() and columns[..., 0].max() > 0.5


def test_compare_by_hand():
    """Three tokens. p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = ln 2 / 4, and p gives the draft, the second, 1/4."""

    class Toy:
        valid_vocab = 3

        def get_output_embeddings(self):
            lm_head = torch.nn.Linear(4, 4, bias=False)
            lm_head.weight.data = torch.eye(4)
            return lm_head

    p, q = torch.tensor([[0.5, 0.25, 0.25, 9.0]]).log(), torch.tensor([[0.25, 0.5, 0.25, 9.0]]).log()
    soft = mtp.compare(Toy(), q, p, torch.tensor([1]), True, 1.0)[0].tolist()
    assert soft == pytest.approx([math.log(2) / 4, 0.25, 0.0])
    hard = mtp.compare(Toy(), q, p, torch.tensor([0]), False, 1.0)[0].tolist()
    assert hard == pytest.approx([math.log(4), 0.25, 0.0])
    same = mtp.compare(Toy(), p, p, torch.tensor([0]), True, 0.5)[0].tolist()
    assert same == pytest.approx([0.0, 2 / 3, 1.0], abs=1e-6)  # squares: 4/16 of 6/16


def test_gradients_stay_in_the_head(policy):
    """FAULTS 38: nothing reaches trunk, embedding, LM head or the hidden states that the stage gave."""
    ids, mask = batch()
    hidden = hidden_states(policy.model, ids)
    hidden.retain_grad()
    mtp.loss(policy.model, policy.mtp, ids, mask, hidden)[0].backward()
    assert hidden.grad is None and all(p.grad is None for p in policy.model.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.mtp.parameters())


def test_the_policy_does_not_feel_the_head(path):
    """FAULTS 38, 39: loss, gradient norm and step of the policy are the same bits; the clips are two."""
    results = []
    for along in (False, True):
        policy = load(path)
        ids, mask = batch()
        optimizer = torch.optim.AdamW(policy.model.parameters(), 1e-3)
        learner = mtp.Learner(policy, lr=1e-2, clip=1e-3)
        hidden = hidden_states(policy.model, ids)
        (-token_logps(policy.model, ids, mask, hidden=hidden).sum()).backward()
        if along:
            learner.read(ids, mask, hidden)
        norm = optimizer_step(policy.model, optimizer, 1.0, ALONE)
        moved = bytes_of(policy.mtp.tensors())
        if along:
            assert 1e-3 < learner.step(ALONE) != norm
            assert bytes_of(policy.mtp.tensors()) != moved
        results.append((norm, bytes_of(policy.model.state_dict())))
    assert results[0] == results[1]


def test_what_stands_outside_the_messages_does_not_count(shared):
    """FAULTS 42: other text after a message, or in the padding, leaves its drafts alone; so does the next sequence."""
    ids, mask = batch()
    _, columns, starts = mtp.loss(shared.model, shared.mtp, ids, mask)
    changed, last = ids.clone(), int(mask[0].nonzero().max())
    changed[0, last + 1 :], changed[2, 9:] = 11, 12
    _, other, _ = mtp.loss(shared.model, shared.mtp, changed, mask)
    assert torch.equal(columns, other)
    single = pad_batch(*([part[1]] for part in sequences()), bucket=1)
    _, alone, _ = mtp.loss(shared.model, shared.mtp, *single)
    torch.testing.assert_close(columns[1], F.pad(alone[0], (0, 0) * 2 + (0, 40 - len(alone[0]))), rtol=1e-3, atol=1e-4)


def test_nothing_to_draft(shared):
    ids, mask = batch()
    alone = torch.zeros_like(mask)
    alone[:, 5] = 1
    for empty in (mask * 0, alone):
        total, columns, starts = mtp.loss(shared.model, shared.mtp, ids, empty)
        assert total == 0 and not columns.any() and not starts.any()
    learner = mtp.Learner(load(shared.path))
    learner.read(ids, alone)
    assert learner.step(ALONE) == 0.0 and learner.log(ALONE) == {}
    pair = alone.clone()
    pair[:, 6] = 1  # first drafts, and no second
    assert mtp.loss(shared.model, shared.mtp, ids, pair)[2].sum((0, 1)).tolist() == [3, 0, 0]


def gradients(policy, parts, **options):
    """Of the learner's loss, summed over micro-batches and divided as the step does; no weight moves."""
    learner = mtp.Learner(policy, lr=0.0, clip=0.0, **options)
    learner.optimizer.zero_grad = lambda: None
    policy.mtp.zero_grad()
    for ids, mask in parts:
        learner.read(*pad_batch(ids, mask, bucket=8))
    norm = learner.step(ALONE)
    return learner.log(ALONE), norm, [p.grad.clone() for p in policy.mtp.parameters()]


def test_micro_batches_and_chunks_do_not_change_the_step(policy, monkeypatch):
    """FAULTS 16: one denominator, first drafts of the whole batch."""
    ids, mask = sequences()
    log, norm, whole = gradients(policy, [(ids, mask)])
    total, _, starts = mtp.loss(policy.model, policy.mtp, *batch())
    want = torch.autograd.grad(total / starts[..., 0].sum(), list(policy.mtp.parameters()))
    for a, b in zip(whole, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    monkeypatch.setattr(mtp, "CHUNK", 5)
    other, again, parts = gradients(policy, [([i], [m]) for i, m in zip(ids, mask)])
    assert other == pytest.approx(log, rel=1e-4) and again == pytest.approx(norm, rel=1e-4)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# acceptance


def simulate(chances, rng, depth=3):
    """Forwards that write a message, drafts accepted, by coin."""
    place = steps = accepted = 0
    while place < len(chances):
        steps += 1
        n = 0
        while n < len(chances[place]) and rng.random() < chances[place][n]:
            n += 1
        accepted += n
        place = min(place + n + 1, len(chances))
    return steps, accepted


def ragged(length, draw, depth=3):
    return [[draw() for _ in range(min(depth, length - i))] for i in range(length)]


def test_walk():
    rng = random.Random(0)
    assert mtp.walk([]) == (0, 0) and mtp.walk([[0.25]]) == (1, 0.25)
    assert mtp.walk(ragged(8, lambda: 1.0)) == (2, 6) and mtp.walk(ragged(7, lambda: 0.0)) == (7, 0)
    assert mtp.walk(ragged(2, lambda: 0.5)) == (1.5, 0.5 + 0.25 + 0.25)  # nothing, one or two; then one more or not
    for n in range(1, 30):
        chances = ragged(n, lambda: float(rng.random() < 0.6))
        assert mtp.walk(chances) == simulate(chances, rng)
    chances = ragged(20, rng.random)
    tries = [simulate(chances, rng) for _ in range(4000)]
    for got, found in zip(mtp.walk(chances), zip(*tries), strict=True):
        assert got == pytest.approx(sum(found) / len(tries), rel=0.02)


def test_acceptance_goes_by_messages():
    """Tokens 2 .. 6 and 8 .. 9 are messages; the first token of each comes with the prompt."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0]])
    columns = torch.zeros(1, 11, 3, 3)
    columns[0, :, :, 1] = 0.5
    columns[0, 1, :, 2] = 1.0  # three greedy drafts after token 2 are right, and one more token ends the message
    sampled, greedy = mtp.acceptance(columns, mask)
    assert greedy.tolist() == [5, 2, 3]
    a, b = mtp.walk([[0.5] * 3, [0.5] * 3, [0.5] * 2, [0.5]]), mtp.walk([[0.5]])
    assert sampled.tolist() == [5, a[0] + b[0], a[1] + b[1]]


def test_log_has_both_conventions(shared):
    """A perfect head: 4 of 4 and 3 of 3 (but for the ends of messages); the loss is 0 and says so."""
    ids, mask = [[0] * 3 + [1] * 401], [[0] * 3 + [1] * 401]

    def perfect(*_):
        starts = mtp.starts_of(torch.tensor(mask), 3)
        columns = torch.zeros(*starts.shape, 3)
        columns[..., 1:] = starts[..., None]
        return torch.zeros(()), columns, starts

    learner = mtp.Learner(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "loss", perfect)
        learner.read(*pad_batch(ids, mask), train=False)
    log = learner.log(ALONE)
    assert log["length"] == log["greedy_length"] == 4.0 and log["rate"] == log["accepted"] == 1.0
    assert log["loss"] == log["loss_3"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# learning


def cycle(n, rng, period=29):
    """A sequence in which each token has one successor, and a mask over all but its beginning."""
    start = rng.randrange(period)
    return [(start + i) * 12 % period for i in range(n)], [0] * 4 + [1] * (n - 4)


def test_it_learns_the_token_after_the_next(dense_dir):
    """FAULTS 42: hard targets, tok_{t+2} = pi(tok_{t+1}): the first draft is right everywhere, and the others too."""
    policy, rng = load(dense_dir), random.Random(0)
    policy.mtp = MTP(policy.model, seed=3)
    learner = mtp.Learner(policy, lr=1e-2, soft=False)
    for _ in range(60):
        rows = [cycle(24, rng) for _ in range(8)]
        learner.read(*pad_batch(*zip(*rows), bucket=8))
        learner.step(ALONE)
    first = learner.log(ALONE)
    ids, mask = pad_batch(*zip(*[cycle(24, rng) for _ in range(8)]), bucket=8)
    hidden, starts = hidden_states(policy.model, ids), mtp.starts_of(mask, 3)
    lm_head = policy.model.get_output_embeddings()
    for d, (row, t, g) in enumerate(mtp.chain(policy.mtp, policy.model, ids, starts, hidden), 1):
        said = lm_head(g)[:, : policy.codec.vocab_size].argmax(-1)
        inside = t + 5 < 24  # so that there is a token at each distance
        row, t, said = row[inside], t[inside], said[inside]
        right = {n: (said == ids[row, t + n]).float().mean().item() for n in range(6)}
        assert right.pop(d + 1) > 0.99 and max(right.values()) < 0.01, (d, right)
    learner.read(ids, mask, train=False)
    last = learner.log(ALONE)
    assert last["loss"] < 0.5 * first["loss"]  # that is the mean of all steps


@pytest.mark.parametrize(
    "path, soft", [("dense", True), ("dense", False), ("hybrid", True)], indirect=["path"], scope="module"
)
def test_training_lowers_the_loss_and_raises_acceptance(path, soft):
    """A new head on a frozen model, soft and hard; it reads held-out rows of the same kind."""
    policy, rng = load(path), random.Random(1)
    frozen = bytes_of(policy.model.state_dict())
    policy.mtp = MTP(policy.model, seed=3)
    learner = mtp.Learner(policy, lr=1e-2 if policy.mtp.fc.weight.shape[0] == 32 else 3e-3, soft=soft)
    held = pad_batch(*zip(*[cycle(20, rng) for _ in range(8)]), bucket=8)

    def measured():
        learner.read(*held, train=False)
        return learner.log(ALONE)

    before = measured()
    for _ in range(30):
        learner.read(*pad_batch(*zip(*[cycle(20, rng) for _ in range(8)]), bucket=8))
        learner.step(ALONE)
    learner.log(ALONE)
    after = measured()
    assert after["loss"] < 0.7 * before["loss"] and all(after[f"loss_{d}"] < before[f"loss_{d}"] for d in (1, 2, 3))
    assert not soft or after["greedy_length"] > before["greedy_length"] + 0.1
    assert bytes_of(policy.model.state_dict()) == frozen


def test_a_policy_without_a_head_cannot_learn():
    with pytest.raises(BadInput, match="has no MTP head"):
        mtp.Learner(small())


# ---------------------------------------------------------------------------------------------------------------------
# runs


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", random.Random(0)
    rows = [cycle(rng.randrange(12, 30), rng) for _ in range(9)]
    rows += [([1, 2, 3], [0, 0, 1]), cycle(60, rng)]  # nothing to draft, and too long
    path.write_text("".join(json.dumps({"ids": ids, "mask": mask}) + "\n" for ids, mask in rows))
    return path


@pytest.fixture
def flags(path, rollouts):
    words = {"config": "tiny", "device": "cpu", "model": path, "rollouts": rollouts, "context": 40, "steps": 4}
    return [word for key, value in words.items() for word in (f"--{key}", str(value))]


def rows_of(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_a_run_and_its_resume(flags, path, tmp_path, monkeypatch):
    """FAULTS 31: Ctrl-C after two steps, then on: weights and log are those of a run that nothing interrupted."""
    mtp.main([*flags, "--out", str(whole := tmp_path / "whole"), "--micro", "2"])
    log, text = rows_of(whole), (whole / "log.txt").read_text()
    assert [row["step"] for row in log] == [0, 1, 2, 3, 4] and "held_out/loss" in log[0] and "held_out/loss" in log[4]
    assert "9 rollouts; left out: 1 beyond --context, 1 with nothing to draft" in text
    assert f"the head of {path}" in text and "8 to train, 1 held out" in text
    for name in ("loss.png", "acceptance.png"):
        assert (whole / name).read_bytes().startswith(b"\x89PNG")
    main, was = stored(whole / "model"), stored(path)
    for name, tensor in main.items():
        assert torch.equal(tensor, was[name].float()) != name.startswith("mtp."), name

    step = mtp.Learner.step

    def interrupted(self, ranks):
        if len(rows_of(out)) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, ranks)

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mtp.Learner, "step", interrupted)
        mtp.main([*flags, "--out", str(out), "--micro", "2"])
    assert len(rows_of(out)) == 3 and not (out / "model").exists()
    mtp.main([*flags, "--out", str(out), "--micro", "2", "--resume"])
    assert rows_of(out) == log and bytes_of(stored(out / "model")) == bytes_of(main)


def test_init(flags, path, tmp_path):
    """A model without a head gets a new one, in so many words; a graft; bfloat16 keeps the model's own bytes."""
    bare = without_head(path, tmp_path / "bare")
    words = [*flags, "--model", str(bare), "--steps", "1", "--out"]
    mtp.main([*words, str(tmp_path / "new")])
    assert f"{bare} has no tensors mtp.*: a new head" in (tmp_path / "new" / "log.txt").read_text()
    assert load(tmp_path / "new" / "model").mtp
    mtp.main([*words, str(tmp_path / "graft"), "--init", str(path), "--lr", "0", "--dtype", "bfloat16"])
    assert f"the head of {path}, on {bare}" in (tmp_path / "graft" / "log.txt").read_text()
    got, want = stored(tmp_path / "graft" / "model"), stored(path)
    assert bytes_of(got) == bytes_of({name: want[name].to(torch.bfloat16) for name in got})
    assert got.keys() == {name for name in want if "visual" not in name}
    mtp.main([*words, str(tmp_path / "before"), "--init", "random", "--norm", "before", "--targets", "hard"])
    assert load(tmp_path / "before" / "model").mtp.before_norm
    mtp.main([*words, str(tmp_path / "again"), "--init", str(tmp_path / "before" / "model")])
    assert load(tmp_path / "again" / "model").mtp.before_norm  # a head reads what it has learned to read


def test_two_processes_take_the_same_steps(dense_dir, rollouts, tmp_path):
    """FAULTS 16: rollouts sharded over ranks, one number of drafts, gradients summed before the clip."""
    words = ["--config", "tiny", "--device", "cpu", "--model", str(dense_dir), "--rollouts", str(rollouts)]
    words += ["--context", "40", "--batch", "4", "--held-out", "3", "--out"]
    mtp.main([*words, str(whole := tmp_path / "whole")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "mtp.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words, tmp_path / "two"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for got, want in zip(rows_of(tmp_path / "two"), rows_of(whole), strict=True):
        assert got == pytest.approx(want, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "nowhere"], "nowhere: no such model directory"),
        (["--rollouts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--init", "nowhere"], "nowhere: no such model directory"),
        (["--context", "5000"], "--context 5000 is beyond the 4096 positions"),
        (["--held-out", "9"], "9 rollouts; .* nothing to train beside --held-out 9"),
        (["--depth", "4"], "--depth: 4 is not within"),
        (["--targets", "sof"], "did you mean soft"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_directory(dense_dir, rollouts, tmp_path, words, message):
    flags = ["--config", "tiny", "--model", str(dense_dir), "--rollouts", str(rollouts), "--context", "40"]
    with pytest.raises(BadInput, match=message):
        mtp.main([*flags, "--out", str(tmp_path / "run"), *words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not a trajectory"),
        ('{"ids": [1, 2]}', "not a trajectory"),
        ('{"ids": [1, 2], "mask": [0]}', "not a trajectory"),
        ('{"ids": [1, 2], "mask": [1, 1]}', "the first one 0"),
        ('{"ids": [1, 2.5], "mask": [0, 1]}', "not a trajectory"),
        ('{"ids": [1, 73], "mask": [0, 1]}', "not within the 73 tokens"),
        ("[]", "not a trajectory"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_text('{"ids": [1, 2, 3], "mask": [0, 1, 1]}\n' + line)
    with pytest.raises(BadInput, match=f"x.jsonl:2: .*{message}"):
        mtp.read_rollouts(tmp_path / "x.jsonl", 73, 100)
