"""Speculation is lossless: same greedy tokens, same distribution, same log-probs, whatever the drafts are."""

import copy
import random
from collections import Counter
from itertools import pairwise

import common  # noqa: F401  before torch
import numpy as np
import pytest
import torch
from torch import nn

import infer
from chat import Turn
from model import MTP, create, pad_batch, token_logps
from test_infer import WORDS, loop, loops, of_family, prompts, sharpen, tokens_of, toy_tokenizer


class Engine(infer.Engine):
    """Three drafts unless told otherwise, which change nothing for a policy without a head."""

    def __init__(self, policy, drafts=3, **options):
        super().__init__(policy, drafts=drafts, **options)


pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay")

EOS = WORDS + 1
FAMILIES = ["qwen3", "qwen3_5_moe"]

# ---------------------------------------------------------------------------------------------------------------------
# MTP heads: an untrained one with the real thing's parts, and some that need none


class Untrained(MTP):
    """A new head of the model's own kind, large enough to have an opinion."""

    def __init__(self, model, seed=0):
        super().__init__(model, seed)
        sharpen(self)


class Says(nn.Module):
    """`rule(position, token) -> token` says what follows a token that stands at a position."""

    def __init__(self, model, rule):
        super().__init__()
        self.rule, rows = rule, model.get_output_embeddings().weight.detach()[: WORDS + 5]
        self.said = rows / rows.norm(dim=-1, keepdim=True)
        assert (self.said @ rows.T).argmax(-1)[: EOS + 1].tolist() == list(range(EOS + 1))

    def forward(self, model, ids, hidden, position_ids, **attention):
        said = [self.rule(p + 1, t) for p, t in zip(position_ids[0].tolist(), ids[0].tolist(), strict=True)]
        return self.said[said][None].to(hidden.dtype)


class Worst(nn.Module):
    """The token that the model finds least likely."""

    def forward(self, model, ids, hidden, position_ids, **attention):
        return -hidden


class Broken(nn.Module):
    def forward(self, model, ids, hidden, position_ids, **attention):
        return torch.full_like(hidden, float("nan"))


def knows(model, sequences):
    """A head that looks up what comes next in the sequences it was told."""
    table = {(p, a): b for ids in sequences for p, (a, b) in enumerate(pairwise(ids))}
    return Says(model, lambda p, token: table.get((p, token), 0))


def heads(model, sequences):
    return {
        "knows": knows(model, sequences),
        "untrained": Untrained(model),
        "worst": Worst(),
        "broken": Broken(),
        "eos": Says(model, lambda p, token: EOS),
        "half": Says(model, lambda p, token: dict(enumerate(sequences[p % len(sequences)])).get(p + 1, 0)),
    }


@pytest.fixture(scope="module", params=FAMILIES)
def told(request):
    """A policy, and what a greedy run of eight loops says without drafts."""
    policy = of_family(request.param)
    return policy, Engine(policy, slots=8, context=256).run(loops(8), list(range(8)), greedy=True)


# ---------------------------------------------------------------------------------------------------------------------
# greedy


GRID = [(1, 1), (1, 8), (2, 4), (2, 7), (3, 1), (3, 3), (3, 8), (4, 2), (4, 6), (5, 5), (5, 8), (6, 4)]  # drafts, slots


@pytest.mark.parametrize("kind", ["knows", "untrained", "worst", "broken", "eos", "half"])
def test_greedy_with_drafts_is_plain_greedy(told, kind):  # FAULTS 44, 45, 49
    policy, want = told
    policy.mtp = heads(policy.model, tokens_of(want))[kind]
    some = {"knows": GRID, "untrained": GRID[::4], "worst": GRID[1::6]}
    for drafts, slots in some.get(kind, [(3, 8), (5, 4)]):
        engine = Engine(policy, slots=slots, context=256, drafts=drafts)
        got = engine.run(loops(8), list(range(8)), greedy=True)
        assert tokens_of(got) == tokens_of(want), (drafts, slots)
        assert [r[3] for r in got] == [r[3] for r in want]
        for a, b in zip(got, want, strict=True):
            assert np.allclose(a[2], b[2], atol=1e-4)
        if kind == "knows":
            assert engine.stats["draft_acceptance"] > 0.8
            assert (drafts, slots) != (3, 1) or engine.stats["steps"] < 0.45 * engine.stats["sampled"]
        if kind in ("worst", "broken"):
            assert engine.stats["draft_acceptance"] < 0.1


