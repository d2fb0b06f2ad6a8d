"""The verifier: how many drafts of a speculating engine stand, and the token that follows them.

    p_i = softmax(logits_i / temperature), then top-k, then top-p     what plain sampling draws from at position i
    q_i = what draft d_i was drawn from                               one-hot where the draft is an argmax
    d_i stands  iff  u_i < a_i,  a_i = p_i(d_i) / q_i(d_i)            and all drafts before it stand
    the first that falls becomes a token of max(p_i - q_i, 0), normalised, by the inverse CDF at (u_i - a_i) / (1 - a_i)
    if none falls, one more token of p_k, by the inverse CDF at u_k
    greedy:  d_i stands  iff  d_i = argmax logits_i

(Leviathan et al. 2023; Chen et al. 2023.) The tokens have the distribution of plain sampling, whatever the drafts are
worth. One uniform number per position is enough: given that u >= a, (u - a) / (1 - a) is uniform again, and no matter
of a. For an argmax draft the whole rule is the inverse CDF over the vocabulary with the draft moved to its front.

    accepted, tokens, logps = verify(logits, drafts, uniforms, temperature=0.8, valid_vocab=codec.vocab_size)

Two paths to the same tokens. The torch path does everything. The Triton kernel does temperature and greedy with argmax
drafts, in two launches, without a softmax buffer and without a sort:

    1  per position and block of ids: max, sum of exp without the draft, argmax       reads each logit once
    2  per sequence, position by position: p(d) from the maxima and sums; at the first that falls, or behind the last,
       choose a block by the inverse CDF over the blocks, then a token inside it      reads the drafts' logits and
                                                                                      that one block again

Both draw by the inverse CDF in the order of ids from the same numbers, so they agree token for token, except where u
stands within float rounding (about 1e-7 of the mass) of a boundary of the CDF or of a, where neither is wrong; of equal
greatest logits both take the first. Top-k, top-p and draft probabilities take the torch path: they need what a block
cannot know, the rank of a token or the total mass. The default is the kernel on a GPU, torch elsewhere; in Triton's
interpreter (TRITON_INTERPRET=1 before the first import) the kernel runs on a CPU, for tests.
`python bench/verifier.py` measures both. Left out: trees of drafts, penalties that depend on the tokens drawn.
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

BLOCK = 4096  # ids per block of the kernel: 61 blocks for 248,320 ids, so that one sequence alone fills a GPU
LAUNCH = dict(num_warps=8, enable_fp_fusion=False)  # fusion: versions of Triton differ in the default


@torch.inference_mode()
def verify(
    logits,
    drafts,
    uniforms,
    *,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    greedy=False,
    valid_vocab=None,
    draft_probs=None,
    backend=None,
):
    """Check k drafts of N sequences. -> accepted (N,) int64, tokens (N, k+1) int64, logps (N, k+1) fp32.

    logits (N, k+1, V): position i follows draft i - 1. drafts (N, k) int64, -1 = none. uniforms (N, k+1) fp32 in
    [0, 1). draft_probs (N, k, V): q of each draft; None = one-hot. valid_vocab: ids from here on are padding of the
    head, never accepted, never drawn. greedy: the likeliest token; temperature, top_p, top_k, draft_probs and uniforms
    then say nothing.
    backend: "torch" or "triton"; None chooses by the device and by what the kernel can do.

    The first accepted + 1 tokens of a row are valid, drafts and what follows them; the rest are -1, with log-prob 0.
    Log-probs are those of p, the distribution of plain sampling; greedy: of softmax(logits), untempered.
    A draft outside the vocabulary, or with q 0, which cannot have been drawn, counts as none: the token comes from p.
    Logits that have no distribution (a NaN, an inf, nothing but -inf) end the row there: token 0 with log-prob NaN.
    Nothing is changed in place; the caller owns all randomness. Raises BadInput for values out of range.
    """
    n, positions, width = logits.shape
    assert drafts.shape == (n, positions - 1), f"{tuple(drafts.shape)} drafts for logits {tuple(logits.shape)}"
    assert uniforms.shape == (n, positions), f"{tuple(uniforms.shape)} uniforms for logits {tuple(logits.shape)}"
    drafts, vocab = drafts.long(), width if valid_vocab is None else valid_vocab
    if not 0 < vocab <= width:
        raise BadInput(f"verify: valid_vocab {vocab} of {width} logits; at least 1 and at most all can be valid")
    if not (greedy or (temperature > 0 and 0 < top_p <= 1 and top_k >= 0)):
        raise BadInput("verify: needs temperature > 0, 0 < top_p <= 1 and top_k >= 0, or greedy")
    one_read = greedy or (top_p == 1 and top_k == 0 and draft_probs is None)
    if backend is None:
        backend = "triton" if logits.is_cuda and triton is not None and one_read else "torch"
    if backend == "torch":
        q = None if greedy else draft_probs
        return _torch(logits[..., :vocab], drafts, uniforms, temperature, top_p, top_k, greedy, q)
    if backend != "triton":
        raise BadInput(f"verify: backend {backend!r}; there are torch and triton")
    if triton is None:
        raise BadInput("verify: backend triton, but the package triton is not installed")
    if not one_read:
        raise BadInput("verify: the Triton kernel knows no top-k, top-p or draft probabilities; backend torch does")
    return _triton(logits, vocab, drafts, uniforms, temperature, greedy)


# ---------------------------------------------------------------------------------------------------------------------
# sampling by the inverse CDF, shared with the engine


def target(logits, temperature=1.0, top_p=1.0, top_k=0):
    """What plain sampling draws from: logits (N, V) -> p (N, K) fp32 and its tokens (N, K), None = the ids 0 .. V-1.

    In the order of Hugging Face: temperature, top-k, then the smallest set of what is left whose mass reaches top_p.
    """
    p, tokens = (logits.float() / temperature).softmax(-1), None  # (N, V)
    if top_k > 0 or top_p < 1:
        p, tokens = _candidates(p, top_p, top_k)  # (N, K) descending
        ahead = p.cumsum(-1) - p  # the mass before each candidate
        p = p.masked_fill(ahead >= top_p, 0)
        p = p / p.sum(-1, keepdim=True)
    return p, tokens


def _candidates(p, top_p, top_k):
    """Probabilities in descending order and their tokens: top_k, renormalised, or enough to hold top_p of the mass."""
    if top_k > 0:
        values, tokens = p.topk(min(top_k, p.shape[-1]), dim=-1)
        return values / values.sum(-1, keepdim=True), tokens
    for k in (128, 1024):  # on a CPU a full sort costs more than a small model does, and few batches need one
        if k < p.shape[-1]:
            values, tokens = p.topk(k, dim=-1)
            if bool((values.sum(-1) >= top_p).all()):
                return values, tokens
    return p.sort(dim=-1, descending=True)


def invert(mass, u):
    """mass (N, K) >= 0, u (N,) in [0, 1) -> min { i : sum_{j <= i} mass_j > u * sum_j mass_j } (N,), < K."""
    cdf = mass.cumsum(-1)
    total = cdf[:, -1:]
    # strictly below the total, to which u * total may round up: what follows the last positive mass is never drawn
    goal = torch.minimum(u[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, goal, right=True).clamp_(max=mass.shape[-1] - 1)[:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# the reference


def _torch(logits, drafts, uniforms, temperature, top_p, top_k, greedy, q):
    n, positions, vocab = logits.shape
    rows = torch.arange(n, device=logits.device)
    real = (drafts >= 0) & (drafts < vocab)  # (N, k)
    d = F.pad(drafts.masked_fill(~real, -1), (0, 1), value=-1)  # (N, k+1), -1 where there is no draft
    if greedy:
        x = logits.float()
        top, best = x.max(-1)  # (N, k+1)
        logps = top - x.logsumexp(-1)
        best = best.masked_fill(logps.isnan(), 0)
        accepted = _leading((d == best) & ~logps.isnan())
        return _result(accepted, d, logps, best[rows, accepted], logps[rows, accepted])

    p, ids = target(logits.flatten(0, 1), temperature, top_p, top_k)  # (N * (k+1), K)
    p = p.view(n, positions, p.shape[-1])
    if ids is None:
        ids = torch.arange(vocab, device=logits.device).expand_as(p)
        p_d = p.gather(-1, d.clamp(min=0)[..., None])[..., 0]  # (N, k+1)
    else:
        ids = ids.view_as(p)
        p_d = torch.where(ids == d[..., None], p, 0).sum(-1)
    a = p_d
    if q is not None:
        q = F.pad(q[..., :vocab].float(), (0, 0, 0, 1))  # (N, k+1, V)
        q_d = q.gather(-1, d.clamp(min=0)[..., None])[..., 0]
        d = d.masked_fill(~(q_d > 0), -1)
        a = p_d / q_d
    a = a.masked_fill(d < 0, 0)
    accepted = _leading(uniforms < a)

    # one position of each sequence is left: the draft that falls there, or the end of the drafts
    p, ids, falls, a, u = (x[rows, accepted] for x in (p, ids, d, a, uniforms))  # (N, K) (N, K) (N,) (N,) (N,)
    falls = falls[:, None]
    if q is None:
        rest = p.masked_fill(ids == falls, 0)
    else:
        rest = torch.where(falls >= 0, (p - q[rows, accepted].gather(-1, ids)).clamp(min=0), p)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p = q up to rounding: nothing is left to draw from
    index = invert(rest, (u - a) / (1 - a))[:, None]
    token, logp = ids.gather(-1, index)[:, 0], p.gather(-1, index)[:, 0].log()
    return _result(accepted, d, p_d.log(), token.masked_fill(logp.isnan(), 0), logp)


def _leading(stands):
    """stands (N, k+1) -> how many stand before the first that falls, of the first k. (N,)"""
    return stands[:, :-1].long().cumprod(-1).sum(-1)


def _result(accepted, drafts, logps, token, logp):
    """The accepted drafts (N, k+1) with their log-probs, then the token (N,) with its own, then nothing."""
    last = accepted[:, None]
    after = torch.arange(drafts.shape[1], device=drafts.device) >= last  # (N, k+1)
    tokens = drafts.masked_fill(after, -1).scatter(1, last, token[:, None])
    return accepted, tokens, logps.masked_fill(after, 0).scatter(1, last, logp[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# the kernel

if triton is not None:

    @triton.jit
    def _draft(drafts, n, t, vocab, K: tl.constexpr):
        """The draft at position t of sequence n, -1 if there is none."""
        draft = tl.load(drafts + n * K + t, mask=t < K, other=-1)
        return tl.where((draft >= 0) & (draft < vocab), draft, -1)

    @triton.jit
    def _scaled(x, temperature, TEMPERED: tl.constexpr):
        x = x.to(tl.float32)
        return tl.div_rn(x, temperature) if TEMPERED else x

    @triton.jit
    def _block(logits, ids, width, vocab, temperature, TEMPERED: tl.constexpr):
        """Padding is loaded and then dropped: the width of a row is a round number, by which loads can be vectors."""
        x = tl.load(logits + ids, mask=ids < width, other=-float("inf"))
        return tl.where(ids < vocab, _scaled(x, temperature, TEMPERED), -float("inf"))

    @triton.jit
    def _partials(
        logits, drafts, tops, rests, firsts, stride_n, stride_t, width, vocab, temperature, blocks,
        K: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Launch 1, one program per position and block: max, sum of exp(x - max) without the draft, argmax."""
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)  # 64 bits: row * V may be beyond 2^31
        n, t = row // (K + 1), row % (K + 1)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = _block(logits + n * stride_n + t * stride_t, ids, width, vocab, temperature, TEMPERED)  # (BLOCK,)
        top = tl.max(x, 0)
        mass = tl.exp(x - tl.where(top == -float("inf"), 0.0, top))  # all -inf: no mass, not NaN
        at = row * blocks + block
        if GREEDY:
            tl.store(firsts + at, tl.min(tl.where(x == top, ids, vocab), 0))
        else:
            mass = tl.where(ids == _draft(drafts, n, t, vocab, K), 0.0, mass)
        tl.store(tops + at, top)
        tl.store(rests + at, tl.sum(mass, 0))

    @triton.jit
    def _pick(mass, ids, goal, none):
        """The first of `ids` where the running sum of mass exceeds goal; if rounding hid it, the last with any mass."""
        found = tl.min(tl.where((tl.cumsum(mass, 0) > goal) & (mass > 0), ids, none), 0)
        return tl.where(found < none, found, tl.max(tl.where(mass > 0, ids, 0), 0))

    @triton.jit
    def _decide(
        logits, drafts, uniforms, tops, rests, firsts, accepted_out, tokens, logps,
        stride_n, stride_t, width, vocab, temperature, blocks,
        K: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ):  # fmt: skip
        """Launch 2, one program per sequence: walk over its positions until a draft falls or there is none."""
        n = tl.program_id(0).to(tl.int64)
        block = tl.arange(0, BLOCKS)  # a power of 2, at least `blocks`
        accepted = 0
        for t in range(K + 1):
            row = n * (K + 1) + t
            token, logp = tl.full((), -1, tl.int64), tl.full((), 0.0, tl.float32)
            if t == accepted:  # all drafts before this one stand
                here = logits + n * stride_n + t * tl.cast(stride_t, tl.int64)  # t is in 32 bits
                draft = _draft(drafts, n, t, vocab, K)
                top = tl.load(tops + row * blocks + block, mask=block < blocks, other=-float("inf"))  # (BLOCKS,)
                rest = tl.load(rests + row * blocks + block, mask=block < blocks, other=0.0)
                most = tl.max(top, 0)
                scale = tl.exp(top - most)
                mass = rest * scale  # of each block, without the draft
                if GREEDY:
                    total = tl.sum(mass, 0)
                    first = tl.load(firsts + row * blocks + block, mask=block < blocks, other=vocab)
                    token = tl.where(total == total, tl.min(tl.where(top == most, first, vocab), 0), 0).to(tl.int64)
                    logp = -tl.log(total)
                    stands = (draft == token) & (total == total)
                else:
                    x_token = tl.load(here + draft, mask=draft >= 0, other=-float("inf"))
                    x_token = _scaled(x_token, temperature, TEMPERED)
                    left = tl.sum(mass, 0)
                    mass_draft = tl.exp(x_token - most)
                    total = left + mass_draft
                    a = tl.div_rn(mass_draft, total)
                    u = tl.load(uniforms + row)
                    stands = u < a  # never where there is no draft, nor with a NaN
                    token = draft
                    if not stands:
                        goal = tl.div_rn(u - a, 1 - a) * left
                        chosen = _pick(mass, block, goal, BLOCKS)
                        ids = chosen * BLOCK + tl.arange(0, BLOCK)
                        x = _block(here, ids, width, vocab, temperature, TEMPERED)  # (BLOCK,)
                        # from here on in units of the block's own max, as the sums of launch 1: no underflow
                        unit = tl.max(tl.where(block == chosen, top, -float("inf")), 0)
                        goal = tl.div_rn(goal - tl.sum(tl.where(block < chosen, mass, 0.0), 0), tl.exp(unit - most))
                        drawn = _pick(tl.where(ids == draft, 0.0, tl.exp(x - unit)), ids, goal, vocab)
                        if left > 0:  # else all mass is the draft's, or there is a NaN
                            token = drawn.to(tl.int64)
                            x_token = tl.max(tl.where(ids == drawn, x, -float("inf")), 0)
                    logp = x_token - most - tl.log(total)
                    token = tl.where(total == total, token, 0)
                accepted += stands.to(tl.int32)
            tl.store(tokens + row, token)
            tl.store(logps + row, logp)
        tl.store(accepted_out + n, accepted.to(tl.int64))


