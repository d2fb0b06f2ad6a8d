"""The files of an MTP head: read, written byte for byte, grafted; and what is missing in one is named."""

import pytest
import torch

import mtp
from options import BadInput
from model import load
from test_model import create, toy_tokenizer
from test_mtp import bytes_of, heads, rewrite, without_head


@pytest.fixture(params=["dense", "hybrid"])
def path(request, dense_dir, qwen36_dir):
    return dense_dir if request.param == "dense" else qwen36_dir


@pytest.fixture
def policy(path):
    return load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_written_byte_for_byte(path, tmp_path, dtype):
    """FAULTS 41: under the same names, with the model; a second round trip changes nothing at all."""
    first = load(path, dtype=dtype)
    first.publish(tmp_path / "a")
    load(tmp_path / "a", dtype=dtype).publish(tmp_path / "b")
    want = {name: t.to(dtype) for name, t in heads(path).items()}
    assert bytes_of(heads(tmp_path / "a")) == bytes_of(want) and len(want) in (15, 19)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_single_experts(qwen36_dir, tmp_path):
    """FAULTS 41: the layout of Qwen3.5 holds the same head, and is kept."""
    from data import make_qwen36

    make_qwen36.main(["--out", str(tmp_path / "single"), "--experts", "single"])
    policy, fused = load(tmp_path / "single", dtype=torch.bfloat16), load(qwen36_dir, dtype=torch.bfloat16)
    assert bytes_of(policy.mtp.state_dict()) == bytes_of(fused.mtp.state_dict())
    policy.publish(tmp_path / "out")
    want = heads(tmp_path / "single")
    assert len(want) == 17 + 3 * 8 and "mtp.layers.0.mlp.experts.7.up_proj.weight" in want
    assert bytes_of(heads(tmp_path / "out")) == bytes_of(want)


def test_a_saved_model_in_shards_keeps_its_head(policy, path, tmp_path, monkeypatch):
    save = policy.model.save_pretrained
    monkeypatch.setattr(policy.model, "save_pretrained", lambda *a, **k: save(*a, **k, max_shard_size="200KB"))
    policy.publish(tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors").exists() or "dense" in str(path)
    assert bytes_of(heads(tmp_path / "model")) == bytes_of({n: t.float() for n, t in heads(path).items()})
    again = load(tmp_path / "model")
    assert bytes_of(again.mtp.state_dict()) == bytes_of(policy.mtp.state_dict())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("mtp.fc.weight"), "1 tensors of the MTP head are missing: mtp.fc.weight"),
        (lambda t: t.update({"mtp.layers.1.x": torch.ones(2)}), "1 tensors .* are unknown: mtp.layers.1.x"),
        (lambda t: t.update({"mtp.norm.weight": torch.ones(2)}), "are of another shape: mtp.norm.weight"),
        (
            lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.layers.0.self")],
            "6 tensors of the MTP head are missing: mtp.layers.0.self_attn.k_norm.weight, ",
        ),
    ],
)
def test_a_miss_is_named(path, tmp_path, change, message):
    """FAULTS 41: never loaded at random, never half of it."""
    with pytest.raises(BadInput, match=message):
        load(rewrite(path, tmp_path / "model", change))


def test_an_expert_that_is_missing_is_named(tmp_path):
    from data import make_qwen36

    make_qwen36.main(["--out", str(tmp_path / "single"), "--experts", "single"])
    lost = "mtp.layers.0.mlp.experts.3.up_proj.weight"
    with pytest.raises(BadInput, match=f"1 tensors of the MTP head are missing: {lost}"):
        load(rewrite(tmp_path / "single", tmp_path / "model", lambda t: t.pop(lost)))


def test_a_shard_that_is_damaged_is_named(qwen36_dir, tmp_path):
    broken = tmp_path / "model"
    broken.mkdir()
    for file in qwen36_dir.iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: 100 if "00002" in file.name else None])
    with pytest.raises(BadInput, match="model-00002-of-00002.safetensors|not a readable model"):
        load(broken)
    with pytest.raises(BadInput, match="model-00002-of-00002.safetensors: not a readable weight file"):
        mtp.read(broken, load(qwen36_dir).model)


def test_graft(path, policy, tmp_path):
    """A head from the base onto a model that was trained; what is not one, or does not fit, is refused."""
    bare = load(without_head(path, tmp_path / "bare"))
    assert bare.mtp is None
    for p in bare.model.parameters():
        p.data *= 1.01
    mtp.graft(bare, path)
    bare.publish(tmp_path / "out")
    assert bytes_of(heads(tmp_path / "out")) == bytes_of({n: t.float() for n, t in heads(path).items()})
    got = load(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(got.model.parameters(), bare.model.parameters(), strict=True))
    with pytest.raises(BadInput, match="bare: has no tensors mtp"):
        mtp.graft(policy, tmp_path / "bare")
    with pytest.raises(BadInput, match="nowhere: no such model directory"):
        mtp.graft(policy, tmp_path / "nowhere")
    with pytest.raises(BadInput, match="tensors of the MTP head are"):
        mtp.graft(create(toy_tokenizer(), hidden=48, layers=2), path)
    assert policy.mtp  # what was refused has changed nothing
