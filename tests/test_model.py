"""Policies on disk, and log-probs against the plain formula over all logits."""

import errno
import json

import pytest
import common
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import model as module
from options import BadInput
from model import create, hidden_states, layers_of, load, pad_batch, recompute, shared_prefix, token_logps


def toy_tokenizer(template=None):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = template
    return fast


def small(seed=0, **options):
    return create(toy_tokenizer(), hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, seed=seed, **options)


@pytest.fixture(scope="module")
def policy():
    policy = small()
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(6.0 if p.dim() > 1 else 1.0)
    return policy


def batch(lengths=(17, 40, 9), seed=0, bucket=8):
    """Random ids and masks; the padding id (= end of turn) is also a real, sampled token."""
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 73, (n,), generator=g).tolist() for n in lengths]
    mask = [[0] * 4 + (torch.rand(n - 4, generator=g) < 0.6).long().tolist() for n in lengths]
    ids[0][-1], mask[0][-1] = 71, 1
    return ids, mask, pad_batch(ids, mask, bucket=bucket)


def reference(policy, ids, mask, temperature=1.0):
    """All logits at once, rows of the head beyond the vocabulary left out."""
    logits = policy.model(ids).logits[:, :-1, : policy.codec.vocab_size].float() / temperature
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return (F.pad(x * mask[:, 1:], (1, 0)) for x in (chosen, entropy))


# ---------------------------------------------------------------------------------------------------------------------
# log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [2048, 7])
def test_logps_and_entropy_equal_the_plain_formula(policy, monkeypatch, temperature, chunk):
    monkeypatch.setattr(module, "HEAD_CHUNK", chunk)
    _, _, (ids, mask) = batch()
    logps, entropy = token_logps(policy.model, ids, mask, temperature, entropy=True)
    want, want_entropy = reference(policy, ids, mask, temperature)
    assert logps.dtype == torch.float32 and logps.shape == ids.shape
    assert torch.allclose(logps, want, atol=1e-5) and torch.allclose(entropy, want_entropy, atol=1e-5)
    assert (logps[mask == 0] == 0).all()


@pytest.mark.parametrize("chunk", [2048, 7])
def test_gradient_equals_the_plain_formula(policy, monkeypatch, chunk):
    """Of the log-probs alone: asking for the entropies, which are for the log, changes no gradient."""
    monkeypatch.setattr(module, "HEAD_CHUNK", chunk)
    _, _, (ids, mask) = batch()
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(policy.model.parameters())
    logps, entropy = token_logps(policy.model, ids, mask, 0.8, entropy=True)
    got = torch.autograd.grad((weight * (logps + 0.1 * entropy)).sum(), parameters)
    want, _ = reference(policy, ids, mask, 0.8)
    want = torch.autograd.grad((weight * want).sum(), parameters)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)


def test_logps_do_not_depend_on_padding_or_on_the_batch(policy):
    ids, mask, (all_ids, all_mask) = batch()
    together = token_logps(policy.model, all_ids, all_mask)
    for i, bucket in ((0, 1), (1, 64), (2, 128)):
        one_ids, one_mask = pad_batch([ids[i]], [mask[i]], bucket=bucket)
        alone = token_logps(policy.model, one_ids, one_mask)
        n = len(ids[i])
        assert torch.allclose(together[i, :n], alone[0, :n], atol=1e-5)
        assert (alone[0, n:] == 0).all()


@pytest.mark.parametrize(
    "rows, shared",
    [
        ([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 6, 7]], 4),  # five, and then down
        ([[1, 2, 3, 4], [1, 2, 3, 4, 5]], 2),  # four, but one token at least must be a row's own
        ([[1, 2, 3, 4, 5]] * 3, 4),
        ([[1, 2, 3], [4, 2, 3]], 0),
        ([[9, 2, 3, 4], [9, 2], [9, 2, 3, 5]], 0),
        ([[1, 2, 3, 4]], 0),  # nothing to share it with
        ([[1, 2, 3, *range(9)], [1, 2, 3, 9]], 2),
        ([[1, 2, 3, *range(10)], [1, 2, 3, 9]], 0),  # too little of the longest to be worth a mask
    ],
)
def test_a_shared_prefix(policy, rows, shared):
    assert shared_prefix(policy.model, rows, bucket=2) == shared


