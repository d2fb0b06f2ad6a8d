"""Rows of the engine against the model's own forward on each whole sequence: hidden states, keys, recurrent states."""

import common  # noqa: F401  before torch
import numpy as np
import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, MiniMaxConfig, MiniMaxForCausalLM
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from options import BadInput
from rows import SAVED, Buffer, by_rows, forward, plan, recurrent_layers
from test_infer import HYBRID, of_family

SLOTS, LENGTH = 5, 90


def toy(family):
    """A model, an empty buffer and random tokens for all rows."""
    model = of_family(family).model
    return model, Buffer(model, SLOTS), np.random.default_rng(0).integers(0, 90, (SLOTS, LENGTH))


def feed(model, buffer, tokens, past, new, width=1, **options):
    """-> the step, and the hidden states of each row (a list of (new[i], H))."""
    past, new = np.array(past), np.array(new)
    buffer.reserve(int((past + new).max()))
    step = plan(buffer, tokens, past, new, width, **{"counts": new, **options})
    return step, forward(model, step).split(new.tolist())


@torch.no_grad()
def whole(model, ids):
    """The model's own hidden states of one sequence (T, H)."""
    return model.base_model(torch.from_numpy(ids)[None], use_cache=False).last_hidden_state[0]


def near(a, b):
    return torch.allclose(a, b, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "llama", *HYBRID])
def test_windows_and_spans_in_one_pass_are_the_whole_sequences(family):
    """Prompts shorter than the convolution, of one token, long ones, and rows that go on by one, two or four tokens."""
    model, buffer, tokens = toy(family)
    want = [whole(model, ids) for ids in tokens]
    past = np.zeros(SLOTS, dtype=int)
    with by_rows(model):
        for new, width in (
            ([2, 1, 70, 3, 66], 1),
            ([1, 1, 1, 1, 1], 1),
            ([4, 2, 1, 10, 3], 4),
            ([4] * 5, 4),
            ([1] * 5, 1),
        ):
            _, hidden = feed(model, buffer, tokens, past, new, width)
            for i, h in enumerate(hidden):
                assert near(h, want[i][past[i] : past[i] + new[i]]), (new, i)
            past += new


@pytest.mark.parametrize("family", HYBRID)
def test_a_row_that_sits_out_keeps_its_states(family):
    model, buffer, tokens = toy(family)
    with by_rows(model):
        feed(model, buffer, tokens, [0] * 5, [8] * 5)
        before = buffer.conv.clone(), buffer.delta.clone()
        feed(model, buffer, tokens, [8] * 5, [1, 1, 30, 1, 1], counts=np.array([1, 0, 30, 0, 1]))
        for now, then in zip((buffer.conv, buffer.delta), before, strict=True):
            assert torch.equal(now[:, [1, 3]], then[:, [1, 3]])
            assert not torch.equal(now[:, 0], then[:, 0])


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("prompt", [2, 20])
def test_states_of_exactly_the_accepted_prefix(family, prompt):  # FAULTS 45
    """A window of four is held; each row takes 0 to 4 of it. Then every row's states are those of a fresh prefill."""
    model, buffer, tokens = toy(family)
    counts = np.arange(SLOTS)
    with by_rows(model):
        feed(model, buffer, tokens, [0] * SLOTS, [prompt] * SLOTS)
        before = buffer.delta.clone()
        step, _ = feed(model, buffer, tokens, [prompt] * SLOTS, [4] * SLOTS, 4, hold=True)
        assert torch.equal(buffer.delta, before)  # drafts have left nothing behind
        buffer.commit(step, counts)
        fresh = Buffer(model, SLOTS)
        feed(model, fresh, tokens, [0] * SLOTS, prompt + counts)
        assert near(buffer.delta, fresh.delta) and near(buffer.conv, fresh.conv)
        assert torch.equal(buffer.delta[:, 0], before[:, 0])
        for i in range(SLOTS):  # other tokens follow than those that were refused
            tokens[i, prompt + i : prompt + i + 3] = [5, 6, 7]
        _, hidden = feed(model, buffer, tokens, prompt + counts, [3] * SLOTS, 3)
    for i, h in enumerate(hidden):
        assert near(h, whole(model, tokens[i, : prompt + i + 3])[prompt + i :])


