"""States after every token: against transformers' functions and layer, and against a prefill of what was accepted."""

import inspect
import os
from functools import partial

import common  # noqa: F401  before torch
import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_recurrent_gated_delta_rule as one_by_one
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as one_by_one_next

import delta as room
from options import BadInput
from delta import conv_steps, recurrent
from rows import Buffer, by_rows
from test_rows import feed, toy
from test_verify import DEVICE, compile_for_a_gpu, run_kernels
from verify import triton

SHAPES = [  # (N, T, Hk, Hv, Dk, Dv)
    (3, 4, 2, 4, 8, 16),
    (2, 1, 1, 1, 5, 3),
    (1, 6, 3, 3, 16, 16),
    (2, 3, 2, 6, 7, 40),
]


def inputs(shape, seed=0):
    n, steps, hk, hv, dk, dv = shape
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, n, steps, hk, dk, generator=g)
    v, state = torch.randn(n, steps, hv, dv, generator=g), torch.randn(n, hv, dk, dv, generator=g)
    decay, beta = torch.rand(2, n, steps, hv, generator=g)
    return q, k, v, decay.log(), beta, state


def conv_inputs(n, steps, channels=5, width=4):
    g = torch.Generator().manual_seed(6)
    shapes = (n, steps, channels), (n, channels, width - 1), (channels, width)
    return [torch.randn(*shape, generator=g) for shape in shapes]


def upto(t, *tensors):
    return [x[:, :t] for x in tensors]


# ---------------------------------------------------------------------------------------------------------------------
# the recurrence


@pytest.mark.parametrize("function", [one_by_one, one_by_one_next], ids=["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_transformers(function, shape):
    """All outputs at once; and the state after t tokens is theirs after a call with those t tokens alone."""
    *tokens, state = inputs(shape)
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    out, states = recurrent(*tokens, state)
    share = shape[3] // shape[2]
    tokens = [x.repeat_interleave(share, dim=2) for x in tokens[:2]] + tokens[2:]  # as transformers before 5.23 wants
    want, _ = function(*tokens, initial_state=state, **options)
    assert torch.allclose(out, want, atol=1e-6, rtol=1e-6)
    for t in range(shape[1]):
        _, after = function(*upto(t + 1, *tokens), initial_state=state, **options)
        assert torch.allclose(states[:, t], after, atol=1e-6, rtol=1e-6)


def test_states_are_fp32_and_outputs_as_the_inputs():
    *tokens, state = inputs(SHAPES[0])
    half = [x.bfloat16() for x in tokens]
    out, states = recurrent(*half, state)
    want, after = recurrent(*(x.float() for x in half), state)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want.bfloat16())
    assert states.dtype == torch.float32 and torch.equal(states, after)


def test_inputs_stay_as_they_were():  # FAULTS 48
    given = inputs(SHAPES[0])
    before = [x.clone() for x in given]
    recurrent(*given)
    assert all(torch.equal(a, b) for a, b in zip(before, given))
    x, state, weight = conv_inputs(2, 3)
    before = [y.clone() for y in (x, state, weight)]
    conv_steps(x, state, weight)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, state, weight)))


def test_an_unknown_backend_is_refused():
    with pytest.raises(BadInput):
        recurrent(*inputs(SHAPES[0]), backend="fla")


# ---------------------------------------------------------------------------------------------------------------------
# the layer


@pytest.fixture(scope="module")
def layer():
    config = Qwen3_5MoeTextConfig(
        hidden_size=24,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = Qwen3_5MoeGatedDeltaNet(config, 0).eval()
        for p in layer.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.5)
    return config, layer


@torch.no_grad()
def prefill(config, layer, x):
    """The layer's own forward over whole prompts x (N, T, H): output, recurrent state, the last W - 1 inputs."""
    cache = DynamicCache(config=config)
    name = "cache" if "cache" in inspect.signature(layer.forward).parameters else "cache_params"  # before 5.23
    out, seen = layer(x, **{name: cache}), cache.layers[0]
    return out, seen.recurrent_states[0], seen.conv_states[0][..., -(layer.conv_kernel_size - 1) :]


@torch.no_grad()
def step(layer, x, state, window):
    """The layer's forward over new tokens x (N, T, H) with the functions of delta.py."""
    mixed, windows = conv_steps(layer.in_proj_qkv(x), window, layer.conv1d.weight[:, 0], layer.conv1d.bias)
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    q, k = (y.unflatten(-1, (-1, layer.head_k_dim)) for y in (q, k))
    v, z = (y.unflatten(-1, (-1, layer.head_v_dim)) for y in (v, layer.in_proj_z(x)))
    g = -layer.A_log.exp() * torch.nn.functional.softplus(layer.in_proj_a(x) + layer.dt_bias)
    out, states = recurrent(q, k, v, g, layer.in_proj_b(x).sigmoid(), state)
    out = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(out.view(*x.shape[:2], -1)), states, windows