@pytest.mark.parametrize("limit,context", [(1, 256), (2, 256), (3, 256), (12, 70)])
def test_limits_inside_a_block(told, limit, context):  # FAULTS 49
    policy, _ = told
    policy.mtp = None
    agents = [loop(p, 6, i, new=limit) for i, p in enumerate(prompts(6))]
    want = Engine(policy, slots=6, context=context).run(agents, list(range(6)), greedy=True)
    policy.mtp = knows(policy.model, tokens_of(want))
    engine = Engine(policy, slots=6, context=context, drafts=3)
    got = engine.run([loop(p, 6, i, new=limit) for i, p in enumerate(prompts(6))], list(range(6)), greedy=True)
    assert tokens_of(got) == tokens_of(want) and [r[3] for r in got] == [r[3] for r in want]
    assert engine.stats["drafted"] == 0 if limit < 3 else engine.stats["drafted"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# what the head sees


class Recorded(Engine):
    """Keeps the context and the drafts after each step."""

    def _draft(self, *step):
        super()._draft(*step)
        self.seen += [(self.tokens[r.slot, : r.length + r.drafts].copy(), r.drafts) for r in self.rows if r.drafts]


@torch.no_grad()
def guesses(policy, context, k):
    """What the head says after `context` (T,), from scratch: it reads true hidden states, then its own."""
    model, follow = policy.model, torch.from_numpy(context)[None]
    hidden = model.base_model(follow[:, :-1], use_cache=False).last_hidden_state
    follow = follow[:, 1:]
    for _ in range(k):
        g = policy.mtp(model, follow, hidden, position_ids=torch.arange(follow.shape[1])[None])
        token = model.get_output_embeddings()(g[:, -1:])[..., : policy.codec.vocab_size].argmax(-1)
        follow, hidden = torch.cat([follow, token], dim=1), torch.cat([hidden, g[:, -1:]], dim=1)
    return follow[0, -k:].tolist()


class Both(Untrained):
    """Untrained, but at every third place it looks up what comes next: now and then drafts are right."""

    def forward(self, model, ids, hidden, position_ids, **attention):
        g = super().forward(model, ids, hidden, position_ids=position_ids, **attention)
        return torch.where((position_ids % 3 == 0)[..., None], self.book(model, ids, hidden, position_ids), g)


@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_the_head_reads_true_hidden_states_of_the_whole_context(family, monkeypatch):
    """Over turns, copied prefixes, reused slots and accepted drafts, its keys are those of a fresh pass."""
    monkeypatch.setattr("infer.PAUSE", 8)
    policy = of_family(family)
    want = Engine(policy, slots=9, context=256).run(loops(9, turns=2), list(range(9)), greedy=True)
    policy.mtp = Both(policy.model)
    policy.mtp.book = knows(policy.model, tokens_of(want))
    afresh = copy.deepcopy(policy)
    engine = Recorded(policy, slots=4, context=256, drafts=3)
    engine.seen = []
    got = engine.run(loops(9, turns=2), list(range(9)), greedy=True)
    assert tokens_of(got) == tokens_of(want)
    assert engine.stats["reused"] > 100 and sum(engine.stats["accepted"][1:]) > 20
    assert len(engine.seen) > 80
    for context, k in engine.seen[::3]:
        assert guesses(afresh, context[:-k], k) == context[-k:].tolist()


def test_an_engine_drafts_with_the_weights_of_now():  # FAULTS 40
    """After an update of model and head the same engine drafts as a new one would."""
    policy = of_family("qwen3")
    policy.mtp = Untrained(policy.model)

    def drafted(engine):
        engine.seen = []
        engine.run(loops(4, turns=1), list(range(4)), greedy=True)
        return [context.tolist() for context, _ in engine.seen]

    engine = Recorded(policy, slots=4, context=256)
    before = drafted(engine)
    with torch.no_grad():
        for p in policy.mtp.parameters():
            p.copy_(p.roll(1, 0))
    head = drafted(engine)
    assert before != head == drafted(Recorded(copy.deepcopy(policy), slots=4, context=256))
    with torch.no_grad():
        for p in policy.model.parameters():
            p.copy_(p.roll(1, 0))
    assert head != drafted(engine) == drafted(Recorded(copy.deepcopy(policy), slots=4, context=256))


# ---------------------------------------------------------------------------------------------------------------------
# sampling


def test_log_probs_are_those_of_the_trainer(told, guided):
    policy, _ = told
    policy.mtp = Worst()
    engine = guided(policy, slots=5, context=256, temperature=0.2, drafts=3)
    got = engine.run(loops(5, turns=2), list(range(5)))
    assert sum(engine.stats["accepted"][1:]) > 15
    ids, mask, logps = pad_batch(*(list(x) for x in zip(*(r[:3] for r in got), strict=True)))
    assert (token_logps(policy.model, ids, mask, temperature=0.2) - logps).abs().max() < 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_same_seed_same_output_in_any_batch(told, guided, temperature):
    """Where next to no draft is right, and where many are."""
    policy, _ = told
    policy.mtp = Untrained(policy.model)
    options = dict(context=256, temperature=temperature, drafts=3)
    make = guided if temperature < 1 else Engine
    want = (engine := make(policy, slots=12, **options)).run(loops(9), list(range(9)))
    assert temperature == 1 or engine.stats["draft_acceptance"] > 0.3
    order = random.Random(5).sample(range(9), 9)
    got = make(policy, slots=4, **options).run([loops(9)[i] for i in order], order)
    assert tokens_of(got) == [tokens_of(want)[i] for i in order]
    alone = make(policy, slots=1, **options).run(loops(9)[3:4], [3])
    assert tokens_of(alone) == tokens_of(want)[3:4]


def test_without_drafts_a_head_changes_nothing(told):
    policy, _ = told
    policy.mtp = None
    want = Engine(policy, slots=4, context=256).run(loops(5), list(range(5)))
    policy.mtp = Broken()
    engine = Engine(policy, slots=4, context=256, drafts=0)
    assert engine.run(loops(5), list(range(5))) == want
    assert engine.stats["drafted"] == 0 and "accepted_length" not in engine.stats


def test_global_random_state_is_not_used(told):  # FAULTS 48
    policy, _ = told
    policy.mtp = Untrained(policy.model)
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Engine(policy, slots=4, context=256).run(loops(4, turns=1), list(range(4)))
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


def cut(logits, temperature, top_p, top_k):
    """logits (V,) -> the distribution that is sampled (V,), in float64."""
    p, order = (logits.double() / temperature).softmax(-1).sort(descending=True)
    p = p[:top_k] / p[:top_k].sum() if top_k else p
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0)
    return torch.zeros(len(logits), dtype=torch.float64).index_put((order[: len(p)],), p / p.sum())


