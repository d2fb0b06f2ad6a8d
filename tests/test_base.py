"""The base model's tokenizer and its pre-training script."""

import json
import random
import re
import shutil
import subprocess
import sys
from itertools import groupby, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import common
from chat import REPLY, Call, Codec, Message
from options import BadInput
from data import base_samples, general, make_base, make_tokenizer, names, random_harness

BASE = make_tokenizer.ROOT / "data" / "base-small"
CODEC = Codec(Tokenizer.from_file(str(BASE / "tokenizer.json")))


@pytest.fixture
def tokenizer():
    return CODEC.tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# tokenizer


@given(text=st.text())
def test_any_text_makes_the_round_trip(text):
    assert CODEC.decode(CODEC.encode(text)) == text
    assert not set(CODEC.encode(text)) & set(CODEC.added.values())


@pytest.mark.parametrize("kind", names.NAMES)
def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer, kind):
    rng = random.Random(0)
    places = [
        "- {}(link_id:int): 查",
        '{{"name": "{}", "arguments": {{"a": "{}"}}}}',
        "两个都用{}查",
        "{}：v",
        "“{}”。",
        "={}\n",
    ]
    for _ in range(50):
        name = names.name(rng, [kind])
        ids = tokenizer.encode(name).ids
        for place in places:
            around = tokenizer.encode(place.format(name, name)).ids
            assert any(around[i : i + len(ids)] == ids for i in range(len(around))), (name, place)


def test_one_token_each_for_han_characters_digits_and_markup(tokenizer):
    for c in set(names.HAN) | set("0123456789，。：？“”"):
        assert len(tokenizer.encode(c).ids) == 1, c
    assert len(tokenizer.encode("商品123").ids) == 5
    for piece in ['{"', '": "', '", "', '"}', "\n\n", *make_tokenizer.SPECIAL, *make_tokenizer.MARKUP]:
        assert len(tokenizer.encode(piece).ids) == 1, piece
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    assert special == set(make_tokenizer.SPECIAL)


def test_end_of_turn_and_padding_differ():
    loaded = AutoTokenizer.from_pretrained(BASE)
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(loaded) < 3500