def test_a_recurrent_model_shares_no_prefix(qwen36_dir):
    assert shared_prefix(load(qwen36_dir).model, [[1] * 40, [1] * 50]) == 0


@pytest.mark.parametrize("shared, attn", [(1, "sdpa"), (7, "sdpa"), (8, "sdpa"), (8, "eager")])
def test_a_prefix_that_is_read_once_changes_nothing(policy, shared, attn):
    policy.model.set_attn_implementation(attn)
    ids, mask, _ = batch()
    ids = [[3] * 8 + row for row in ids]
    ids, mask = pad_batch(ids, [[0] * 8 + row for row in mask], bucket=8)
    found = []
    for n in (0, shared):
        policy.model.zero_grad()
        hidden = hidden_states(policy.model, ids, n)
        logps = token_logps(policy.model, ids, mask, hidden=hidden)
        (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
        found.append([hidden.detach(), logps.detach(), *(p.grad.clone() for p in policy.model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    policy.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("family", ["dense", "hybrid"])
def test_layers_that_are_computed_again_give_the_same_gradient(family, dense_dir, qwen36_dir):
    found, calls, (ids, mask, _) = [], [], batch()
    ids, mask = pad_batch([[x % 200 for x in row] for row in ids], mask, bucket=8)
    for again in (False, True):
        model = load(dense_dir if family == "dense" else qwen36_dir).model
        layers_of(model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        if again:
            recompute(model)
        logps = token_logps(model, ids, mask)
        logps.sum().backward()
        assert len(calls) == 1 + 2 * again
        found.append([logps.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_stands_in_the_padding_does_not_matter(policy):
    ids, mask, (a, m) = batch()
    b = a.clone()
    for row, n in enumerate(map(len, ids)):
        b[row, n:] = 5
    assert torch.equal(token_logps(policy.model, a, m), token_logps(policy.model, b, m))


def test_masked_positions_have_exactly_zero_gradient(policy):
    """A position that predicts no sampled token gets nothing from the head: neither value nor gradient."""
    _, _, (ids, mask) = batch()
    hidden = hidden_states(policy.model, ids).detach().requires_grad_()
    token_logps(policy.model, ids, mask, hidden=hidden).sum().backward()
    predicts = F.pad(mask[:, 1:], (0, 1)).bool()
    assert (hidden.grad[~predicts] == 0).all()
    assert (hidden.grad[predicts].abs().sum(-1) > 0).all()
    logps = token_logps(policy.model, ids, mask)
    weight = torch.where(mask.bool(), 0.0, 1e9).requires_grad_()
    assert (logps * weight).sum() == 0


def test_an_empty_mask_gives_zeros(policy):
    _, _, (ids, mask) = batch()
    logps, entropy = token_logps(policy.model, ids, mask * 0, entropy=True)
    assert (logps == 0).all() and (entropy == 0).all()


def test_the_first_token_cannot_be_sampled(policy):
    with pytest.raises(AssertionError, match="first token"):
        token_logps(policy.model, torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))


def test_padding_rows_of_the_head_take_no_probability():
    policy = small()
    _, _, (ids, mask) = batch()
    before = token_logps(policy.model, ids, mask)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[policy.codec.vocab_size :] = 50.0
    assert torch.equal(token_logps(policy.model, ids, mask), before)


# ---------------------------------------------------------------------------------------------------------------------
# batches


def test_pad_batch():
    ids, mask, logps = pad_batch([[5, 6, 7], [8]], [[0, 1, 1], [0]], [[0.0, -0.5, -1.0], [0.0]], bucket=4)
    assert ids.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]] and ids.dtype == torch.int64
    assert mask.tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert logps.dtype == torch.float32 and logps[0].tolist() == [0.0, -0.5, -1.0, 0.0]
    assert pad_batch([[1] * 129]).shape == (1, 256)
    with pytest.raises(AssertionError, match="aligned"):
        pad_batch([[1, 2]], [[1]])


# ---------------------------------------------------------------------------------------------------------------------
# on disk


def test_create_is_seeded_and_leaves_global_state_alone():
    state = torch.get_rng_state()
    a, b, c = small(7).model, small(7).model, small(8).model
    assert torch.equal(state, torch.get_rng_state())
    same = [torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    assert all(same) and not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert a.lm_head.weight is a.get_input_embeddings().weight
    assert a.config.vocab_size % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path, dtype):
    policy = small(dtype=dtype)
    policy.save(tmp_path)
    again = load(tmp_path, "cpu", dtype)
    assert (tmp_path / "model.safetensors").is_file()
    for (name, a), (other, b) in zip(policy.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)
    text = "w3 w4 w5"
    assert again.codec.encode(text) == policy.codec.encode(text)
    assert again.codec.stop_ids == policy.codec.stop_ids
    assert again.path == str(tmp_path) and not again.model.training


@pytest.mark.parametrize(
    "template,calls", [(None, "hermes"), ("{{ '<tool_call>{' }}", "hermes"), ("<function=", "xml")]
)
def test_the_chat_template_tells_the_call_format(tmp_path, template, calls):
    policy = create(toy_tokenizer(template), hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    assert policy.codec.calls == calls
    policy.save(tmp_path)
    assert load(tmp_path).codec.calls == calls


def test_publish_replaces_what_stands_there_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "model"
    for seed in (1, 2):
        small(seed).publish(path)
        (path / "left over").touch()
    small(3).publish(path)
    assert torch.equal(load(path).model.lm_head.weight, small(3).model.lm_head.weight)
    assert list(tmp_path.iterdir()) == [path] and not (path / "left over").exists()
    (path / "eval.json").touch()
    small(3).publish(path)  # as a finished run does that is resumed: what was measured of these weights stays
    assert list(tmp_path.iterdir()) == [path] and (path / "eval.json").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("bug")])
def test_a_failed_publish_keeps_the_old_model_and_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(model, directory, state_dict):
        (directory / "model.safetensors").write_text("half")
        raise error

    policy, path = small(1), tmp_path / "model"
    policy.publish(path)
    monkeypatch.setattr(type(policy.model), "save_pretrained", fail)
    with pytest.raises(BadInput if isinstance(error, OSError) else RuntimeError, match="model: no space left|bug"):
        small(2).publish(path)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(load(path).model.lm_head.weight, policy.model.lm_head.weight)


BROKEN = {  # what transformers says: a field and a class of its strict dataclasses, a key, an operation, an assertion
    "config of a wrong type": {"hidden_size": "x"},
    "config that contradicts itself": {"num_hidden_layers": -3},
    "unknown activation": {"hidden_act": "zzz"},
    "no heads": {"num_attention_heads": 0},
    "no vocabulary": {"vocab_size": 0},
}


def damage(path, how):
    weights = path / "model.safetensors"
    if how in BROKEN:
        config = common.read_json(path / "config.json")
        (path / "config.json").write_text(json.dumps(config | BROKEN[how]))
    elif how == "no config":
        (path / "config.json").unlink()
    elif how == "broken config":
        (path / "config.json").write_text("{")
    elif how == "no weights":
        weights.unlink()
    elif how == "cut weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "empty weights":
        weights.write_bytes(b"")
    elif how == "a tensor is missing":
        tensors = load_file(weights)
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "a tensor has another shape":
        tensors = load_file(weights)
        tensors["model.norm.weight"] = torch.ones(7)
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "no tokenizer":
        for file in path.glob("tokenizer*"):
            file.unlink()
    elif how == "broken tokenizer":
        (path / "tokenizer.json").write_text("{]")


DAMAGES = ("no config", "broken config", "no weights", "cut weights", "empty weights", "a tensor is missing")
DAMAGES += ("a tensor has another shape", "no tokenizer", "broken tokenizer", *BROKEN)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_directories_are_refused_in_one_line(tmp_path, how):
    path = tmp_path / "policy"
    small().save(path)
    damage(path, how)
    with pytest.raises(BadInput) as error:
        load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_missing_directory_is_refused(tmp_path, monkeypatch):
    for path in (tmp_path / "nowhere", "no-such-directory", "no/such/directory"):
        with pytest.raises(BadInput, match="no such model directory"):
            load(path)
    with pytest.raises(BadInput, match="no such model directory"):  # a word of a path, and no hub's owner
        monkeypatch.chdir(tmp_path.parent)
        load(f"{tmp_path.name}/modle")
    small().save(tmp_path / "run" / "model")
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="a run, and no model; did you mean .*run/model?"):
        load(tmp_path / "run")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(BadInput, match="no such model directory"):
        load(file)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    small().save(tmp_path)
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([f"more{i}" for i in range(100)])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="more than the model's embedding"):
        load(tmp_path)