def surprise(seen, want):
    """How far counts are from expected ones, in standard deviations of chi-square; cells below 5 are lumped."""
    want, seen = want.flatten(), seen.flatten().double()
    assert (seen[want == 0] == 0).all()
    small = want < 5
    want = torch.cat([want[~small], want[small].sum()[None]])
    seen = torch.cat([seen[~small], seen[small].sum()[None]])
    want, seen = want[want > 0], seen[want > 0]
    free = len(want) - 1
    return float((((seen - want) ** 2 / want).sum() - free) / (2 * max(free, 1)) ** 0.5)


@pytest.mark.parametrize("temperature,top_p,top_k", [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 1.0, 3), (1.0, 0.7, 4)])
def test_verified_tokens_have_the_distribution(temperature, top_p, top_k):
    """20,000 draws of three tokens, where each next distribution depends on the token before it."""
    logits = torch.tensor(np.random.default_rng(3).normal(size=(6, 6)) * 1.5).float()  # row: the token before
    cuts = torch.stack([cut(row, temperature, top_p, top_k) for row in logits])
    n, rng = 20_000, np.random.default_rng(4)
    for drafts in ((0, 0), (1, 2), (2, 5), (int(cuts[0].argmin()), 1)):
        context = torch.tensor([0, *drafts])
        u = torch.from_numpy(rng.random((n, 3), dtype=np.float32))
        options = dict(temperature=temperature, top_p=top_p, top_k=top_k, greedy=False, valid_vocab=6)
        given = torch.tensor(drafts).expand(n, 2)
        accepted, tokens, logps = infer.verify(logits[context].expand(n, 3, 6), given, u, **options)
        for i in range(3):  # the tokens at place i of those whose drafts before it were all accepted
            rows = accepted >= i
            seen = torch.bincount(tokens[rows, i], minlength=6)
            assert surprise(seen, rows.sum() * cuts[context[i]]) < 5
            got = logps[rows, i]
            assert torch.allclose(got, cuts[context[i]].log()[tokens[rows, i]].float(), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["untrained", "likely"])
