"""The verifier against exact distributions, and its kernel against the torch path, token for token."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import common  # noqa: F401  before torch
import pytest
import torch

import verify as room
from options import BadInput
from infer import argmax, sample
from verify import triton, verify

KINDS = [
    dict(),
    dict(temperature=0.6),
    dict(temperature=1.5, top_k=4),
    dict(top_p=0.8),
    dict(temperature=0.8, top_k=6, top_p=0.7),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def noise(seed):
    return torch.Generator().manual_seed(seed)


def grid(points):
    """Midpoints of equal parts of [0, 1): a mean over them is an integral over u, up to 1 / points per step."""
    return (torch.arange(points) + 0.5) / points


def plain(logits, temperature=1.0, top_p=1.0, top_k=0):
    """The distribution of plain sampling by its definition, token by token in double precision. (V,) -> (V,)"""
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)[: top_k or None]
    kept, ahead = torch.zeros_like(p), 0.0
    for token in order:
        if ahead < top_p:
            kept[token] = p[token]
        ahead += p[token] / p[order].sum()
    return kept / kept.sum()


def shares(tokens, vocab):
    return torch.bincount(tokens, minlength=vocab).double() / len(tokens)


def repeat(n, *tensors):
    return [x.expand(n, *x.shape) for x in tensors]


def random_case(seed, n, k, vocab, scale=2.0):
    """Logits, drafts that often stand, and uniforms."""
    g = noise(seed)
    logits = torch.randn(n, k + 1, vocab, generator=g) * scale
    drafts = torch.multinomial((logits[:, :-1] * 1.5).softmax(-1).reshape(-1, vocab), 1, generator=g).view(n, k)
    return logits, drafts, torch.rand(n, k + 1, generator=g)


def ragged(drafts, vocab):
    """Rows with 0, 1, .. k drafts in turn, an id outside the vocabulary behind them, and how many each row has."""
    n, k = drafts.shape
    row, none = torch.arange(n), torch.tensor([-1, vocab, -9, 1 << 40])
    counts = row % (k + 1)
    missing = none[row // (k + 1) % len(none), None]
    return torch.where(torch.arange(k) == counts[:, None], missing, drafts), counts


# ---------------------------------------------------------------------------------------------------------------------
# the distribution, exactly


@each_kind
def test_a_draft_changes_nothing_in_the_distribution(kind):
    """Whatever the draft, the first token integrates to p and the draft stands with probability p(d)."""
    vocab, points = 7, 20_000
    logits = torch.randn(2, vocab, generator=noise(1)) * 1.5
    want = plain(logits[0], **kind)
    u = torch.stack([grid(points), torch.full((points,), 0.5)], -1)
    for draft in range(vocab):
        accepted, tokens, _ = verify(*repeat(points, logits, torch.tensor([draft])), u, **kind)
        assert (shares(tokens[:, 0], vocab) - want).abs().max() < 3 / points
        assert abs(accepted.double().mean() - want[draft]) < 2 / points
        assert (tokens[accepted == 0, 0] != draft).all()


@each_kind
def test_sequences_have_the_probability_of_plain_sampling(kind):
    """Over a grid of (u_0, u_1): a first token other than the draft ends the row, else the second is drawn from p_1."""
    vocab, side = 5, 200
    logits, draft = torch.randn(2, vocab, generator=noise(2)), 3
    first, second = plain(logits[0], **kind), plain(logits[1], **kind)
    u = torch.cartesian_prod(grid(side), grid(side))
    accepted, tokens, logps = verify(*repeat(len(u), logits, torch.tensor([draft])), u, **kind)
    for v in range(vocab):
        if v != draft:
            row = (tokens == torch.tensor([v, -1])).all(-1)
            assert abs(row.double().mean() - first[v]) < 2 / side
        row = (tokens == torch.tensor([draft, v])).all(-1)
        assert abs(row.double().mean() - first[draft] * second[v]) < 2 / side
    assert torch.allclose(logps[:, 0].double(), first[tokens[:, 0]].log(), atol=1e-5)
    both = accepted == 1
    assert torch.allclose(logps[both, 1].double(), second[tokens[both, 1]].log(), atol=1e-5)
    assert (tokens[~both, 1] == -1).all() and (logps[~both, 1] == 0).all()


@each_kind
def test_drafts_drawn_from_a_distribution(kind):
    """Over drafts from q and a grid of u: the token has distribution p, and a share sum min(p, q) of drafts stands."""
    vocab, points = 6, 20_000
    logits = torch.randn(2, vocab, generator=noise(3)) * 1.5
    q = (torch.randn(1, vocab, generator=noise(4)) * 1.5).softmax(-1)
    want, u = plain(logits[0], **kind), torch.stack([grid(points), grid(points)], -1)
    got, stands = torch.zeros(vocab).double(), 0.0
    for draft in range(vocab):
        rows = repeat(points, logits, torch.tensor([draft]))
        accepted, tokens, _ = verify(*rows, u, draft_probs=q.expand(points, 1, vocab), **kind)
        got += q[0, draft].double() * shares(tokens[:, 0], vocab)
        stands += q[0, draft].double() * accepted.double().mean()
    assert (got - want).abs().max() < 5 / points
    assert abs(stands - torch.minimum(want, q[0].double()).sum()) < 2 / points


@each_kind
@pytest.mark.parametrize("drawn", [False, True], ids=["argmax drafts", "drawn drafts"])
def test_twenty_thousand_draws(kind, drawn):  # FAULTS 44
    """Chi-square over the pairs that two positions give, with random drafts and padded ids."""
    n, vocab, valid = 20_000, 8, 6
    logits = torch.randn(3, vocab, generator=noise(5))
    logits[:, valid:] += 50
    q = torch.randn(2, vocab, generator=noise(6)).index_fill(-1, torch.arange(valid, vocab), -torch.inf).softmax(-1)
    drafts = torch.multinomial(q, n, replacement=True, generator=noise(7)).T if drawn else q.argmax(-1).expand(n, 2)
    q = q.expand(n, 2, vocab) if drawn else None
    u, more = (torch.rand(n, 3, generator=noise(seed)) for seed in (8, 9))
    _, tokens, _ = verify(logits.expand(n, 3, vocab), drafts, u, draft_probs=q, valid_vocab=valid, **kind)
    assert tokens.max() < valid
    # a row that ended at its first token goes on as an engine would: without drafts
    rest = verify(logits[1:2].expand(n, 1, vocab), drafts[:, :0], more[:, :1], valid_vocab=valid, **kind)[1][:, 0]
    second = torch.where(tokens[:, 1] < 0, rest, tokens[:, 1])
    first, then = (plain(x[:valid], **kind) for x in logits[:2])
    want = (first[:, None] * then).flatten() * n  # pairs are independent: logits do not depend on the draft here
    got = torch.bincount(tokens[:, 0] * valid + second, minlength=valid**2).double()
    assert got[want == 0].sum() == 0
    got, want = got[want > 0], want[want > 0]
    chi2, freedom = ((got - want) ** 2 / want).sum(), len(want) - 1
    assert torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), chi2 / 2) > 0.01


@each_kind
def test_without_drafts_it_is_plain_sampling_bit_for_bit(kind):  # FAULTS 45
    logits, drafts, u = random_case(10, 200, 2, 300)
    token, logp = sample(logits[:, 0], u[:, 0], **kind)
    for got in (
        verify(logits[:, :1], drafts[:, :0], u[:, :1], **kind),
        verify(logits, torch.full_like(drafts, -1), u, **kind),
        verify(logits, torch.full_like(drafts, 300), u, **kind),
    ):
        assert (got[0] == 0).all() and torch.equal(got[1][:, 0], token) and torch.equal(got[2][:, 0], logp)
        assert (got[1][:, 1:] == -1).all() and (got[2][:, 1:] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# greedy


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_greedy_stands_as_far_as_the_argmax(k):  # FAULTS 44
    """Half of the drafts are right, and those that are not are the second best: the nearest one can be and be wrong."""
    logits, _, u = random_case(11, 300, k, 50)
    best, logp = argmax(logits)
    second = logits.topk(2).indices[..., 1]
    right = torch.rand(300, k, generator=noise(12)) < 0.5
    drafts = torch.where(right, best[:, :k], second[:, :k])
    accepted, tokens, logps = verify(
        logits, drafts, u, greedy=True, temperature=0.0
    )  # no temperature, as its name says
    for i in range(300):
        count = next((t for t in range(k) if not right[i, t]), k)
        assert accepted[i] == count
        assert tokens[i].tolist() == best[i, : count + 1].tolist() + [-1] * (k - count)
        assert torch.equal(logps[i, : count + 1], logp[i, : count + 1]) and (logps[i, count + 1 :] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# edges


@each_kind
def test_rows_with_fewer_drafts(kind):
    """A row some of whose drafts are missing is that row alone with fewer drafts."""
    logits, drafts, u = random_case(13, 60, 3, 20)
    drafts, counts = ragged(drafts, 20)
    batch = verify(logits, drafts, u, **kind)
    for i, count in enumerate(counts.tolist()):
        row = (x[i : i + 1] for x in (logits[:, : count + 1], drafts[:, :count], u[:, : count + 1]))
        accepted, tokens, logps = verify(*row, **kind)
        assert accepted[0] == batch[0][i] and torch.equal(tokens[0], batch[1][i, : count + 1])
        assert torch.allclose(logps[0], batch[2][i, : count + 1], atol=1e-6)
        assert (batch[1][i, count + 1 :] == -1).all()


def test_strictly_less():  # FAULTS 46
    quarter = torch.tensor([0.25])
    for u, stands in ((quarter, 0), (quarter.nextafter(torch.zeros(1)), 1), (quarter.nextafter(torch.ones(1)), 0)):
        u = torch.cat([u, quarter])[None]
        assert verify(torch.zeros(1, 2, 4), torch.tensor([[2]]), u)[0] == stands
        q = torch.full((1, 1, 4), 0.5)  # p / q = 1 / 2: twice as far
        assert verify(torch.zeros(1, 2, 4), torch.tensor([[2]]), 2 * u, draft_probs=q)[0] == stands


def test_nothing_impossible_stands_or_is_drawn():  # FAULTS 46
    """p(d) = 0 at u = 0 is a rejection: -inf logits, drafts outside top-k or top-p, ids outside the vocabulary."""
    logits = torch.tensor([3.0, -torch.inf, 1.0, 2.0]).expand(1, 2, 4)
    u = torch.zeros(1, 2)
    for draft, kind in [(1, {}), (2, dict(top_k=2)), (2, dict(top_p=0.8)), (-1, {}), (-9, {}), (4, {}), (99, {})]:
        accepted, tokens, _ = verify(logits, torch.tensor([[draft]]), u, **kind)
        assert accepted == 0 and tokens.tolist() == [[0, -1]]
        accepted, tokens, _ = verify(logits, torch.tensor([[draft]]), u, greedy=True)
        assert accepted == 0 and tokens.tolist() == [[0, -1]]
    top = 1 - 2.0**-24  # the largest u there is
    for kind in KINDS:
        for draft in range(4):
            tokens = verify(logits, torch.tensor([[draft]]), torch.full((1, 2), top), **kind)[1]
            assert tokens[0, 0] in (0, 2, 3), (kind, draft)


def test_a_draft_that_q_rules_out_counts_as_none():  # FAULTS 46
    logits, u = torch.zeros(1, 2, 4), torch.tensor([[0.3, 0.0]])
    for q in ([0.0, 0.5, 0.25, 0.25], [float("nan"), 0.5, 0.25, 0.25]):
        accepted, tokens, _ = verify(logits, torch.tensor([[0]]), u, draft_probs=torch.tensor([[q]]))
        assert accepted == 0 and tokens[0, 0] == 1  # u = 0.3 over four tokens of p = 1/4


def test_p_equal_to_q():
    """Every draft stands. Where rounding rejects one all the same, nothing is left of p - q, and the token is p's."""
    logits, drafts, u = random_case(14, 500, 2, 30)
    logits[..., -1] = -torch.inf
    drafts = drafts.clamp(max=28)
    q = logits[:, :-1].softmax(-1)
    assert (verify(logits, drafts, u, draft_probs=q)[0] == 2).all()
    u = torch.full_like(u, 1 - 2.0**-24)
    accepted, tokens, logps = verify(logits, drafts, u, draft_probs=q * (1 + 1e-6))
    assert (accepted == 0).all() and (tokens[:, 0] >= 0).all() and logps[:, 0].isfinite().all()


