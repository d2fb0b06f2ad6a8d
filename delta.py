"""The gated delta rule and the convolution before it, with the state after every token: drafts can be taken back.

    S_t = e^{g_t} S_{t-1} + k_t (beta_t (v_t - e^{g_t} S_{t-1}^T k_t))^T      S (Dk, Dv), one per value head
    o_t = S_t^T q_t / sqrt(Dk)                                              q and k have length 1

(Yang et al., Gated Delta Networks, arXiv 2412.06464; the linear-attention layers of Qwen3-Next, 3.5 and 3.6.) Keys and
values forget a rejected draft by their length; a recurrent state has swallowed it. So a speculating step over the last
token and k drafts keeps all k + 1 states, and the verifier's count chooses one: no second pass, neither over the
weights nor over the drafts. rows.py does so for the engine; without drafts T is 1.

    mixed, windows = conv_steps(mixed, window, weight)                      (N, T, C), (N, T, C, W-1)
    out, states = recurrent(q, k, v, g, beta, state)                        (N, T, Hv, Dv), (N, T, Hv, Dk, Dv)
    accepted, tokens, logps = verify(...)                                   T = k + 1: the last token and k drafts
    state, window = states[rows, accepted], windows[rows, accepted]         rows = arange(N)

`recurrent` is a loop in torch or one Triton launch that holds each state in registers over all T tokens: its cost is
the states that it writes, N T Hv Dk Dv fp32 numbers. The default is the kernel on a GPU; as in verify.py it runs on a
CPU in Triton's interpreter. For a few tokens at a time; a prompt wants the chunked form that transformers has.
Left out: gradients, and recomputing states from stored q, k, v, which would save memory for long drafts.
"""

import common  # noqa: F401  before torch: it sets the OpenMP environment
import torch
import torch.nn.functional as F

from options import BadInput

try:
    import triton
    import triton.language as tl
except ImportError:  # it comes with torch's CUDA builds; without a GPU nothing but the tests wants it
    triton = None

EPS = 1e-6  # under the root of the norm of q and k, as in the models
COLUMNS = 32  # of the state per program of the kernel: 128 x 32 fp32 numbers are 32 registers a thread
LAUNCH = dict(num_warps=4, enable_fp_fusion=True)


@torch.inference_mode()
def recurrent(q, k, v, g, beta, state, backend=None):
    """T tokens of N rows through the gated delta rule. -> out (N, T, Hv, Dv) in q's dtype, states (N, T, Hv, Dk, Dv).

    q, k (N, T, Hk, Dk), normalised here; v (N, T, Hv, Dv), Hv a multiple of Hk; g (N, T, Hv) log of the decay;
    beta (N, T, Hv) in [0, 1]; state (N, Hv, Dk, Dv) before the first token, not changed. All maths and states in fp32.
    backend: "torch" or "triton"; None = the kernel on a GPU.
    """
    n, steps, heads, dv = v.shape
    dk = q.shape[-1]
    assert q.shape == k.shape == (n, steps, q.shape[2], dk) and heads % q.shape[2] == 0, "q or k does not fit v"
    assert g.shape == beta.shape == (n, steps, heads) and state.shape == (n, heads, dk, dv), "g, beta or state"
    if backend is None:
        backend = "triton" if v.is_cuda and triton is not None else "torch"
    if backend == "torch":
        return _torch(q, k, v, g, beta, state)
    if backend != "triton":
        raise BadInput(f"recurrent: backend {backend!r}; there are torch and triton")
    if triton is None:
        raise BadInput("recurrent: backend triton, but the package triton is not installed")
    return _triton(q, k, v, g, beta, state)


