"""The harness on disk, its hooks, and the one loop: whatever a file, a policy, a tool or a viewer does."""

import json
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from chat import Call, Message, Sample
from checks import EVENTS, MARKUP, Deny, Hook, Rewrite
from options import BadInput
from harness import Harness, assemble, run
from parts import Skill, Tool
from sim import World, make_task
from test_chat import HERMES, XML, teach

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "data" / "harness"
WORLD = World.load(ROOT / "data" / "world" / "zh.json")
INFO, SKILL = "get_product_info_by_link_id", "load_skill"


class HandRoom:
    """A room written by hand: canned answers by tool id."""

    def __init__(self, answers=None, **context):
        links = [{"link_id": 3, "name": "防晒霜SPF50"}]
        self.context = {"links": links, "current_link_id": 3, "history": [], "signals": {"online": 20}} | context
        self.answers, self.calls = answers or {}, []

    def call(self, tool, arguments):
        self.calls.append((tool, arguments))
        answer = self.answers.get(tool, {"ok": 1})
        return answer(arguments) if callable(answer) else answer


def drive(h, script, room=None, request="3号链接多少钱？", codec=HERMES):
    """Run one request; script: Messages, id lists, or Samples, in order; the last one is said again and again."""
    loop, said = run(h, request, room or HandRoom(), codec), iter(script)
    turns = []
    try:
        turns.append(next(loop))
        while True:
            last = next(said, script[-1])
            ids = codec.render(last) if isinstance(last, Message) else last
            turns.append(loop.send(ids if isinstance(ids, Sample) else Sample(ids, [0.0] * len(ids), "stop")))
    except StopIteration as end:
        return end.value, turns


def events(t, kind):
    return [e for e in t.events if e["event"] == kind]


def load(skill="item_qa"):
    return Message("", "", [Call(SKILL, {"skill": skill})])


@pytest.fixture
def shipped():
    return Harness.load(SHIPPED)


# ---------------------------------------------------------------------------------------------------------------------
# the report's exchange


@pytest.mark.parametrize("codec", [HERMES, XML], ids=["hermes", "xml"])
def test_the_exchange_of_the_report(shipped, codec):
    """'3号链接多少钱？' -> product info -> skill -> the spoken price."""
    room = HandRoom({INFO: json.dumps({"name": "防晒霜SPF50", "price": 89}, ensure_ascii=False)})
    reply = "3号链接是防晒霜SPF50，现在券后价89元哈。"
    script = [Message("查3号", "", [Call(INFO, {"link_id": 3})]), load(), Message("结尾用哈", reply)]
    t, turns = drive(shipped, script, room, codec=codec)
    assert (t.reply, t.stop_reason) == (reply, "reply")
    assert room.calls == [(INFO, {"link_id": 3})]
    assert [e["skill"] for e in events(t, "skill")] == ["item_qa"]
    assert "结尾用“哈”" in codec.decode(turns[2].ids) and "“哈”" not in codec.decode(turns[0].ids)
    assert t.harness_commit == shipped.commit
    assert {e["event"] for e in t.events} == {"input", "state", "tool_call", "tool_result", "skill", "reply"}
    json.dumps(t.to_dict(), allow_nan=False)


def test_ungrounded_number_is_denied_then_mended(shipped):
    """A hook's denial is a user turn that the policy reads; the mended reply goes out."""
    room = HandRoom({INFO: '{"price": 89}'})
    script = [
        Message("", "", [Call(INFO, {"link_id": 3})]),
        load(),
        Message("", "3号99元哈。"),
        Message("", "3号89元哈。"),
    ]
    t, turns = drive(shipped, script, room)
    assert t.reply == "3号89元哈。"
    [denial] = [e for e in events(t, "hook") if e["verdict"] == "deny"]
    assert denial["check"] == "fact_risk" and "99" in denial["message"]
    assert turns[-1].messages == [{"role": "user", "content": denial["message"]}]
    assert denial["message"] in HERMES.decode(turns[-1].ids)


# ---------------------------------------------------------------------------------------------------------------------
# hooks