def bad_rows():
    nan, inf = float("nan"), float("inf")
    rows = torch.zeros(6, 3, 5)
    rows[0, 0, 2] = nan
    rows[1, 1] = nan
    rows[2, 0] = -inf
    rows[3, 1, 1] = inf
    rows[4, 2, 4] = nan
    rows[5, 0, :4] = -inf  # this one is sound: all mass on id 4
    drafts = torch.tensor([[2, 0], [0, 1], [0, 0], [0, 1], [0, 0], [4, 0]])
    return rows, drafts, torch.full((6, 3), 0.1)


@pytest.mark.parametrize("kind", [*KINDS, dict(greedy=True)], ids=str)
def test_rows_without_a_distribution_end_there(kind):  # FAULTS 46
    """Token 0 with a NaN log-prob, at the bad position and no other; rows beside it do not notice."""
    accepted, tokens, logps = verify(*bad_rows(), **kind)
    assert accepted.tolist() == [0, 1, 0, 1, 2, 2]
    assert tokens[:5].tolist() == [[0, -1, -1], [0, 0, -1], [0, -1, -1], [0, 0, -1], [0, 0, 0]]
    assert tokens[5, 0] == 4
    assert logps.isnan().tolist() == [[t == a and i < 5 for t in range(3)] for i, a in enumerate(accepted)]