def conv_steps(x, state, weight, bias=None):
    """Causal depthwise convolution and SiLU over T >= 1 tokens. -> out (N, T, C), states (N, T, C, W-1).

    x (N, T, C); state (N, C, W-1) the inputs just before, zeros before the beginning of a sequence; weight (C, W), bias
    (C,). states[:, t] are the last W-1 inputs up to token t.
    """
    n, _, channels = x.shape
    width = weight.shape[-1]
    assert state.shape == (n, channels, width - 1), f"state {tuple(state.shape)} for a convolution of width {width}"
    inputs = torch.cat([state.to(x.dtype), x.transpose(1, 2)], -1)  # (N, C, W-1+T)
    out = F.silu(F.conv1d(inputs.to(weight.dtype), weight[:, None], bias, groups=channels))
    states = inputs.unfold(-1, width - 1, 1).transpose(1, 2)  # (N, T+1, C, W-1) a view: after 0 .. T tokens
    return out.transpose(1, 2).to(x.dtype), states[:, 1:]


# ---------------------------------------------------------------------------------------------------------------------
# the reference


def _torch(q, k, v, g, beta, state):
    n, steps, heads, _ = v.shape
    dtype, share = q.dtype, heads // q.shape[2]
    q, k = (_unit(x.float()).repeat_interleave(share, dim=2) for x in (q, k))  # (N, T, Hv, Dk)
    q = q / q.shape[-1] ** 0.5
    v, beta, decay, state = v.float(), beta.float(), g.float().exp(), state.float()
    out, states = torch.zeros_like(v), state.new_empty(n, steps, *state.shape[1:])
    for t in range(steps):
        kt = k[:, t, :, :, None]  # (N, Hv, Dk, 1)
        state = state * decay[:, t, :, None, None]  # (N, Hv, Dk, Dv)
        delta = (v[:, t] - (state * kt).sum(-2)) * beta[:, t, :, None]  # (N, Hv, Dv)
        state = state + kt * delta[..., None, :]
        out[:, t], states[:, t] = (state * q[:, t, :, :, None]).sum(-2), state
    return out.to(dtype), states


def _unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


# ---------------------------------------------------------------------------------------------------------------------
# the kernel

if triton is not None:

    @triton.jit
    def _row(x, i, inside, eps):
        """A vector of q or k, of length 1."""
        x = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        return x * tl.rsqrt(tl.sum(x * x, 0) + eps)

    @triton.jit
    def _steps(
        q, k, v, g, beta, state, out, states, scale, eps,
        T: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One program per row, value head and COLUMNS columns of the state, which never need each other."""
        n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        i, j = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        tile = i[:, None] * DV + j[None, :]  # of one (DK, DV) state
        inside = (i[:, None] < DK) & (j[None, :] < DV)
        s = tl.load(state + (n * HV + head) * DK * DV + tile, mask=inside, other=0.0).to(tl.float32)
        for t in range(T):
            at = (n * T + t) * HV + head  # of value heads; a key head serves HV // HK of them
            source = ((n * T + t) * HK + head // (HV // HK)) * DK
            kt, qt = _row(k + source, i, i < DK, eps), _row(q + source, i, i < DK, eps) * scale  # (ROWS,)
            vt = tl.load(v + at * DV + j, mask=j < DV, other=0.0).to(tl.float32)  # (COLUMNS,)
            s *= tl.exp(tl.load(g + at).to(tl.float32))
            delta = (vt - tl.sum(s * kt[:, None], 0)) * tl.load(beta + at).to(tl.float32)
            s += kt[:, None] * delta[None, :]
            tl.store(out + at * DV + j, tl.sum(s * qt[:, None], 0), mask=j < DV)
            tl.store(states + at * DK * DV + tile, s, mask=inside)


def _triton(q, k, v, g, beta, state):
    n, steps, heads, dv = v.shape
    dk = q.shape[-1]
    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    columns = min(COLUMNS, triton.next_power_of_2(dv))
    out = torch.empty(v.shape, dtype=q.dtype, device=v.device)
    states = torch.empty(n, steps, heads, dk, dv, dtype=torch.float32, device=v.device)
    with torch.cuda.device_of(v):
        _steps[n, heads, triton.cdiv(dv, columns)](
            q, k, v, g, beta, state, out, states, dk**-0.5, EPS,
            T=steps, HK=q.shape[2], HV=heads, DK=dk, DV=dv, ROWS=triton.next_power_of_2(dk), COLUMNS=columns, **LAUNCH,
        )  # fmt: skip
    return out, states