def test_rollouts_have_the_distribution(kind, family):
    """Rollouts of five tokens against the probabilities of all that they can say; `likely` drafts what is said most."""
    policy, prompt, n = of_family(family), [5, 6, 7], 6000
    model, options = sharpen(policy.model), dict(temperature=0.8, top_p=0.95, top_k=3)

    @torch.no_grad()
    def after(ids):
        logits = model(torch.tensor([prompt + list(x) for x in ids])).logits[:, -1, : WORDS + 5]
        return [cut(row, *options.values()) for row in logits]

    want = {(): 1.0}
    for _ in range(5):
        each = zip(want.items(), after(want), strict=True)
        want = {(*ids, int(v)): p * float(q[v]) for (ids, p), q in each for v in q.nonzero()}
    assert abs(sum(want.values()) - 1) < 1e-6 and len(want) > 30
    likely = dict(enumerate(max(want, key=want.get), len(prompt)))
    policy.mtp = Untrained(model) if kind == "untrained" else Says(model, lambda p, token: likely.get(p + 1, 0))
    engine = Engine(policy, slots=1000, **options)
    engine.stop_ids = frozenset()

    def agent():
        got = yield Turn(prompt, [], 5)
        return tuple(got.ids)

    said = engine.run([agent() for _ in range(n)], list(range(n)))
    assert kind == "untrained" or sum(engine.stats["accepted"][2:]) > 1000
    keys, counts = list(want), Counter(said)
    seen = torch.tensor([counts[key] for key in keys])
    assert seen.sum() == n
    assert surprise(seen, n * torch.tensor([want[key] for key in keys], dtype=torch.float64)) < 5


# ---------------------------------------------------------------------------------------------------------------------
# what goes wrong, and what is counted


def test_a_nan_does_not_outlive_its_rollout():
    """Neither in the keys of model and head nor in recurrent states."""
    policy = of_family("qwen3_5_moe")
    policy.mtp = Untrained(policy.model)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[(bad := WORDS + 20)] = float("nan")  # a padding row, never sampled
    spoilt = [1, 2, 3, bad] + [4] * 90
    engine = Engine(policy, slots=2, context=256)
    got = engine.run([loop(spoilt, 1, 0), *loops(3), loop(spoilt, 1, 0), *loops(3)], [0, *range(3), 0, *range(3)])
    want = Engine(policy, slots=2, context=256).run(loops(3), list(range(3)))
    assert [r[3] for r in (got[0], got[4])] == [["error"]] * 2 and engine.stats["nan"] == 2
    assert tokens_of(got[1:4]) == tokens_of(got[5:]) == tokens_of(want)