@pytest.mark.parametrize("kind", [*KINDS, dict(greedy=True)], ids=str)
def test_padded_ids_do_not_exist(kind):  # FAULTS 47
    logits, drafts, u = random_case(15, 300, 2, 20)
    padded = torch.cat([logits, torch.full((300, 3, 4), 50.0)], -1)
    want, got = verify(logits, drafts, u, **kind), verify(padded, drafts, u, valid_vocab=20, **kind)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert (verify(padded, torch.full_like(drafts, 21), u, valid_vocab=20, **kind)[0] == 0).all()


def test_bf16_logits_are_read_in_fp32():
    logits, drafts, u = random_case(16, 100, 2, 40)
    half = logits.bfloat16()
    for kind in (*KINDS, dict(greedy=True)):
        for a, b in zip(verify(half, drafts, u, **kind), verify(half.float(), drafts, u, **kind)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [*KINDS, dict(greedy=True)], ids=str)
def test_inputs_and_global_randomness_stay_as_they_were(kind):  # FAULTS 48
    logits, drafts, u = random_case(17, 20, 3, 30)
    case, q = (logits, ragged(drafts, 30)[0], u), logits[:, :-1].softmax(-1)
    before, state = [x.clone() for x in (*case, q)], torch.get_rng_state()
    once, again = (verify(*case, draft_probs=q, **kind) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(before, (*case, q)))
    assert all(torch.equal(a, b) for a, b in zip(once, again)) and torch.equal(state, torch.get_rng_state())


