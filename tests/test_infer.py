"""The engine against plain loops over the whole history: same tokens, same log-probs, and no way to hang it."""

import random
import time

import common  # noqa: F401  before torch
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

from chat import Codec, Turn
from options import BadInput
from infer import Engine, argmax, sample
from model import MTP, Policy, create, load, pad_batch, token_logps

WORDS = 90  # plain words of the toy vocabulary; five special tokens follow, then padding up to 128


def toy_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")


def sharpen(model):
    """Large weights: a fresh model's next-token distribution is too flat to tell right from wrong."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0 if p.dim() > 1 else 1.0)
    return model


@pytest.fixture(scope="module")
def dense():
    policy = create(toy_tokenizer(), hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, seed=1)
    sharpen(policy.model)
    return policy


@pytest.fixture(scope="module", params=["dense", "qwen36"])
def policy(request, dense, qwen36_dir):
    return dense if request.param == "dense" else load(qwen36_dir)


def loop(prompt, turns, seed, new=12, seconds=0.0):
    """A toy agent: ragged deltas after each sample; returns (ids, mask, logps, finishes)."""
    rng = random.Random(seed)
    delta, ids, mask, logps, finishes = list(prompt), [], [], [], []
    for _ in range(turns):
        got = yield Turn(list(delta), [], new)
        ids += delta + got.ids
        mask += [0] * len(delta) + [1] * len(got.ids)
        logps += [0.0] * len(delta) + got.logps
        finishes.append(got.finish)
        assert len(got.ids) == len(got.logps)
        if got.finish in ("context", "error"):
            break
        delta = [rng.randrange(WORDS) for _ in range(rng.randrange(1, 9))]
        time.sleep(seconds)
    return ids, mask, logps, finishes


def prompts(n, seed=0):
    """Ragged prompts: groups of three equal ones, and a beginning that all share."""
    rng = random.Random(seed)
    begin = [rng.randrange(WORDS) for _ in range(20)]
    groups = [begin + [rng.randrange(WORDS) for _ in range(rng.randrange(1, 40))] for _ in range(-(-n // 3))]
    return [groups[i // 3] for i in range(n)]


def loops(n, turns=3, new=12, **options):
    return [loop(p, turns, i, new, **options) for i, p in enumerate(prompts(n))]


def tokens_of(results):
    return [r[0] for r in results]


@torch.no_grad()
def plain_greedy(policy, agent):
    """The same loop without an engine: the whole history through the model for every single token."""
    context, turn = [], next(agent)
    while True:
        context += turn.ids
        ids, logps, finish = [], [], "length"
        for _ in range(turn.max_new_tokens):
            logits = policy.model(torch.tensor([context + ids])).logits[0, -1, : policy.codec.vocab_size]
            ids.append(int(logits.argmax()))
            logps.append(float(logits.log_softmax(-1).max()))
            if ids[-1] in policy.codec.stop_ids:
                finish = "stop"
                break
        context += ids
        try:
            turn = agent.send(type("Sample", (), {"ids": ids, "logps": logps, "finish": finish}))
        except StopIteration as end:
            return end.value


def of_family(family):
    shape = dict(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    hybrid = shape | dict(
        num_hidden_layers=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )  # fmt: skip
    config, model = {
        "qwen3": (Qwen3Config(**shape, num_key_value_heads=2, head_dim=16), Qwen3ForCausalLM),
        "qwen2": (Qwen2Config(**shape, num_key_value_heads=1), Qwen2ForCausalLM),
        "llama": (LlamaConfig(**shape, num_key_value_heads=4), LlamaForCausalLM),
        "qwen3_next": (Qwen3NextConfig(**hybrid), Qwen3NextForCausalLM),
        "qwen3_5_moe": (Qwen3_5MoeTextConfig(**hybrid), Qwen3_5MoeForCausalLM),
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = sharpen(model(config).eval())
    tokenizer = toy_tokenizer()
    model.valid_vocab = (codec := Codec(tokenizer)).vocab_size
    return Policy(model, tokenizer, codec, family)


HYBRID = ["qwen3_next", "qwen3_5_moe"]

# ---------------------------------------------------------------------------------------------------------------------
# the same as a plain loop


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", *HYBRID])
def test_greedy_equals_plain_loop(family):
    policy = of_family(family)
    want = [plain_greedy(policy, agent) for agent in loops(7)]
    for slots in (3, 16):
        got = Engine(policy, slots=slots, context=256).run(loops(7), list(range(7)), greedy=True)
        assert tokens_of(got) == tokens_of(want)
        assert [r[3] for r in got] == [r[3] for r in want]
        for a, b in zip(got, want, strict=True):
            assert np.allclose(a[2], b[2], atol=1e-4)


def test_logps_are_those_of_the_trainer(policy):
    got = Engine(policy, slots=5, temperature=0.7).run(loops(12), list(range(12)))
    ids, mask, logps = pad_batch(*(list(x) for x in zip(*(r[:3] for r in got), strict=True)))
    again = token_logps(policy.model, ids, mask, temperature=0.7)
    assert mask.sum() > 100
    assert (again - logps).abs().max() < 1e-4


@pytest.mark.parametrize("top_p,top_k", [(0.8, 0), (1.0, 5), (0.7, 20)])
def test_logps_are_those_of_the_cut_distribution(policy, top_p, top_k):
    engine = Engine(policy, slots=4, temperature=1.3, top_p=top_p, top_k=top_k)
    for ids, mask, logps, _ in engine.run(loops(6), list(range(6))):
        with torch.no_grad():
            logits = policy.model(torch.tensor([ids])).logits[0, :, : policy.codec.vocab_size] / 1.3
        for t in (t for t, m in enumerate(mask) if m):
            p, order = logits[t - 1].softmax(-1).sort(descending=True)
            p = p[:top_k] / p[:top_k].sum() if top_k else p
            kept = int((p.cumsum(-1) - p < top_p).sum())
            place = order.tolist().index(ids[t])
            assert place < kept
            assert abs(float((p[place] / p[:kept].sum()).log()) - logps[t]) < 1e-4


@pytest.mark.parametrize("drafts", [0, 3])
def test_half_precision_runs(guided, drafts):
    """Its attention is another branch than fp32's, for one token of a row and for a window of drafts."""
    shape = dict(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64)
    half = create(toy_tokenizer(), **shape, seed=1, dtype=torch.bfloat16)
    half.mtp = MTP(sharpen(half.model))
    engine = guided(half, slots=4, drafts=drafts)
    got = engine.run(loops(6), list(range(6)), greedy=drafts > 0)  # greedy: most drafts are right
    assert drafts == 0 or sum(engine.stats["accepted"][2:]) > 20
    ids, mask, logps = pad_batch(*(list(x) for x in zip(*(r[:3] for r in got), strict=True)))
    assert (token_logps(half.model, ids, mask) - logps).abs().max() < 0.05