def test_padding_of_the_vocabulary_is_never_drafted():  # FAULTS 47
    policy = create(toy_tokenizer(), hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[policy.codec.vocab_size :] = 50.0
    policy.mtp = Untrained(policy.model)
    for greedy in (False, True):
        engine = Recorded(policy, slots=8, context=256)
        engine.seen = []
        got = engine.run(loops(8), list(range(8)), greedy=greedy)
        assert max(max(r[0]) for r in got) < policy.codec.vocab_size
        assert engine.seen and max(context.max() for context, _ in engine.seen) < policy.codec.vocab_size


def test_a_shared_prompt_is_computed_once(told):
    policy, _ = told
    policy.mtp = Untrained(policy.model)
    prompt = [random.Random(2).randrange(WORDS) for _ in range(70)]
    engine = Engine(policy, slots=8, context=256)
    engine.run([loop(prompt, 1, i) for i in range(8)], list(range(8)))
    assert engine.stats["prefilled"] == len(prompt) + 7
    assert engine.stats["reused"] == 7 * (len(prompt) - 1)


def test_statistics_of_acceptance(told):
    policy, want = told
    policy.mtp = knows(policy.model, tokens_of(want))
    engine = Engine(policy, slots=3, context=256, drafts=3)
    got = engine.run(loops(8), list(range(8)), greedy=True)
    s = engine.stats
    assert s["sampled"] == sum(sum(r[1]) for r in got)
    times, right = sum(s["accepted"]), sum(i * n for i, n in enumerate(s["accepted"]))
    assert len(s["accepted"]) == 4 and s["accepted"][3] > s["accepted"][0]
    assert s["accepted_length"] == s["yielded"] / times <= 1 + right / times
    assert s["acceptance"] == s["accepted_length"] / 4
    assert s["draft_acceptance"] == right / s["drafted"] and s["drafted"] <= 3 * times
    assert s["draft_s"] > 0


@pytest.mark.parametrize("end", [0, 1, 2, 3, 4, 5])
def test_an_accepted_end_of_turn_is_the_last_token(end):
    """All drafts are right: after the first token a message of n takes (n - 1) / 4 verifications, rounded up."""
    policy, prompt, says = of_family("qwen3"), [5, 6, 7], [*range(10, 14 + end), EOS]
    nexts = {p: token for p, token in enumerate(says, len(prompt))}
    policy.mtp = Says(policy.model, lambda p, token: nexts.get(p + 1, 0))
    engine = Engine(policy, slots=1, context=64)
    engine._logits = lambda hidden, new, drafts: wanted(engine, drafts, nexts)
    [got] = engine.run([loop(prompt, 1, 0)], [0], greedy=True)
    assert got[0] == prompt + says and engine.stats["yielded"] == len(says) - 1
    assert engine.stats["accepted_length"] == (len(says) - 1) / -(-(len(says) - 1) // 4)


def wanted(engine, drafts, nexts):
    """Logits (1, Q, V) of a policy that says what comes next at each place."""
    [row], width = engine.rows, 1 + int(drafts.max())
    places = [row.length + i for i in range(width)]
    return nn.functional.one_hot(torch.tensor([[nexts.get(p, 0) for p in places]]), 128).float()


def test_drafts_that_do_not_pay_are_told(told, monkeypatch):  # FAULTS 40
    policy, _ = told
    policy.mtp = Worst()
    monkeypatch.setattr("infer.ENOUGH", 20)
    with pytest.warns(
        UserWarning,
        match=r"drafting does not pay: with 3 drafts a step takes \d+\.\d+ times as long as its forward and has 1",
    ):
        Engine(policy, slots=4, context=256).run(loops(4), list(range(4)))