def test_an_empty_batch():
    logits, drafts, u = random_case(18, 0, 2, 8)
    for kind in (*KINDS, dict(greedy=True)):
        accepted, tokens, logps = verify(logits, drafts, u, **kind)
        assert accepted.shape == (0,) and tokens.shape == logps.shape == (0, 3)


def test_bad_values_are_refused():
    logits, drafts, u = random_case(18, 2, 1, 8)
    for kind in (dict(temperature=0.0), dict(top_p=0.0), dict(top_p=1.1), dict(top_k=-1), dict(valid_vocab=9),
                 dict(valid_vocab=0), dict(backend="cuda"), dict(backend="triton", top_k=3),
                 dict(backend="triton", top_p=0.5), dict(backend="triton", draft_probs=logits[:, :1])):  # fmt: skip
        with pytest.raises(BadInput):
            verify(logits, drafts, u, **kind)
    with pytest.raises(AssertionError):
        verify(logits, drafts, u[:, :1])


# ---------------------------------------------------------------------------------------------------------------------
# the kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


CASES = int(os.environ.get("VERIFY_CASES", 200))  # of one or two tokens each


def both(logits, drafts, u, **kind):
    on = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in (logits, drafts, u)]
    kind = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in kind.items()}
    return [[x.cpu() for x in verify(*on, **kind, backend=backend)] for backend in ("torch", "triton")]