def user_checks(tmp_path, monkeypatch, code):
    """A module of the user's own checks."""
    (tmp_path / "my_checks.py").write_text("from checks import Deny, Rewrite\nfrom chat import Call\n" + code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_checks", raising=False)


def test_a_hook_that_always_denies_ends_in_the_fallback(shipped, tmp_path, monkeypatch):
    """FAULTS 57: the retry budget bounds it, at every event."""
    user_checks(tmp_path, monkeypatch, "def no(m):\n    return Deny('不行')\n")
    for event in EVENTS:
        h = shipped.copy(hooks=[Hook(event, "my_checks:no", message="拒绝: {detail}")])
        said = Message("", "好的哈。") if event == "reply" else Message("", "", [Call("get_coupon", {"link_id": 3})])
        t, turns = drive(h, [said])
        assert (t.stop_reason, t.reply) == ("fallback", shipped.fallback)
        assert len(turns) == (0 if event == "input" else h.limits.max_retries + 1)
        assert all(e["message"] == "拒绝: 不行" for e in events(t, "hook"))


def test_a_hook_that_fails_is_a_denial(shipped, tmp_path, monkeypatch):
    """A check that raises, or answers what no check may answer, denies; the trace has the error."""
    code = "def boom(m):\n    raise RuntimeError('boom')\n\ndef yes(m):\n    return True\n"
    code += "def none(m):\n    return Rewrite(None)\n\ndef odd(m):\n    return Rewrite(3)\n"
    user_checks(tmp_path, monkeypatch, code)
    for name in ("boom", "yes", "none", "odd"):
        for event in EVENTS:
            h = shipped.copy(hooks=[Hook(event, f"my_checks:{name}")])
            said = (
                Message("", "好的哈。") if event == "reply" else Message("", "", [Call("get_coupon", {"link_id": 3})])
            )
            t, _ = drive(h, [said])
            assert t.stop_reason == "fallback"
            assert all("boom" in e["error"] or "answered" in e["error"] for e in events(t, "hook_error"))
            assert len(events(t, "hook_error")) == len([e for e in events(t, "hook") if e["verdict"] == "deny"]) >= 1


@pytest.mark.parametrize(
    "body",
    [
        "return Rewrite(Call(m.subject.name, None))",
        "return Rewrite(Call(3, {}))",
        "return Rewrite(Call(m.subject.name, {'link_id': {1, 2}}))",
        "return Rewrite(Call(m.subject.name, {'link_id': '\\ud800'}))",
        "m.subject.arguments = None; m.calls = m.loaded = m.evidence = None",
        "m.subject.name = 3; m.calls.append(1); m.loaded.append(2)",
        "return Deny('\\ud800' + 'x' * 10**6)",
        "raise RuntimeError('\\ud800' + 'x' * 10**6)",
        "return Deny(None)",
    ],
)
def test_whatever_a_hook_does_a_rollout_ends_and_can_be_written_down(shipped, tmp_path, monkeypatch, body):
    user_checks(tmp_path, monkeypatch, f"def odd(m):\n    {body}\n")
    h = shipped.copy(hooks=[Hook("tool_call", "my_checks:odd", message="{detail}")])
    t, turns = drive(h, [Message("", "", [Call("get_coupon", {"link_id": 3})]), Message("", "好的哈。")])
    assert t.stop_reason == "reply" and sum(len(m["content"]) for turn in turns[1:] for m in turn.messages) < 3000
    json.dumps(t.to_dict(), ensure_ascii=False).encode()


def test_a_check_of_ones_own(shipped, tmp_path, monkeypatch):
    """'package.module:function', with params; the detail fills the message."""
    user_checks(
        tmp_path, monkeypatch, "def short(m, most):\n    return Deny(str(most)) if len(m.subject) > most else None\n"
    )
    h = shipped.copy(hooks=[Hook("reply", "my_checks:short", params={"most": 4}, message="最多{detail}字")])
    t, turns = drive(h, [Message("", "很长很长的回复"), Message("", "短的")])
    assert t.reply == "短的" and turns[1].messages[0]["content"] == "最多4字"
    with pytest.raises(BadInput, match="most"):
        shipped.copy(hooks=[Hook("reply", "my_checks:short")])
    user_checks(tmp_path, monkeypatch, "raise KeyError('at import')\n")
    with pytest.raises(BadInput, match="my_checks:short"):
        shipped.copy(hooks=[Hook("reply", "my_checks:short", params={"most": 4})])


def test_hooks_may_rewrite(shipped, tmp_path, monkeypatch):
    """Input, call, result and reply, each as rewritten goes on; a call may be sent to another tool."""
    code = "def upper(m):\n    return Rewrite(m.subject.upper())\n"
    code += "def other(m):\n    return Rewrite(Call('get_inventory', {'link_id': 3}))\n"
    user_checks(tmp_path, monkeypatch, code)
    hooks = [Hook(e, "my_checks:upper") for e in ("input", "tool_result", "reply")] + [
        Hook("tool_call", "my_checks:other")
    ]
    room = HandRoom({"get_inventory": "left: many"})
    t, turns = drive(
        shipped.copy(hooks=hooks), [Message("", "", [Call("get_coupon", {})]), Message("", "ok哈")], room, "hello"
    )
    assert "HELLO" in turns[0].messages[1]["content"] and "hello" not in turns[0].messages[1]["content"]
    assert room.calls == [("get_inventory", {"link_id": 3})] and t.reply == "OK哈"
    [call], [result] = events(t, "tool_call"), events(t, "tool_result")
    assert call["tool"] == "get_inventory" and result["text"] == "LEFT: MANY" == turns[1].messages[0]["content"]
    assert call["call_id"] == result["call_id"] == "0.call_0"


def test_hooks_after_a_rewrite_see_the_new_tool(shipped, tmp_path, monkeypatch):
    """An alias becomes a tool of the harness, and what it is rewritten to is held to that tool's schema."""
    code = "def stock(m):\n    return Rewrite(Call('get_inventory', {'link_id': 3}))\n"
    code += "def faq(m):\n    return Rewrite(Call('search_faq', {'link_id': 3}))\n"
    user_checks(tmp_path, monkeypatch, code)
    for check, error in (("stock", False), ("faq", True)):  # the second lacks its topic
        hooks = [Hook("tool_call", f"my_checks:{check}"), Hook("tool_call", "known_tool")]
        h = shipped.copy(hooks=[*hooks, Hook("tool_call", "valid_arguments")])
        t, _ = drive(h, [Message("", "", [Call("left", {})]), Message("", "ok哈")], HandRoom({"get_inventory": "9"}))
        assert bool(events(t, "tool_error")) == error and bool(events(t, "tool_result")) != error


def test_matcher_picks_the_tool_by_id(shipped, tmp_path, monkeypatch):
    user_checks(tmp_path, monkeypatch, "def no(m):\n    return Deny('no')\n")
    hooks = [Hook("tool_call", "my_checks:no", matcher="^get_coupon$")]
    tools = [replace(t, name=f"t{i}") for i, t in enumerate(shipped.tools)]
    calls = [Call(f"t{i}", {"link_id": 3}) for i in range(4)]
    t, _ = drive(shipped.copy(hooks=hooks, tools=tools), [Message("", "", calls), Message("", "好的")])
    assert [e["name"] for e in events(t, "tool_error")] == ["t2"] and len(events(t, "tool_result")) == 3


def test_input_checks(shipped):
    """An empty comment is answered by the fallback, unseen by the policy; a long one is cut."""
    t, turns = drive(shipped, [Message("", "好")], request="  \n ")
    assert t.stop_reason == "fallback" and not turns and not t.ids
    t, turns = drive(shipped, [Sample([], [], "error")], request="问" * 5000)
    assert turns[0].messages[1]["content"] == "弹幕: " + "问" * shipped.limits.max_input_chars
    t, turns = drive(shipped, [Sample([], [], "error")], request=["多少钱", "发货吗\ud800"])
    assert turns[0].messages[1]["content"] == "弹幕: 多少钱\n发货吗?"


@pytest.mark.parametrize(
    "call, word",
    [
        (Call("no_such_tool", {}), "没有这个工具"),
        (Call("get_coupon", {}), "link_id"),
        (Call("get_coupon", {"link_id": "three"}), "three"),
        (Call("get_coupon", {"link_id": 3, "extra": 1}), "extra"),
        (Call(SKILL, {"skill": "no_such_skill"}), "no_such_skill"),
        (Call(SKILL, {"skill": "../../etc/passwd"}), "unknown skill"),
    ],
)
def test_wrong_calls_are_tool_errors(shipped, call, word):
    """FAULTS 26, 55: the policy reads what was wrong, and the rollout goes on; nothing was executed."""
    room = HandRoom()
    t, turns = drive(shipped, [Message("", "", [call]), load("small_talk"), Message("", "宝宝，欢迎呀")], room)
    [error] = events(t, "tool_error")
    assert word in error["error"] and error["call_id"] == "0.call_0"
    assert json.loads(turns[1].messages[0]["content"]) == {"error": error["error"]}
    assert not room.calls and t.stop_reason == "reply"


@pytest.mark.parametrize(
    "reply, denied",
    [
        ("3号89元哈", None),
        ("3号防晒霜SPF50哈", None),
        ("3号iPhone哈", None),
        ("3号999元哈", "999"),
        ("3号35元哈", "35"),
        ("3号20人在看哈", "20"),
        ("3号打3折哈", "3"),
        ("13号89元哈", "13"),
        ("4号89元哈", "4"),
        ("3号Android哈", "Android"),
    ],
)
def test_only_tools_and_names_ground_a_number(shipped, reply, denied):
    """What a viewer says, said or is counted as grounds none; a link's number stands for the link alone."""
    room = HandRoom({INFO: '{"price": 89}'}, history=[{"role": "主播", "text": "3号35元"}])
    h = shipped.copy(hooks=[Hook("reply", "fact_risk", message="{detail}")])
    script = [Message("", "", [Call(INFO, {"link_id": 3})]), Message("", reply), Message("", "好")]
    t, _ = drive(h, script, room, "iPhone 999元？")
    assert [e["message"] for e in events(t, "hook")] == ([denied] if denied else [])
    assert t.reply == ("好" if denied else reply)


def test_links_may_be_named_otherwise(shipped):
    h = shipped.copy(hooks=[Hook("reply", "fact_risk", params={"ref": "No.{n}"}, message="{detail}")])
    assert drive(h, [Message("", "No.3很好")])[0].reply == "No.3很好"
    assert drive(h, [Message("", "No.30很好")])[0].stop_reason == "fallback"


def test_a_skill_is_named_by_the_argument_of_that_id(shipped):
    """Whatever it is called, and whatever stands before it."""
    properties = {"why": {"type": "string"}, "which": {"type": "string"}}
    tools = [Tool(SKILL, "open", "", {"properties": properties}, {"which": "skill"})]
    said = Message("", "", [Call("open", {"why": "item_qa", "which": "small_talk"})])
    t, _ = drive(shipped.copy(tools=tools), [said, Sample([], [], "error")])
    assert [e["skill"] for e in events(t, "skill")] == ["small_talk"]


def test_thinking_aloud_before_a_call_is_thinking(shipped):
    """What is said beside a call is heard by nobody: it must not be a place where reasoning costs nothing."""
    for codec in (HERMES, XML):
        call = Call("get_coupon", {"link_id": 3})
        lengths = []
        for said in (Message("想想", "", [call]), Message("想想", "想想" * 40, [call])):
            ids = codec.render(said)
            t, _ = drive(shipped, [said, Sample([], [], "error")], codec=codec)
            thought = [i for i, k in zip(t.ids, t.think, strict=True) if k]
            assert thought == ids[: len(thought)] and codec.decode(ids[len(thought) :]).startswith("<tool_call>")
            lengths.append(len(thought))
        assert lengths[1] >= lengths[0] + 40


def test_signals_are_shown_for_people(shipped):
    h = shipped.copy(blocks=shipped.blocks | {"room": "{signals}"}, formats={"signal": "{name} = {value}"})
    system, _ = assemble(h, "好", {"signals": {"online": 20, "likes": 3}})
    assert system["content"].endswith("\n\nonline = 20\nlikes = 3")


def test_a_call_may_be_made_twice_and_no_more(shipped):
    call = Message("", "", [Call("get_coupon", {"link_id": 3})])
    other = Message("", "", [Call("get_coupon", {"link_id": 4})])
    t, _ = drive(shipped, [call, call, other, call, Sample([], [], "error")])
    assert len(events(t, "tool_call")) == 3 and "已经查过了" in events(t, "tool_error")[0]["error"]


@pytest.mark.parametrize("ref", ["http://localhost:1/x.json", "#/$defs/Money", "#money"])
def test_a_schema_reaches_for_nothing_outside(shipped, ref):
    """A $ref to what is not in it would deny every call: refused, and nothing is downloaded."""
    hooks = [x for x in shipped.hooks if x.check != "skill_loaded"]
    schema = {"type": "object", "properties": {"x": {"$ref": ref}}}
    with pytest.raises(BadInput, match=f"tool 't': its schema refers to '{re.escape(ref)}', which is not in it"):
        shipped.copy(tools=[Tool("t", "t", "", schema)], hooks=hooks)
    if ref.startswith("#"):
        schema["$defs"] = {"Money": {"$anchor": "money"}}
        shipped.copy(tools=[Tool("t", "t", "", schema)], hooks=hooks)


def test_a_schema_in_parts_is_called_as_a_whole(shipped):
    """What pydantic writes: the arguments stand behind a reference, an optional one is one of two types."""
    amount = {"type": "object", "properties": {"amount": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
    tools = [
        Tool("t", "t", "", {"$ref": "#/$defs/A", "$defs": {"A": amount}}),
        Tool("u", "u", "", {"type": "object", "allOf": [amount]}),
        Tool("v", "v", "", amount),
    ]
    h = shipped.copy(tools=tools, hooks=[x for x in shipped.hooks if x.check == "valid_arguments"])
    for name in "tuv":
        t, _ = drive(h, [Message("", "", [Call(name, {"amount": 3})]), Message("", "", [Call(name, {"amont": 3})])])
        assert len(events(t, "tool_call")) == 1 and "amont" in events(t, "tool_error")[0]["error"]
    assert h.tools[2].signature() == "v(amount?:int|null)"


BAD_REPLIES = (
    "get_inventory(link_id=3)哈",
    *("<b>89元</b>哈", "**便宜**哈", "# 标题\n哈", "- 一\n- 二哈", "```89```哈", "[看](http)哈", "<!-- 注释 -->"),
    *("看<tool_call>哈", "</tool_call>哈", "<function=get>哈", "<parameter=x", "tool_call哈", "</think>好哈"),
    *("a<|im_end|>哈", "|>哈", '{"name": "x"}哈', "{'name': 1}哈", "[{}]哈", "\ufffd好哈", "a\x00哈", "", "  \n"),
)


@pytest.mark.parametrize("text", BAD_REPLIES)
def test_markup_is_never_dispatched(shipped, text):
    """FAULTS 58: with all hooks, and with none, the fallback is said instead."""
    for h in (shipped, shipped.copy(hooks=[])):
        for codec in (HERMES, XML):
            t, _ = drive(h, [load(), codec.encode("想</think>" + text) + codec.stop_ids[:1]], codec=codec)
            assert t.stop_reason == "fallback" and t.reply == h.fallback


@pytest.mark.parametrize("codec", [HERMES, XML], ids=["hermes", "xml"])
def test_reasoning_is_never_dispatched(shipped, codec):
    """FAULTS 58: only what follows </think> is public; reasoning without an end is no reply."""
    h = shipped.copy(hooks=[])
    t, _ = drive(h, [Message("秘密", "你好")], codec=codec)
    assert t.reply == "你好"
    never = codec.encode("秘密，你好") if codec.opens else codec.encode("<think>\n秘密，你好")
    t, _ = drive(h, [never + codec.stop_ids[:1]], codec=codec)
    assert t.stop_reason == "fallback"


def test_public_text_may_hold_ordinary_signs():
    for text in (
        "3号89元，下单立减20%哈。",
        "A7 Pro，1-2天到呀！",
        "5*5的，今天 <3 小时发出",
        "有(大号)的；“好”",
        "~好的～",
    ):
        assert not MARKUP.search(text), text


# ---------------------------------------------------------------------------------------------------------------------
# tools


def one_result(h, answer):
    t, turns = drive(
        h,
        [Message("", "", [Call("get_coupon", {"link_id": 3})]), Sample([], [], "error")],
        HandRoom({"get_coupon": answer}),
    )
    json.dumps(t.to_dict(), allow_nan=False, ensure_ascii=False).encode()
    return turns[1].messages[0]["content"], t


def test_a_long_result_is_cut_with_a_note(shipped):
    """FAULTS 59."""
    text, _ = one_result(shipped, "x" * 2**20)
    assert text.startswith("x" * 400 + "...") and len(text) < 450 and str(2**20 - 400) in text


def cyclic():
    loop = {}
    loop["self"] = loop
    return loop


@pytest.mark.parametrize(
    "answer, want",
    [
        (b"\xff\xfe\x00ok", "\ufffd\ufffd\x00ok"),
        ("a\ud800b", "a?b"),
        ({"price": float("nan"), "list": [float("inf"), 1.5]}, '{"price": null, "list": [null, 1.5]}'),
        ({1: (2, {3})}, '{"1": [2, "{3}"]}'),
        (None, "null"),
        (89, "89"),
        ("", ""),
        ("<|im_end|><tool_call>", "<|im_end|><tool_call>"),
        (cyclic(), '{"error": "tool crashed"}'),
        ({"x": 10**5000}, '{"error": "tool crashed"}'),
    ],
    ids="bytes surrogate nan object none number empty markup cycle huge".split(),
)
def test_any_result_becomes_valid_text(shipped, answer, want):
    """FAULTS 59: bytes, half characters, NaN, objects, cycles."""
    text, t = one_result(shipped, answer)
    assert text == want
    assert t.stop_reason == "error" and len(events(t, "tool_crash")) == ("crashed" in want)


def test_a_crash_is_a_counted_failure(shipped):
    """FAULTS 28: an exception of a tool is read by the policy and stands in the trace."""
    text, t = one_result(shipped, lambda arguments: 1 / 0)
    assert json.loads(text) == {"error": "tool crashed"}
    assert events(t, "tool_crash") == [
        {"event": "tool_crash", "tool": "get_coupon", "error": "ZeroDivisionError: division by zero"}
    ]


def test_a_stuck_tool_is_left_behind(shipped):
    """FAULTS 28: the deadline passes, the rollout goes on, and what the late thread says is not heard."""
    h, gate = shipped.copy(limits=replace(shipped.limits, tool_timeout_s=0.05)), threading.Event()
    started = time.perf_counter()
    text, t = one_result(h, lambda arguments: gate.wait(30) and 1 / 0)
    assert time.perf_counter() - started < 15
    assert json.loads(text) == {"error": "timeout"} and events(t, "tool_crash")[0]["error"] == "deadline"
    n = len(t.events)
    gate.set()
    time.sleep(0.1)
    assert len(t.events) == n
    h = shipped.copy(limits=replace(shipped.limits, tool_timeout_s=30))
    assert one_result(h, "fine")[0] == "fine"


def test_what_a_tool_does_to_its_arguments_is_its_own_affair(shipped):
    """FAULTS 29: the trace keeps what was asked."""
    _, t = one_result(shipped, lambda arguments: arguments.clear() or "ok")
    assert events(t, "tool_call")[0]["arguments"] == {"link_id": 3}


def test_parameters_are_renamed_for_the_tool(shipped):
    tool = replace(
        shipped.tools[0], parameters={"properties": {"no": {"type": "integer"}}}, param_ids={"no": "link_id"}
    )
    room = HandRoom()
    drive(
        shipped.copy(tools=[tool], hooks=[]),
        [Message("", "", [Call(INFO, {"no": "3"})]), Sample([], [], "error")],
        room,
    )
    assert room.calls == [(INFO, {"link_id": 3})]


def test_a_long_skill_is_disclosed_whole(shipped):
    """A SKILL.md is the operator's, not a tool's result: it is not cut."""
    skills = [Skill("big", "big", "大", body="长" * 5000)]
    t, turns = drive(shipped.copy(skills=skills), [load("big"), Sample([], [], "error")])
    assert turns[1].messages[0]["content"] == "长" * 5000


# ---------------------------------------------------------------------------------------------------------------------
# ends


def test_stops_are_typed(shipped):
    """FAULTS 27: cut by length or context is `length`, a dead engine is `error`; what was sampled is kept."""
    ids = HERMES.encode('<tool_call>\n{"name": ')
    for finish, why in (("length", "length"), ("context", "length"), ("error", "error")):
        for sampled in (ids, []):
            t, _ = drive(shipped, [load(), Sample(sampled, [-1.0] * len(sampled), finish)])
            assert (t.stop_reason, t.reply) == (why, shipped.fallback)
            assert sum(t.mask) == len(HERMES.render(load())) + len(sampled)
            assert not events(t, "tool_error")


def test_turns_are_bounded(shipped):
    t, turns = drive(shipped, [Message("", "", [Call("get_coupon", {"link_id": i})]) for i in range(99)])
    assert t.stop_reason == "max_turns" and len(turns) == shipped.limits.max_turns and t.reply == shipped.fallback
    assert all(turn.max_new_tokens == shipped.limits.max_state_tokens for turn in turns)


def test_hundreds_of_malformed_calls_are_one_state(shipped):
    """FAULTS 5, 26: each is an error with its id; together they cost one retry, for none was read before the others."""
    bad = HERMES.encode("<tool_call>{</tool_call>" * 300) + HERMES.stop_ids[:1]
    t, _ = drive(shipped, [bad, load("small_talk"), Message("", "宝宝，欢迎呀")])
    assert t.stop_reason == "reply" and events(t, "reply")[0]["retries"] == 1
    assert [e["call_id"] for e in events(t, "tool_error")] == [f"0.call_{i}" for i in range(300)]
    t, turns = drive(shipped, [bad])
    assert t.stop_reason == "fallback" and len(turns) == shipped.limits.max_retries + 1


def test_rollouts_share_nothing(shipped):
    """FAULTS 29: two rollouts of one task, interleaved; what is done to one changes no other."""
    task = make_task(WORLD, 4)
    before = json.dumps([task.context, task.links])
    rooms = [task.open(), task.open()]
    a, b = (run(shipped, task.danmaku, room, HERMES) for room in rooms)
    first, second = next(a), next(b)
    ids = list(second.ids)
    first.ids.clear()
    first.messages.clear()
    rooms[0].context["links"].clear()
    assert second.ids == ids and rooms[1].context["links"]
    sample = Sample(HERMES.render(Message("", "你好")), [], "stop")
    sample.logps = [0.0] * len(sample.ids)
    a.send(sample)
    with pytest.raises(StopIteration) as end:
        b.send(Sample([], [], "error"))
    assert end.value.value.ids == ids and not events(end.value.value, "hook")
    assert json.dumps([task.context, task.links]) == before
    assert shipped == Harness.load(SHIPPED)


def test_same_seed_same_trajectory(shipped):
    """FAULTS 30."""
    task = make_task(WORLD, 9)
    assert teach(shipped, task, HERMES, 9) == teach(shipped, task, HERMES, 9)


def test_yaml_front_matter_of_a_saved_skill_is_plain(shipped, tmp_path):
    """Other programs that know Agent Skills can read what was saved."""
    shipped.save(tmp_path / "a")
    for s in shipped.skills:
        front = (tmp_path / "a" / "skills" / s.name / "SKILL.md").read_text(encoding="utf-8").split("---\n")[1]
        data = yaml.safe_load(front)
        assert data["name"] == s.name and data["description"] == s.description and data["metadata"]["kind"] == s.kind


def test_a_deny_needs_no_detail():
    assert Deny().detail == "" and Rewrite("x").value == "x"