def _triton(logits, vocab, drafts, uniforms, temperature, greedy):
    n, positions, width = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    block = min(BLOCK, max(16, triton.next_power_of_2(vocab)))
    blocks, rows = triton.cdiv(vocab, block), n * positions
    drafts, uniforms = drafts.contiguous(), uniforms.contiguous()
    tops, rests = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    firsts = torch.empty(rows if greedy else 0, blocks, dtype=torch.int32, device=logits.device)
    accepted = torch.empty(n, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(n, positions, dtype=torch.int64, device=logits.device)
    logps = torch.empty(n, positions, dtype=torch.float32, device=logits.device)
    shape = (logits.stride(0), logits.stride(1), width, vocab, float(temperature), blocks)
    flags = dict(K=positions - 1, GREEDY=bool(greedy), TEMPERED=temperature != 1 and not greedy, BLOCK=block)
    with torch.cuda.device_of(logits):
        partials = (tops, rests, firsts)
        _partials[rows, blocks](logits, drafts, *partials, *shape, **flags, **LAUNCH)
        _decide[(n,)](
            logits, drafts, uniforms, *partials, accepted, tokens, logps, *shape,
            **flags, BLOCKS=triton.next_power_of_2(blocks), **LAUNCH,
        )  # fmt: skip
    return accepted, tokens, logps