def same(logits, drafts, u, **kind):
    """The kernel and the torch path agree in every token; log-probs up to rounding."""
    (accepted, tokens, logps), kernel = both(logits, drafts, u, **kind)
    assert torch.equal(kernel[0], accepted)
    assert torch.equal(kernel[1], tokens)
    assert torch.allclose(kernel[2], logps, atol=2e-6, equal_nan=True)
    return accepted, tokens, logps


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(room, "BLOCK", 32)


@pytest.mark.parametrize("kind", [dict(), dict(temperature=0.7), dict(greedy=True), dict(valid_vocab=41)])
def kernel_agrees_token_for_token(kind, small_blocks):  # FAULTS 47: 50 and 41 ids, blocks of 32
    n = CASES // 5
    logits, drafts, u = random_case(20, n, 1, 50)
    accepted, _, _ = same(logits, drafts, u, **kind)
    assert 0.05 < accepted.double().mean() < 0.95


def kernel_walks_over_many_drafts_and_blocks(small_blocks):
    logits, drafts, u = random_case(21, 6, 3, 130, scale=4.0)
    for dtype in (torch.float32, torch.bfloat16):
        accepted, _, _ = same(logits.to(dtype), drafts, u, temperature=0.9)
        assert len(set(accepted.tolist())) >= 3
    padded = torch.cat([logits, torch.full((6, 4, 62), 50.0)], -1)  # two whole blocks of padding
    assert same(padded, drafts, u, valid_vocab=130)[1].max() < 130
    assert same(padded, drafts, u, valid_vocab=130, greedy=True)[1].max() < 130
    same(logits.transpose(0, 1).contiguous().transpose(0, 1), drafts, u)  # rows far apart
    same(logits.transpose(1, 2).contiguous().transpose(1, 2), drafts, u)  # ids far apart
    same(logits[:, :1], drafts[:, :0], u[:, :1])
    same(logits[:0], drafts[:0], u[:0])


@pytest.mark.parametrize("kind", [dict(temperature=1.4), dict(greedy=True)])
def kernel_knows_rows_with_fewer_drafts(kind, small_blocks):
    """All that are there stand, for u is 0 and each is the likeliest: how many there are decides alone."""
    logits, _, u = random_case(25, 12, 2, 50)
    drafts, counts = ragged(logits[:, :-1].argmax(-1), 50)
    assert torch.equal(same(logits, drafts, u * 0, **kind)[0], counts)
    same(logits, drafts, u, **kind)


def kernel_takes_the_first_of_equal_logits(small_blocks):
    """In bf16 the greatest two are often equal: which one is taken must not depend on the block."""
    logits = torch.randint(0, 3, (10, 2, 100), generator=noise(22)).bfloat16()
    first = torch.tensor([[row.tolist().index(row.max()) for row in x] for x in logits])
    accepted, tokens, _ = same(logits, first[:, :1], torch.zeros(10, 2), greedy=True)
    assert (accepted == 1).all() and torch.equal(tokens, first)


def kernel_stands_at_the_edges(small_blocks):  # FAULTS 46
    rows, drafts, u = bad_rows()
    wide = torch.cat([rows, torch.full((6, 3, 60), -torch.inf)], -1)  # a block without any mass
    for logits in (rows, wide):
        same(logits, drafts, u)
        same(logits, drafts, u, greedy=True)
    alone = torch.full((1, 2, 70), -torch.inf)
    alone[..., 40] = 3.0
    for value in (0.0, 0.5, 1 - 2.0**-24):
        u = torch.full((1, 2), value)
        for draft in (40, 39, -1, 1 << 40):
            assert same(alone, torch.tensor([[draft]]), u)[1][0, 0] == 40
    quarter = torch.full((1, 2), 0.25)
    assert same(torch.zeros(1, 2, 4), torch.tensor([[2]]), quarter)[0] == 0
    assert same(torch.zeros(1, 2, 4), torch.tensor([[2]]), quarter.nextafter(torch.zeros(1)))[0] == 1
    far = torch.zeros(1, 1, 64)
    far[..., 32:] = -110.0  # exp underflows against the other block's max, and not against its own
    assert same(far, torch.zeros(1, 0).long(), torch.tensor([[1 - 2.0**-24]]))[1][0, 0] == 31


