"""The tiny Qwen3.6 of data/make_qwen36.py, and that what trains a policy trains it: hybrid layers, experts, chat."""

import json
import re
from dataclasses import replace

import pytest
from options import BadInput
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import mtp
import rl
import sft
from chat import REPLY, TOOL, Call, Message
from common import ALONE
from data import make_qwen36
from harness import Harness
from model import hidden_states, load, pad_batch, token_logps

CALL = {"name": "get_price", "arguments": {"sku": "A-3", "live_only": True, "tags": ["新", "旧"]}}


@pytest.fixture(scope="module")
def shared(qwen36_dir):
    """Not to be changed."""
    return load(qwen36_dir)


@pytest.fixture
def policy(qwen36_dir):
    return load(qwen36_dir)


def sequences():
    """Shorter and longer than the convolution, than one chunk of the delta rule, and than two."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 2600, (n,), generator=g).tolist() for n in (3, 30, 70, 130)]
    return ids, [[0] + [1] * (len(row) - 1) for row in ids]


# ---------------------------------------------------------------------------------------------------------------------
# the checkpoint


def test_same_seed_same_bytes(qwen36_dir, tmp_path):
    make_qwen36.main(["--out", str(tmp_path / "same")])
    make_qwen36.main(["--out", str(tmp_path / "other"), "--seed", "1"])
    names = sorted(file.name for file in qwen36_dir.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "same").iterdir())
    for name in names:
        assert (qwen36_dir / name).read_bytes() == (tmp_path / "same" / name).read_bytes(), name
        if name.endswith(".safetensors"):
            assert (qwen36_dir / name).read_bytes() != (tmp_path / "other" / name).read_bytes(), name


def test_names_and_layers_are_the_real_ones(qwen36_dir):
    config, index = (json.loads((qwen36_dir / f"{x}.json").read_text()) for x in ("config", "model.safetensors.index"))
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"] and config["model_type"] == "qwen3_5_moe"
    assert config["text_config"]["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    names = {re.sub(r"layers\.\d+", "layers.N", name) for name in index["weight_map"] if "visual" not in name}
    layer = "model.language_model.layers.N."
    delta = "A_log conv1d.weight dt_bias in_proj_a.weight in_proj_b.weight in_proj_qkv.weight in_proj_z.weight"
    delta = f"{delta} norm.weight out_proj.weight".split()
    attention = [f"self_attn.{x}.weight" for x in "q_proj k_proj v_proj o_proj q_norm k_norm".split()]
    rest = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.shared_expert_gate.weight"]
    rest += [f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")]
    rest += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    want = {layer + name for name in [*(f"linear_attn.{x}" for x in delta), *attention, *rest]}
    want |= {"model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight"}
    head = [f"layers.N.{name}" for name in attention + rest]
    head += [f"{x}.weight" for x in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    assert names == want | {f"mtp.{name}" for name in head} and len(head) == 19
    assert any("visual" in name for name in index["weight_map"])
    assert len(set(index["weight_map"].values())) == 2


def test_a_trained_one_keeps_its_names(policy, qwen36_dir, tmp_path):
    """All but the vision tower, which is not read."""
    policy.publish(tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    names = json.loads((qwen36_dir / "model.safetensors.index.json").read_text())["weight_map"]
    assert written.keys() == {name for name in names if "visual" not in name}
    again = load(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True))


def test_it_is_wide_awake(shared):
    """Random, and yet a test of it would see a fault: tokens differ in probability, and the past matters for long."""
    ids = torch.tensor([sequences()[0][3]])
    other = ids.clone()
    other[0, 0] += 1
    with torch.no_grad():
        a, b = (shared.model(x).logits[0, :, : shared.codec.vocab_size] for x in (ids, other))
        without = shared.model(ids[:, 100:]).logits[0, :, : shared.codec.vocab_size]
    assert a.std() > 1 and (a.topk(2).values @ torch.tensor([1.0, -1.0])).median() > 0.05
    assert (a[10] - b[10]).abs().max() > 1e-2  # the first token, ten tokens on
    assert (a[-1] - without[-1]).abs().max() > 1e-3  # what stood 30 and more tokens back


def conversation():
    """What the goldens have, in words of its own."""
    calls = [{"function": CALL}, {"function": {"name": "get_price", "arguments": {"sku": "A-4"}}}]
    return [
        {"role": "system", "content": "你是主播助手。"},
        {"role": "user", "content": "3号链接多少钱？"},
        {"role": "assistant", "content": "我查一下。", "reasoning_content": "need price", "tool_calls": calls},
        {"role": "tool", "content": '{"price": 59}'},
        {"role": "tool", "content": '{"price": 69}'},
        {"role": "assistant", "content": "59元。", "reasoning_content": "done"},
        {"role": "user", "content": "有券吗"},
    ]


def test_chat_is_xml_and_thinks(shared):
    """The codec writes XML calls for it, and reads what it says after the <think> that opens each turn."""
    codec = shared.codec
    assert codec.calls == "xml" and codec.opens
    assert codec.text([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n<think>\n")
    said = codec.parse(codec.render(Message("查价", "", [Call(**CALL)])))
    assert said.reasoning == "查价" and said.calls[0].name == "get_price" and said.calls[0].arguments["sku"] == "A-3"
    for token in make_qwen36.VISION:  # a viewer who types one of its vision tokens injects nothing
        assert codec.added[token] not in codec.encode(f"x{token}y")


@pytest.mark.parametrize("name, thinking", [("qwen3_6.preserve", True), ("qwen3_6.nothink", False)])
def test_template_prints_what_the_real_one_prints(shared, shared_data, name, thinking):
    data = json.loads((shared_data / "qwen_format" / "conversation.json").read_text(encoding="utf-8"))
    golden = (shared_data / "qwen_format" / f"{name}.txt").read_text(encoding="utf-8")
    if not thinking:  # there the real template drops the reasoning of earlier turns
        data["messages"] = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in data["messages"]]
    options = {"tools": data["tools"], "add_generation_prompt": True, "tokenize": False, "enable_thinking": thinking}
    assert shared.tokenizer.apply_chat_template(data["messages"], **options) == golden


def test_template_and_codec_agree(shared):
    messages = conversation()
    tool = {"type": "function", "function": {"name": "get_price", "parameters": {"type": "object", "properties": {}}}}
    ours = []
    for m in messages:
        calls = [Call(**c["function"]) for c in m.get("tool_calls", [])]
        ours.append({"role": m["role"], "content": m["content"], "reasoning": m.get("reasoning_content", "")})
        ours[-1] |= {"calls": calls} if calls else {}
    for tools in (None, [tool]):
        text = shared.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert text == shared.codec.text(ours, tools)


# ---------------------------------------------------------------------------------------------------------------------
# log-probs and updates


def test_logps_equal_the_plain_formula(shared):
    ids, mask = pad_batch(*sequences(), bucket=8)
    with torch.no_grad():
        got = token_logps(shared.model, ids, mask, 0.7)
        logits = shared.model(ids).logits[:, :-1, : shared.codec.vocab_size] / 0.7
    want = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    torch.testing.assert_close(got[:, 1:], want, rtol=1e-4, atol=1e-4)


def grads(policy, parts, bucket):
    policy.model.zero_grad()
    values = []
    for ids, mask in parts:
        logps = token_logps(policy.model, *pad_batch(ids, mask, bucket=bucket))
        logps.sum().backward()
        values += [row[: len(i)].detach() for row, i in zip(logps, ids)]
    return values, [p.grad.clone() for p in policy.model.parameters()]


def test_padding_changes_neither_logps_nor_gradients(policy):
    """FAULTS 12: on the right nothing can see it, a recurrent and a convolutional state no more than attention."""
    ids, mask = sequences()
    alone, want = grads(policy, [([i], [m]) for i, m in zip(ids, mask)], bucket=1)
    for bucket in (64, 256):
        together, got = grads(policy, [(ids, mask)], bucket)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * (1 + b.abs().max().item()))


def test_what_stands_in_the_padding_does_not_matter(shared):
    ids, mask = pad_batch(*sequences(), bucket=256)
    other = ids.masked_fill(mask.flip(1).cummax(1).values.flip(1) == 0, 7)
    with torch.no_grad():
        assert torch.equal(*(token_logps(shared.model, x, mask) for x in (ids, other)))


def test_sft_trains_every_weight(policy):
    rows = list(zip(*sequences()))
    cfg = sft.Config(micro=2, lr=3e-3)
    optimizer = torch.optim.AdamW(policy.model.parameters(), cfg.lr)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    losses = [sft.update(policy, optimizer, rows, cfg, ALONE)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.3 and all(b < a for a, b in zip(losses, losses[1:]))
    assert not [name for name, p in policy.model.named_parameters() if torch.equal(p, before[name])]


def test_rl_update_starts_at_ratio_one_and_does_not_depend_on_micro_batches(policy):
    """FAULTS 11, 16: with the log-probs of another batch as those of the engine."""
    trajectories = []
    for ids, mask in zip(*sequences()):
        with torch.no_grad():
            logps = token_logps(policy.model, *pad_batch([ids], [mask], bucket=1), 1.0)[0].tolist()
        half = len(ids) // 2
        segment = [s * m for s, m in zip([TOOL] * half + [REPLY] * (len(ids) - half), mask)]
        trajectories.append(rl.Trajectory(ids, mask, logps, segment, [0] * len(ids), [0] * len(ids)))
    advantages = torch.tensor([[1.0, -1.0], [0.5, 2.0], [-1.0, 0.0], [0.0, 1.0]])
    logs, found = [], []
    for micro in (1, 4):
        optimizer = torch.optim.SGD(policy.model.parameters(), 0.0)
        optimizer.zero_grad = lambda: None
        policy.model.zero_grad()
        cfg = rl.Config(minibatches=1, micro=micro, grad_clip=0)
        logs.append(rl.update(rl.Actors(policy, optimizer), trajectories, advantages, [0] * 4, cfg, ALONE))
        found.append([p.grad.clone() for p in policy.model.parameters()])
    assert logs[0]["first_ratio_off"] < 1e-4 and logs[0] == pytest.approx(logs[1], rel=1e-3, abs=1e-4)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * (1 + b.abs().max().item()))


def test_hidden_states_are_those_that_the_lm_head_reads(shared):
    ids, _ = pad_batch(*sequences(), bucket=8)
    with torch.no_grad():
        hidden, logits = hidden_states(shared.model, ids), shared.model(ids).logits
    torch.testing.assert_close(F.linear(hidden, shared.model.get_output_embeddings().weight), logits)


def test_sft_and_mtp_run_on_it(qwen36_dir, tmp_path):
    """A whole run under its own chat format; SFT leaves the head as it was, and mtp.py trains it on the samples."""
    words, h = ["--config", "tiny", "--device", "cpu", "--model"], Harness.load("data/harness")
    h.copy(limits=replace(h.limits, max_state_tokens=1024)).save(tmp_path / "harness")  # its tokens are bytes
    flags = ["--harness", str(tmp_path / "harness"), "--samples", "3", "--held-out", "1"]
    sft.main([*words, str(qwen36_dir), *flags, "--out", str(tmp_path / "sft")])
    tuned, base = load(tmp_path / "sft" / "model"), load(qwen36_dir)
    assert all(torch.equal(a, b) for a, b in zip(tuned.mtp.parameters(), base.mtp.parameters(), strict=True))
    assert not torch.equal(tuned.model.lm_head.weight, base.model.lm_head.weight)
    samples = tmp_path / "sft" / "samples.jsonl"
    assert "<function=" in tuned.codec.decode(json.loads(samples.read_text().splitlines()[0])["ids"])
    flags = ["--rollouts", str(samples), "--steps", "1", "--out", str(tmp_path / "mtp")]
    mtp.main([*words, str(tmp_path / "sft" / "model"), *flags])
    got = load(tmp_path / "mtp" / "model")
    assert all(torch.equal(a, b) for a, b in zip(tuned.model.parameters(), got.model.parameters(), strict=True))
    assert not torch.equal(tuned.mtp.fc.weight, got.mtp.fc.weight)


def test_options_are_checked(tmp_path):
    with pytest.raises(BadInput, match="--experts: 'fuse' is not one of fused|single; did you mean fused"):
        make_qwen36.main(["--out", str(tmp_path), "--experts", "fuse"])
