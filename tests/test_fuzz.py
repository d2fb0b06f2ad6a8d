"""Ten thousand broken assistant messages through parser, hooks and tools: no exception, no hang, nothing unfit said."""

import json
import random
import re
import time
from pathlib import Path

import pytest

from chat import Sample, StopReason
from checks import MARKUP
from facts import score
from harness import Harness, run
from sim import Faults, World, make_task
from oracle import Oracle
from test_chat import HERMES, MARKUP as TAGS, SPECIAL, SPELLED, XML

ROOT = Path(__file__).parent.parent
H = Harness.load(ROOT / "data" / "harness")
BARE = H.copy(hooks=[])
WORLD = World.load(ROOT / "data" / "world" / "zh.json")
CODECS = (HERMES, XML, SPELLED)
PIECES = [
    *(*SPECIAL, *TAGS, "<function=get_coupon>", "</function>", "<parameter=link_id>", "</parameter>"),
    *(
        '{"name": "',
        '", "arguments": {',
        "}}",
        "{}",
        "[]",
        '"',
        "'",
        "\\",
        "\\ud800",
        "\\u0000",
        "：",
        "，",
        "```",
        "**",
    ),
    *("NaN", "-Infinity", "1e999", "null", "true", "True", "None", "9" * 400, "9" * 5000, "-0", "1_0", "3.0", "89元"),
    *("\ufffd", "\x00", "\u202e", "😊", "８９", "٣", " ", "\n", "\r\n", "\t", "{tool:load_skill}", "{danmaku}"),
    *("../../etc/passwd", "load_skill", "item_qa", "get_coupon", "link_id", "topic", "哈"),
]


def deep(rng):
    """JSON far deeper or longer than any call."""
    n = rng.choice([5, 40, 400, 1500])
    opened, closed = rng.choice([("[", "]"), ('{"a":', "}")])
    inner = opened * n + rng.choice(["1", "", '"x"']) + closed * rng.choice([n, n - 1])
    return '<tool_call>\n{"name": "get_coupon", "arguments": {"link_id": ' + inner + "}}\n</tool_call>"


def mutated(rng, text):
    """A message with a few edits of many kinds."""
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        a, b = sorted(rng.randint(0, len(text)) for _ in range(2))
        kind = rng.randrange(8)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:a] + rng.choice(PIECES) + text[a:]
        elif kind == 2:
            text = text[:a] + text[a:b] * 2 + text[b:]
        elif kind == 3:
            text = text[b:] + text[a:b] + text[:a]
        elif kind == 4:
            tags = re.findall(r"<[^<>]*>", text) or [""]
            text = text.replace(rng.choice(tags), rng.choice([*TAGS, ""]), rng.choice([1, -1]))
        elif kind == 5:
            text = re.sub(r"\d+|\"[a-z_]+\"", lambda _: rng.choice(PIECES), text, count=rng.randint(1, 3))
        elif kind == 6:
            text = text[:a] + "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 8))) + text[a:]
        else:
            text = text[:a] + deep(rng) + text[a:] if rng.random() < 0.1 else text[:a]
    return text


def message(rng, codec, oracle, messages):
    """What this policy samples: the oracle's ids; its text, mutated, with or without special tokens; noise."""
    right = codec.render(oracle.say(messages))
    kind = rng.random()
    if kind < 0.25:
        ids = right
    elif kind < 0.85:
        text = mutated(rng, codec.decode(right))
        ids = codec._raw(text) if rng.random() < 0.7 else codec.encode(text)
    elif kind < 0.95:
        ids = [rng.randrange(codec.vocab_size) for _ in range(rng.randint(0, 80))]
    else:
        ids = [
            rng.choice([*codec.added.values(), 0, 200, codec.vocab_size + 5, 10**6]) for _ in range(rng.randint(0, 40))
        ]
    if rng.random() < 0.8:
        ids = [i for i in ids if i not in codec.stop_ids] + [rng.choice(codec.stop_ids)]  # an engine stops at the first
    finish = rng.choices(["stop", "length", "context", "error"], [40, 1, 1, 1])[0]
    return Sample(ids, [-1.0] * len(ids), finish)


@pytest.mark.parametrize("part", range(2))
def test_six_thousand_messages(part):
    """FAULTS 26, 27, 58, 59: every rollout ends, typed; what is dispatched is public text; every trace is JSON."""
    rng, sent, worst, ends = random.Random(part), 0, 0.0, set()
    seed = part * 10**6
    while sent < 3000:
        seed += 1
        h, codec, task = rng.choice([H, H, BARE]), rng.choice(CODECS), make_task(WORLD, seed % 200)
        oracle = Oracle(h, task, rng, verbosity=0, slip=0.1)
        loop, turns = run(h, task.danmaku, task.open(Faults(0.2, 0.2, 0.1), seed), codec, seed), 0
        turn = next(loop)
        try:
            while True:
                sample = message(rng, codec, oracle, turn.messages)
                started = time.thread_time()
                turn, turns, sent = loop.send(sample), turns + 1, sent + 1
                worst = max(worst, time.thread_time() - started)
        except StopIteration as end:
            t, sent = end.value, sent + 1
        assert turns < h.limits.max_turns
        assert t.stop_reason in StopReason.__args__
        assert t.reply == h.fallback or (t.stop_reason == "reply" and t.reply.strip() and not MARKUP.search(t.reply))
        assert not any(name in t.reply for name in codec.added)
        rewards = score(h, task, t)
        assert all(v is None or 0 <= v <= 1 for v in rewards.values())
        json.dumps(t.to_dict(), allow_nan=False, ensure_ascii=False).encode()
        ends.add(t.stop_reason)
    assert ends >= {"reply", "fallback", "length", "error"}
    assert worst < 1.0


def test_the_parser_alone_never_raises():
    """Any ids at all, of the vocabulary or beyond it."""
    rng = random.Random(1)
    for codec in CODECS:
        for _ in range(1500):
            ids = [rng.randrange(codec.vocab_size + 3) for _ in range(rng.randint(0, 60))]
            said, mask = codec.parse(ids), codec.think_mask(ids)
            assert len(mask) == len(ids) and mask == sorted(mask, reverse=True)
            json.dumps([vars(c) for c in said.calls], ensure_ascii=False).encode()
            assert not (said.calls and said.reasoning and "</think>" not in codec.decode(ids))


@pytest.mark.parametrize(
    "tag",
    ["<tool_call>", "<parameter=a>", "<function=f>", "</function>", "</tool_call>", "{", "[", "<think>", "</think>"],
)
def test_repeated_tags_take_no_long_time(tag):
    """FAULTS 28: one message cannot stop the batch, however it is built."""
    for frame in (
        "{}",
        "<tool_call>{}</tool_call>",
        "<tool_call><function=f>{}</function></tool_call>",
        "<tool_call><function=f>{}",
    ):
        for codec in CODECS:
            ids = codec.encode(frame.replace("{}", tag * 1000))[:8000]
            started = time.thread_time()
            codec.parse(ids)
            codec.think_mask(ids)
            assert time.thread_time() - started < 0.5