def kernel_integrates_to_p():
    """Its own check against the definition, not by way of the torch path."""
    logits, points = torch.randn(2, 5, generator=noise(23)), 100
    u = torch.stack([grid(points), grid(points)], -1).to(DEVICE)
    rows = [x.to(DEVICE) for x in repeat(points, logits, torch.tensor([1]))]
    _, tokens, logps = (x.cpu() for x in verify(*rows, u, temperature=1.3, backend="triton"))
    want = plain(logits[0], 1.3)
    assert (shares(tokens[:, 0], 5) - want).abs().max() < 3 / points
    assert torch.allclose(logps[:, 0].double(), want[tokens[:, 0]].log(), atol=1e-5)


def kernel_reads_rows_beyond_two_billion_elements(tmp_path):  # FAULTS 47
    """The stride fits into 32 bits; twice the stride, where the third sequence or position begins, does not."""
    stride, vocab = 2**30 + 32, 40
    size, options = 2 * stride + vocab, dict(dtype=torch.bfloat16)
    if DEVICE == "cpu":  # a sparse file stands in for memory
        flat = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, **options)
    else:
        flat = torch.zeros(size, device=DEVICE, **options)
    flat[2 * stride + 7] = 20.0
    u = torch.tensor([[0.5], [0.5], [0.5]], device=DEVICE)
    sequences = flat.as_strided((3, 1, vocab), (stride, vocab, 1))
    drafts = torch.zeros(3, 0, dtype=torch.int64, device=DEVICE)
    assert verify(sequences, drafts, u, backend="triton")[1].tolist() == [[20], [20], [7]]
    positions, u = sequences.transpose(0, 1), torch.tensor([[0.0, 0.0, 0.5]], device=DEVICE)
    drafts = torch.tensor([[3, 4]], device=DEVICE)
    assert verify(positions, drafts, u, backend="triton")[1].tolist() == [[3, 4, 7]]


def kernel_reads_a_whole_vocabulary():
    """248,320 ids, 276 of them padding. u stands in the middle of its token, where no rounding can matter."""
    vocab = 248_320
    logits = torch.randn(1, 2, vocab, generator=noise(24)).bfloat16()
    logits[:, :, -276:] = 50.0
    cdf = logits[0, 0, :-276].double().softmax(-1).cumsum(-1)
    token = 123_456
    u = torch.tensor([[float(cdf[token - 1] + cdf[token]) / 2, 0.0]])
    tokens = both(logits, torch.tensor([[vocab - 1]]), u, valid_vocab=vocab - 276)[1][1]
    assert abs(tokens[0, 0] - token) <= 1 and tokens[0, 1] == -1


if os.environ.get("TRITON_INTERPRET") == "1" and triton is not None:
    # The interpreter patches its language anew at each call of a device function, and undoes it after each launch:
    # two thirds of its time. In a process of its own once is enough.
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._LangPatchScope.restore = lambda self: None
        interpreter._patch_lang = functools.cache(interpreter._patch_lang)


def run_kernels(path):
    """The functions kernel_* of a test file, in a process of their own: without a GPU Triton must be told to interpret,
    before anything imports it.
    """
    if triton is None:
        pytest.skip("the package triton is not installed")
    env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-o", "python_functions=kernel_*", path]
    done = subprocess.run(command, cwd=Path(path).parent.parent, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels():
    run_kernels(__file__)


def compile_for_a_gpu(kernel, types, constants):
    """Through Triton and ptxas for compute capability 9.0; needs no GPU. What the interpreter lets pass ends here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=room.LAUNCH)


@pytest.mark.skipif(triton is None, reason="the package triton is not installed")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter does not compile")
@pytest.mark.parametrize("greedy", [False, True])
def test_kernels_compile(greedy, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("drafts", "tokens", "accepted_out"), "*i64") | {"logits": "*bf16"}
    types |= dict.fromkeys(("uniforms", "tops", "rests", "logps"), "*fp32") | {"firsts": "*i32", "temperature": "fp32"}
    flags = dict(K=3, GREEDY=greedy, TEMPERED=not greedy, BLOCK=4096)
    assert compile_for_a_gpu(room._partials, types, flags).asm["cubin"]
    assert compile_for_a_gpu(room._decide, types, flags | {"BLOCKS": 64}).asm["cubin"]