@pytest.mark.parametrize("family", HYBRID)
def test_a_span_beside_held_windows_advances_at_once(family):
    model, buffer, tokens = toy(family)
    with by_rows(model):
        feed(model, buffer, tokens, [0] * 2, [6] * 2)
        step, _ = feed(model, buffer, tokens, [6] * 2, [4, 40], 4, hold=True)
        buffer.commit(step, np.array([2, 0]))
        fresh = Buffer(model, 2)
        feed(model, fresh, tokens, [0] * 2, [8, 46])
    assert near(buffer.delta[:, :2], fresh.delta[:, :2]) and near(buffer.conv[:, :2], fresh.conv[:, :2])


@torch.inference_mode()
def test_saved_states_follow_their_rows():
    model, buffer, tokens = toy("qwen3_5_moe")
    buffer.reserve(LENGTH)

    def mark(slot, value):
        buffer.delta[:, slot] = value

    def gets(source, length, cached):
        buffer.copy(source, 4, length, cached)
        return buffer.delta[0, 4, 0, 0, 0].item()

    for slot, position, value in ((0, 10, 1.0), (1, 10, 2.0), (1, 20, 3.0), (2, 30, 4.0)):
        mark(slot, value)
        buffer.save(slot, position)
    same, cached = np.array([15, 15, 15, 15, 0]), np.array([40, 40, 40, 12, 0])
    assert buffer.ready(same, cached).tolist() == [10, 10, 0, 12, 0]
    assert buffer.ready(same + 10, cached).tolist() == [10, 20, 0, 12, 0]
    assert gets(1, 20, 40) == 3.0
    buffer.move(2, 0, 40)  # row 0 is gone with what was saved of it
    assert buffer.ready(same + 20, cached).tolist() == [30, 20, 0, 12, 0]
    assert gets(0, 30, 40) == 4.0
    assert buffer.rewind(1, 12, 40) == 0 and buffer.delta[:, 1].eq(0).all()
    assert buffer.ready(same + 20, cached).tolist() == [30, 10, 0, 12, 0]
    assert gets(1, 10, 0) == 2.0
    assert buffer.rewind(3, 12, 12) == 12
    for position in range(1, SAVED):  # the least recently used makes room: that of row 0
        mark(3, 100.0 + position)
        buffer.save(3, position)
    assert buffer.ready(same + 20, cached * 0).tolist() == [0, 10, 0, SAVED - 1, 0]
    assert gets(1, 10, 0) == 2.0 and gets(3, 5, 0) == 105.0
    buffer.clear(3)
    assert buffer.ready(same + 20, cached * 0).tolist() == [0, 10, 0, 0, 0]
    assert gets(1, 10, 0) == 2.0


def test_models_of_other_kinds_are_refused():
    shape = dict(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    sliding = Qwen3Config(**shape, head_dim=16, layer_types=["full_attention", "sliding_attention"], sliding_window=8)
    with pytest.raises(
        BadInput, match="here: the engine knows full_attention and linear_attention layers, not sliding"
    ):
        recurrent_layers(Qwen3ForCausalLM(sliding), "here")
    lightning = MiniMaxConfig(**shape, num_local_experts=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(BadInput, match="here: the engine knows only gated-delta linear attention, not that of minimax"):
        recurrent_layers(MiniMaxForCausalLM(lightning), "here")
    assert recurrent_layers(GraniteForCausalLM(GraniteConfig(**shape))) == []
    with pytest.raises(BadInput, match="here: the engine does not know logits_scaling 8"):
        recurrent_layers(GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=8.0)), "here")
    mistral = MistralConfig(**shape, num_key_value_heads=2, head_dim=16)
    assert mistral.sliding_window and recurrent_layers(Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16))) == []
    with pytest.raises(BadInput, match=f"here: the engine does not know sliding_window {mistral.sliding_window}"):
        recurrent_layers(MistralForCausalLM(mistral), "here")


def test_the_model_is_as_before_afterwards():
    model, buffer, tokens = toy("qwen3_5_moe")
    model.train()
    want = whole(model, tokens[0])
    with pytest.raises(ZeroDivisionError), by_rows(model):
        assert not model.training
        feed(model, buffer, tokens, [0], [8])
        _ = 1 / 0
    assert model.training and model.config._attn_implementation == "sdpa"
    assert torch.equal(whole(model, tokens[0]), want)