TOOLS = [{"type": "function", "function": {"name": "get_price", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_template_and_codec_write_the_same_text(tokenizer, tools):
    turns = [
        {"role": "system", "content": "你是主播。"},
        {"role": "user", "content": "3号多少钱"},
        {"role": "assistant", "content": "", "reasoning": "查一下", "calls": [Call("get_price", {"券": None, "n": 3})]},
        {"role": "tool", "content": '{"price": 59}'},
        {"role": "tool", "content": '{"price": 69}'},
        {"role": "assistant", "content": "59元。"},
        {"role": "user", "content": "有券吗"},
    ]
    there = []
    for turn in turns:
        calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in turn.get("calls", [])]
        there.append({k: v for k, v in turn.items() if k in ("role", "content")})
        there[-1] |= {"tool_calls": calls, "reasoning_content": turn.get("reasoning", "")}
    made = AutoTokenizer.from_pretrained(BASE).apply_chat_template(
        there, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert made == Codec(tokenizer).text(turns, tools)


def test_building_twice_gives_the_same_tokenizer():
    texts = [general.sample(random.Random(i))["prompt"] for i in range(200)] + ["龘 get_inventory 😊"]
    one, two = (make_tokenizer.build(texts, 100).to_str() for _ in range(2))
    assert one == two
    assert len(Tokenizer.from_str(one).encode("龘").ids) == 1


# ----------------------------------------------------------------------------------------------------------------------
# samples and batches


@pytest.mark.parametrize("source", base_samples.HELD_OUT)
def test_samples_are_seeded_and_train_what_the_assistant_says(tokenizer, source):
    codec = Codec(tokenizer)
    ids, mask = base_samples.make_sample(codec, source, 5, "test", 0.6)
    assert (ids, mask) == base_samples.make_sample(codec, source, 5, "test", 0.6)
    assert len(ids) == len(mask) and mask[0] == 0
    assert ids[-1] == codec.added["<|im_end|>"] and mask[-1] == base_samples.SAID
    said = codec.decode([i for i, m in zip(ids, mask) if m == base_samples.SAID])
    thought = codec.decode([i for i, m in zip(ids, mask) if m == base_samples.THOUGHT])
    assert "<|im_start|>" not in said + thought
    assert "<think>" not in said or source == "routing"  # there the choice in the reasoning is what is scored


def test_dialogues_never_show_a_name_of_the_shipped_harness(tokenizer):
    h = random_harness._original()
    names = {x.name for x in [*h.tools, *h.skills] if "_" in x.name}  # single words may turn up by chance
    known = names - {"load_skill"}  # the loop's own tool
    for seed in range(10):
        shown = Codec(tokenizer).decode(random_harness.dialogue(Codec(tokenizer), seed).ids)
        assert not [name for name in known if re.search(rf"(?<![\w-]){name}(?![\w-])", shown)]


def samples(lengths):
    ids = np.concatenate([np.full(n, i + 1, np.uint16) for i, n in enumerate(lengths)])
    return base_samples.Samples(ids, np.ones(len(ids), np.uint8), lengths)


def test_a_reading_trains_the_replies_alone_and_shows_no_lists(tokenizer):
    codec = Codec(tokenizer)
    for seed in range(12):
        ids, mask = base_samples.make_sample(codec, "reading", seed, "train", 1.0)
        whole = random_harness.dialogue(codec, seed, strange=1.0, lists=False)
        assert ids == whole.ids and any(mask)
        assert all((m > 0) == (s == REPLY and w) for m, s, w in zip(mask, whole.segment, whole.mask, strict=True))
        assert len(ids) < len(random_harness.dialogue(codec, seed, strange=1.0).ids)


def test_an_echo_says_random_tokens_twice():
    for seed in range(40):
        ids, mask = base_samples.echo(np.random.default_rng(seed), 50, 900, "cpu")
        assert torch.equal(ids, base_samples.echo(np.random.default_rng(seed), 50, 900, "cpu")[0])
        said = int(mask[0].sum())
        assert said in (1, 3, 7, 15, 31) and not mask[:, :-said].any() and mask[:, -said:].all()
        assert torch.equal(ids[:, : said + 1], ids[:, -said - 1 :]) and ids[:, : said + 1].max() < 50
        assert ids.min() >= 0 and ids.max() < 900 and ids.numel() <= base_samples.ECHO


def test_two_parameters_of_a_tool_never_share_a_name(monkeypatch):
    monkeypatch.setattr(random_harness, "random_parameter", lambda rng: "num")
    for seed in range(200):
        h = random_harness.random_harness(random_harness._original(), random.Random(seed))
        for t in (t for t in h.tools if not t.id.startswith("extra")):
            assert set(t.param_ids.values()) == set(random_harness._original().tool(t.id).param_ids.values())


def test_a_quotation_is_told_by_what_stands_before_it():
    """Each trained token follows its one, or its three, predecessors somewhere in the context."""
    repeated = 0
    for seed in range(60):
        ids, mask = base_samples.quotation(np.random.default_rng(seed), 900, "cpu")
        assert torch.equal(ids, base_samples.quotation(np.random.default_rng(seed), 900, "cpu")[0])
        assert ids.shape == mask.shape and ids.min() >= 0 and ids.max() < 900 and ids.numel() <= base_samples.ECHO
        first, _, told, *_ = [len(list(run)) for _, run in groupby(mask[0].tolist())]  # zeros, ones, zeros ...
        repeated += told == 3
        for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
            context = row[: first - told]
            known = {tuple(context[i : i + told + 1]) for i in range(len(context) - told)}
            assert all(tuple(row[i - told : i + 1]) in known for i, m in enumerate(kept) if m)
            assert told == 1 or len(set(context)) <= len(context) / 4
    assert 10 < repeated < 30


def test_batches_are_padded_on_the_right_and_masked():
    ids, mask = samples([3, 5, 40]).batch([2, 0], "cpu")
    assert ids.shape == (2, 48) and mask.sum(1).tolist() == [40, 3]
    assert ids[0, :40].eq(3).all() and ids[1, :3].eq(1).all() and not ids[1, 3:].any()


def test_an_epoch_takes_each_sample_once_within_the_budget():
    lengths = [random.Random(i).randint(2, 200) for i in range(3000)]
    stream, seen = samples(lengths).groups(2560, seed=1), []
    while len(seen) < 3000:
        group = next(stream)
        assert len(group) * base_samples.padded(max(lengths[i] for i in group)) <= 2560
        seen += group
    assert sorted(seen) == list(range(3000))
    again = samples(lengths).groups(2560, seed=1)
    assert next(islice(again, 7, None)) == next(islice(samples(lengths).groups(2560, seed=1), 7, None))


def test_accuracy_counts_whole_samples_and_leaves_reasoning_out():
    """A model that always says token 1 on three samples: all right, wrong in its reasoning only, wrong in its reply."""
    model = SimpleNamespace(
        model=lambda input_ids: SimpleNamespace(last_hidden_state=torch.zeros(*input_ids.shape, 4)),
        lm_head=lambda hidden: torch.tensor([0.0, 1.0, 0.0]).expand(len(hidden), 3),
    )
    ids = np.array([0, 1, 1, 0, 2, 1, 0, 2, 1], np.uint16)
    mask = np.array([0, 1, 1, 0, 2, 1, 0, 1, 1], np.uint8)
    whole, token = make_base.accuracy(model, base_samples.Samples(ids, mask, [3, 3, 3]), 64, torch.device("cpu"))
    assert (whole, token) == (pytest.approx(2 / 3), pytest.approx(4 / 5))


# ----------------------------------------------------------------------------------------------------------------------
# training


def test_each_attempt_draws_other_weights():
    config = make_base.parse(make_base.Config, make_base.PRESETS, ["--config", "tiny", "--out", str(BASE)])
    first, again, second = (make_base.create(config, n).model.get_input_embeddings().weight for n in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_scripts_print_an_example(capsys):
    random_harness.main(["--seed", "3"])
    assert "<tool_call>" in (first := capsys.readouterr().out)
    random_harness.main(["--seed", "4"])
    assert capsys.readouterr().out != first
    general.main(["--seed", "3"])
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")]
    assert {heading.split()[1] for heading in headings} == set(general.KINDS)


def test_the_loss_is_one_mean_over_the_step():
    """Two micro-batches move the weights as one batch with both does, and so do two ranks with one each."""

    class Rank(common.Dist):
        """Keeps what it is asked to sum: `sent`, a list of gradients."""

        def all_reduce_sum(self, tensor):
            sent[self.rank].append(tensor.flatten().clone())
            return tensor

    config = make_base.parse(make_base.Config, make_base.PRESETS, ["--config", "tiny", "--out", str(BASE)])
    config.clip = 1e9
    ids = torch.randint(1, 99, (2, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(ids)
    mask[0, 4:7], mask[1, 9:30] = 1, 1  # unequal token counts: a mean of means would differ
    whole, halves, sent = [(0, 2)], [(0, 1), (1, 2)], {}

    def gradient(split, rank=0, world=1):
        model, sent[rank] = make_base.create(config).model, []
        batches = [("copy", ids[a:b], mask[a:b]) for a, b in split]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sums = make_base.train_step(model, optimizer, config, batches, Rank(rank, world))
        return torch.cat(sent[rank]), sums["copy"]

    (one, (loss, n)), (two, _) = gradient(whole), gradient(halves)
    assert n == 24 and torch.allclose(one, two, atol=0.02 * one.abs().max())  # bf16
    ranks = [gradient(halves, rank, 2) for rank in range(2)]
    assert torch.equal(ranks[0][0] + ranks[1][0], two)
    merged = make_base.merged(*({"copy": sums} for _, sums in ranks), {"ifeval": (1.0, 2)})
    assert (
        merged["copy"][1] == 24 and merged["copy"][0] == pytest.approx(loss, rel=0.01) and merged["ifeval"] == (1.0, 2)
    )


def test_resume_continues_bit_for_bit_and_the_result_loads(tmp_path):
    out = tmp_path / "base"
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, out)
    argv = ["--config", "tiny", "--out", str(out), "--cache", str(tmp_path / "cache"), "--run", str(tmp_path / "run")]
    argv += "--copies 60 --instructions 60 --routings 20 --readings 8 --dialogues 8 --held-out 4".split()
    make_base.main(argv)
    first, shipped = common.load_checkpoint(tmp_path / "run")[2], (out / "model.safetensors").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss_copy", "loss_dialogue"} <= {key for row in rows for key in row}
    assert 0 <= rows[-1]["whole_original"] <= 1

    shutil.rmtree(tmp_path / "run" / "ckpt-000004")  # as if killed after the second step
    make_base.main([*argv, "--resume"])
    second = common.load_checkpoint(tmp_path / "run")[2]
    assert first["drawn"] == second["drawn"]
    for key in first["model"]:
        assert torch.equal(first["model"][key], second["model"][key]), key
    assert (out / "model.safetensors").read_bytes() == shipped  # the MTP head too

    policy = make_base.policies.load(out)
    assert policy.codec.calls == "hermes"
    ids = policy.codec.render(Message("想", "好。"))
    assert policy.model(torch.tensor([ids])).logits.isfinite().all()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "cache", "run"}

    make_base.main([*argv, "--run", str(tmp_path / "head"), "--init", str(out), "--steps", "0", "--mtp-steps", "1"])
    taught = make_base.policies.load(out)
    assert torch.equal(taught.model.model.norm.weight, policy.model.model.norm.weight)
    assert not torch.equal(taught.mtp.fc.weight, policy.mtp.fc.weight)


def test_no_tokenizer_is_one_clear_line(tmp_path):
    argv = ["--config", "tiny", "--out", str(tmp_path / "none"), "--run", str(tmp_path / "run")]
    with pytest.raises(BadInput, match="make_tokenizer"):
        make_base.main(argv)
    assert not list(tmp_path.iterdir())


def test_a_share_is_wanted_of_each_source():
    with pytest.raises(BadInput, match="--shares: '1,2' is not 6 values"):
        make_base.main(["--shares", "1,2"])


def test_another_number_of_steps_is_another_run(tmp_path):
    """The learning rate of each step depends on it."""
    (tmp_path / "run").mkdir()
    common.write_json(tmp_path / "run" / "config.json", vars(make_base.Config(run=str(tmp_path / "run"))))
    with pytest.raises(BadInput, match="steps was 12000 and is now 5000"):
        make_base.main(["--run", str(tmp_path / "run"), "--resume", "--steps", "5000"])


def test_samples_are_kept_by_all_the_code_that_makes_them():
    """Every module that base_samples.py stands on, but for options.py and common.py, which decide on no sample."""
    look = "import sys, data.base_samples; print(*(getattr(m, '__file__', 0) for m in sys.modules.values()))"
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=base_samples.ROOT, capture_output=True, text=True, check=True
    )
    root, paths = base_samples.ROOT, map(Path, done.stdout.split())
    ours = {str(path.relative_to(root)) for path in paths if path.parent in (root, root / "data")}
    assert ours - {"options.py", "common.py"} == set(base_samples.CODE)