@pytest.mark.parametrize("prompt", [1, 2, 3, 9])
@pytest.mark.parametrize("drafts", [0, 3])
def test_accepted_prefixes_leave_the_state_of_a_fresh_prefill(layer, prompt, drafts):  # FAULTS 45
    """Whatever the verifier accepts; also without drafts, and with prompts shorter than the convolution."""
    config, layer = layer
    x = torch.randn(2, prompt + drafts + 1, config.hidden_size, generator=torch.Generator().manual_seed(prompt))
    _, state, window = prefill(config, layer, x[:, :prompt])
    out, states, windows = step(layer, x[:, prompt:], state, window)
    whole, _, _ = prefill(config, layer, x)
    assert torch.allclose(out, whole[:, prompt:], atol=5e-5)
    for accepted in range(drafts + 1):
        _, fresh, fresh_window = prefill(config, layer, x[:, : prompt + 1 + accepted])
        assert torch.allclose(states[:, accepted], fresh, atol=5e-5)
        assert torch.allclose(windows[:, accepted], fresh_window, atol=5e-5)


def test_rows_that_accept_different_counts_go_on(layer):  # FAULTS 45
    """Three steps with drafts that are taken back, row by row: outputs are those of the tokens that stayed, alone."""
    config, layer = layer
    g = torch.Generator().manual_seed(5)
    n, k, rows = 3, 3, torch.arange(3)
    prompts = torch.randn(n, 2, config.hidden_size, generator=g)
    kept = [list(row) for row in prompts]
    _, state, window = prefill(config, layer, prompts)
    for accepted in ([0, 3, 1], [2, 0, 1], [1, 1, 3]):
        x = torch.randn(n, k + 1, config.hidden_size, generator=g)
        out, states, windows = step(layer, x, state, window)
        state, window = states[rows, torch.tensor(accepted)], windows[rows, torch.tensor(accepted)]
        for i, a in enumerate(accepted):
            kept[i] += list(x[i, : a + 1])
            whole, fresh, fresh_window = prefill(config, layer, torch.stack(kept[i])[None])
            assert torch.allclose(out[i, : a + 1], whole[0, -(a + 1) :], atol=1e-5)
            assert torch.allclose(state[i], fresh[0], atol=1e-5)
            assert torch.allclose(window[i], fresh_window[0], atol=1e-5)


def test_conv_steps_by_its_definition():
    """With a bias, which the layer has not."""
    x, state, weight = conv_inputs(3, 4)
    bias = torch.arange(5.0)
    out, states = conv_steps(x, state, weight, bias)
    for t in range(4):
        seen = torch.cat([state, x[:, t, :, None]], -1)  # (N, C, W)
        assert torch.allclose(out[:, t], torch.nn.functional.silu((seen * weight).sum(-1) + bias), atol=1e-6)
        state = seen[..., 1:]
        assert torch.equal(states[:, t], state)


# ---------------------------------------------------------------------------------------------------------------------
# the kernel


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def kernel_agrees(shape):
    given = [x.to(DEVICE) for x in inputs(shape, seed=1)]
    want, got = (recurrent(*given, backend=backend) for backend in ("torch", "triton"))
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-5) for a, b in zip(want, got))


def kernel_reads_bf16():
    *tokens, state = (x.to(DEVICE) for x in inputs(SHAPES[0], seed=3))
    half = [x.bfloat16() for x in tokens]
    want, got = (recurrent(*half, state, backend=backend) for backend in ("torch", "triton"))
    assert got[0].dtype == torch.bfloat16 and torch.allclose(want[0].float(), got[0].float(), atol=0.02, rtol=0.01)
    assert torch.allclose(want[1], got[1], atol=1e-5, rtol=1e-5)


def kernel_takes_what_the_engine_gives(monkeypatch):
    """Views of the convolution's output, slices of the buffer: windows that are held, and a step without drafts."""
    found = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr("rows.recurrent", partial(recurrent, backend=backend))
        model, _, tokens = toy("qwen3_5_moe")
        buffer = Buffer(model.to(DEVICE), 3)
        with by_rows(model):
            feed(model, buffer, tokens, [0] * 3, [5] * 3)
            step, held = feed(model, buffer, tokens, [5] * 3, [3, 1, 9], 3, hold=True)
            buffer.commit(step, np.array([2, 1, 0]))
            _, last = feed(model, buffer, tokens, [7, 6, 14], [1] * 3)
        found.append([buffer.delta[:, :3], buffer.conv[:, :3], *held, *last])
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(*found, strict=True))


def test_kernels():
    run_kernels(__file__)


@pytest.mark.skipif(triton is None, reason="the package triton is not installed")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter does not compile")
def test_kernel_compiles(tmp_path, monkeypatch):
    """With the shapes of Qwen3.6-35B-A3B."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("q", "k", "v", "beta", "out"), "*bf16") | dict.fromkeys(("g", "state", "states"), "*fp32")
    types |= {"scale": "fp32", "eps": "fp32"}
    shape = dict(T=4, HK=16, HV=32, DK=128, DV=128, ROWS=128, COLUMNS=room.COLUMNS)
    assert compile_for_a_gpu(room._steps, types, shape).asm["cubin"]