# ---------------------------------------------------------------------------------------------------------------------
# seeds and order


def test_same_seed_same_output_in_any_batch(policy):
    want = Engine(policy, slots=8).run(loops(8), list(range(8)))
    order = random.Random(5).sample(range(8), 8)
    for slots in (1, 3, 8):
        got = Engine(policy, slots=slots).run([loops(8)[i] for i in order], order)
        assert tokens_of(got) == [tokens_of(want)[i] for i in order]
    other = Engine(policy, slots=8).run(loops(8), list(range(100, 108)))
    assert tokens_of(other) != tokens_of(want)


def test_global_random_state_is_not_used(policy):
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Engine(policy, slots=4).run(loops(4), list(range(4)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_group_members_share_no_lists(policy):
    a, b, c = Engine(policy).run([loop(prompts(1)[0], 2, 7) for _ in range(3)], [4, 4, 4])
    assert a[0] == b[0] == c[0]
    a[0].append(-1)
    a[2].append(-1.0)
    assert b[0] == c[0] != a[0]


# ---------------------------------------------------------------------------------------------------------------------
# what is reused


def test_a_shared_prompt_is_computed_once(dense):
    prompt = prompts(1, seed=2)[0]
    engine = Engine(dense, slots=8)
    engine.run([loop(prompt, 1, i) for i in range(8)], list(range(8)))
    assert engine.stats["prefilled"] == len(prompt) + 7
    assert engine.stats["reused"] == 7 * (len(prompt) - 1)


@pytest.mark.parametrize("family", HYBRID)
def test_a_shared_prompt_is_computed_once_by_recurrent_layers_too(family, monkeypatch):
    """Two groups: the beginning that all share, then each group's prompt; a later rollout finds their states saved."""
    monkeypatch.setattr("infer.PAUSE", 8)
    policy, words = of_family(family), random.Random(2).choices(range(WORDS), k=80)
    a, b = words[:50], words[:20] + words[50:]  # 50 tokens each, the first 20 of them in common
    engine = Engine(policy, slots=6, context=256)
    got = engine.run([loop(p, 1, i) for i, p in enumerate([a, a, a, b, b, b, a, b])], list(range(8)))
    assert engine.stats["prefilled"] == 50 + 30 - 2 + 8
    assert engine.stats["reused"] == 20 + 6 * 49
    agents = [loop(p, 1, i) for i, p in enumerate([a, a, a, b, b, b, a, b])]
    want = Engine(policy, slots=1, context=256).run(agents, list(range(8)))
    assert tokens_of(got) == tokens_of(want)


def test_a_slot_remembers_the_prompt_of_its_last_rollout(policy):
    prompt = prompts(1, seed=2)[0]
    engine = Engine(policy, slots=1)
    engine.run([loop(prompt, 2, i) for i in range(3)], list(range(3)))
    assert engine.stats["reused"] >= 2 * (len(prompt) - 1)


def test_later_turns_compute_only_the_delta(policy):
    engine = Engine(policy, slots=1)
    (ids, mask, _, finishes) = engine.run([loop(prompts(1)[0], 4, 0)], [0])[0]
    assert len(finishes) == 4
    # what the environment added, and the last sample of each turn but the final one, whose keys were not yet needed
    assert engine.stats["prefilled"] == mask.count(0) + 3
    assert engine.stats["sampled"] == mask.count(1)


def test_stats_add_up(policy):
    done = []
    engine = Engine(policy, slots=3)
    got = engine.run(loops(7), list(range(7)), progress=done.append)
    assert sum(done) == 7
    assert engine.stats["turns"] == sum(len(r[3]) for r in got)
    assert engine.stats["sampled"] == sum(sum(r[1]) for r in got)
    assert engine.stats["loop_ms_per_turn"] > 0
    assert engine.run([], []) == []


# ---------------------------------------------------------------------------------------------------------------------
# ends


def test_context_is_checked_before_sampling(policy):
    def agent(prompt, new):
        got = yield Turn(prompt, [], new)
        return got

    prompt = [1] * 30
    run = Engine(policy, slots=3, context=32).run
    full, tight, over = run([agent(prompt * 2, 8), agent(prompt, 8), agent([1] * 32, 8)], [0, 1, 2])
    assert (full.ids, full.finish) == ([], "context")
    assert (over.ids, over.finish) == ([], "context")
    assert tight.finish in ("context", "stop") and len(tight.ids) <= 2
    none, one = run([agent(prompt, 0), agent(prompt, 1)], [0, 1])
    assert (none.ids, none.finish) == ([], "length")
    assert len(one.ids) == 1 and one.finish in ("length", "stop")


def test_long_rollouts_end_at_the_context(policy):
    got = Engine(policy, slots=4, context=80).run(loops(8, turns=50), list(range(8)))
    assert all(finishes[-1] == "context" and set(finishes[:-1]) <= {"stop", "length"} for _, _, _, finishes in got)
    for ids, mask, _, _ in got:  # full to the last place, by a sample or by a delta (of 8 at most) with no place after
        assert 80 <= len(ids) < 80 + 8 and not any(mask[80:])


def test_padding_rows_of_the_embedding_are_never_sampled(policy):
    model = create(policy.tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[model.codec.vocab_size :] = 50.0
    for greedy in (False, True):
        got = Engine(model, slots=8).run(loops(8), list(range(8)), greedy=greedy)
        assert max(max(r[0]) for r in got) < model.codec.vocab_size


def test_nan_ends_a_rollout(policy):
    model = create(policy.tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    with torch.no_grad():
        model.model.base_model.norm.weight.fill_(float("nan"))
    for greedy in (False, True):
        engine = Engine(model, slots=2)
        got = engine.run(loops(4), list(range(4)), greedy=greedy)
        assert [r[3] for r in got] == [["error"]] * 4
        assert engine.stats["nan"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_does_not_outlive_its_rollout(dtype):
    """A token whose embedding is NaN spoils the rollout that reads it, not what comes after it in its slot."""
    shape = dict(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64)
    model = create(toy_tokenizer(), **shape, seed=1, dtype=dtype)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[(bad := WORDS + 20)] = float("nan")  # a padding row, never sampled
    spoilt = [1, 2, 3, bad] + [4] * 150  # longer than any other: the NaN would stay behind what they write
    engine = Engine(model, slots=2)
    got = engine.run([loop(spoilt, 1, 0), *loops(6), loop(spoilt, 1, 0), *loops(6)], [0, *range(6), 0, *range(6)])
    want = Engine(model, slots=2).run(loops(6), list(range(6)))
    assert [r[3] for r in (got[0], got[7])] == [["error"]] * 2 and engine.stats["nan"] == 2
    assert tokens_of(got[1:7]) == tokens_of(got[8:]) == tokens_of(want)


def test_deadline_cuts_a_rollout(policy):
    engine = Engine(policy, slots=4, context=4096, deadline_s=0.3)
    got = engine.run([loop(p, 1, 0, new=4000) for p in prompts(4)], [0, 1, 2, 3])
    assert all(r[3] in (["error"], ["stop"]) for r in got)
    assert engine.stats["expired"] == sum(r[3] == ["error"] for r in got)
    assert engine.stats["seconds"] < 3


def test_an_expired_rollout_may_still_end_in_order(policy):
    def slow_to_end():
        got = yield Turn([1, 2, 3], [], 4000)
        time.sleep(0.2)
        return got.finish

    engine = Engine(policy, slots=2, context=4096, deadline_s=0.2)
    engine.stop_ids = frozenset()
    assert engine.run([slow_to_end(), slow_to_end()], [0, 1]) == ["error", "error"]
    assert (engine.stats["expired"], engine.stats["stuck"]) == (2, 0)


def test_a_stuck_tool_stops_nobody_else(policy):
    def stuck():
        yield Turn([1, 2, 3], [], 2)
        time.sleep(20)
        yield Turn([1], [], 2)

    engine = Engine(policy, slots=3, deadline_s=2.0)  # enough for the others, on a busy machine too
    got = engine.run([stuck(), *loops(5, turns=2)], list(range(6)))
    assert got[0] is None and engine.stats["stuck"] == 1
    assert all(r is not None for r in got[1:])
    assert engine.stats["seconds"] < 15
    want = Engine(policy, slots=3).run(loops(5, turns=2), [1, 2, 3, 4, 5])
    assert tokens_of(got[1:]) == tokens_of(want)


def test_slow_tools_run_side_by_side(policy):
    engine = Engine(policy, slots=8, deadline_s=30)
    want = Engine(policy, slots=8).run(loops(8), list(range(8)))
    got = engine.run(loops(8, seconds=0.1), list(range(8)))
    assert tokens_of(got) == tokens_of(want)
    assert engine.stats["loop_s"] > 2.0 > engine.stats["seconds"]


def test_faults_of_the_program_come_through(policy):
    def broken():
        yield Turn([1, 2], [], 2)
        raise TypeError("broken tool code")

    policy.model.train()
    with pytest.raises(TypeError, match="broken tool code"):
        Engine(policy).run([*loops(2), broken()], [0, 1, 2])
    assert policy.model.training and policy.model.config._attn_implementation == "sdpa"
    policy.model.eval()


def test_a_model_without_an_attention_interface_is_refused(policy):
    model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(BadInput, match="there: bloom models take no attention function"):
        Engine(Policy(model, policy.tokenizer, policy.codec, "there"))


def test_settings_out_of_range_are_refused(policy):
    for bad in ({"temperature": 0}, {"top_p": 0}, {"top_k": -1}, {"slots": 0}, {"context": 10**6}):
        with pytest.raises(BadInput):
            Engine(policy, **bad)


# ---------------------------------------------------------------------------------------------------------------------
# the sampler alone


def test_samples_have_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf"), 0.5])
    n = 20_000
    u = torch.from_numpy(np.random.default_rng(0).random(n, dtype=np.float32))
    for top_p, top_k in ((1.0, 0), (0.9, 0), (1.0, 3), (0.6, 3)):
        tokens, logps = sample(logits.expand(n, -1), u, 0.8, top_p, top_k)
        p, order = (logits / 0.8).softmax(-1).sort(descending=True)
        p = p[:top_k] / p[:top_k].sum() if top_k else p
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0)
        want = torch.zeros(6).index_put((order[: len(p)],), p / p.sum())
        seen = torch.bincount(tokens, minlength=6)
        assert (seen[want == 0] == 0).all()
        kept = want > 0
        chi = ((seen[kept] - n * want[kept]) ** 2 / (n * want[kept])).sum()
        assert chi < 22  # 0.1% with five degrees of freedom is 20.5
        assert torch.allclose(logps, want.log()[tokens], atol=1e-5)


def test_sampler_at_the_edges():
    last_below_one = np.nextafter(np.float32(1), np.float32(0))
    u = torch.tensor([0.0, last_below_one, 1.0, 0.5])
    logits = torch.full((4, 300), float("-inf"))
    logits[:, 100:200] = torch.linspace(-30, 3, 100)
    for top_p, top_k in ((1.0, 0), (0.99, 0), (1.0, 7)):
        tokens, logps = sample(logits, u, 1.0, top_p, top_k)
        assert ((tokens >= 100) & (tokens < 200)).all()
        assert torch.isfinite(logps).all()
    logits[2] = float("nan")
    for top_p, top_k in ((1.0, 0), (0.99, 0), (1.0, 7)):
        tokens, logps = sample(logits, u, 1.0, top_p, top_k)
        assert ((tokens >= 0) & (tokens < 300)).all()
        assert torch.isnan(logps).tolist() == [False, False, True, False]
    assert torch.isnan(argmax(logits)[1]).tolist() == [False, False, True, False]


def test_top_p_is_the_same_with_and_without_a_full_sort():
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(32, 3000)).astype(np.float32))
    u = torch.from_numpy(rng.random(32, dtype=np.float32))
    for scale in (0.3, 1.0, 4.0):  # flat: needs the sort; peaked: a few candidates do
        tokens, logps = sample(logits * scale, u, 1.0, 0.9)
        p, order = (logits * scale).softmax(-1).sort(descending=True)
        p = torch.where(p.cumsum(-1) - p < 0.9, p, 0)
        p = p / p.sum(-1, keepdim=True)
        place = (order == tokens[:, None]).int().argmax(-1)
        assert torch.allclose(p.gather(-1, place[:, None])[:, 0].log(), logps, atol=1e-4)
