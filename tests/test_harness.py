"""The harness on disk, its hooks, and the one loop: whatever a file, a policy, a tool or a viewer does."""

import json
import random
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from chat import Call, Message, Sample
from checks import EVENTS, MARKUP, Deny, Hook, Rewrite
from common import BadInput, seed_of
from data.random_harness import random_harness
from facts import score
from harness import Harness, assemble, main, run
from parts import Limits, Skill, Tool, load_skill, load_tool
from sim import World, make_task
from oracle import teach
from test_chat import HERMES, XML

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


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "h")
    return tmp_path / "h"


def edit(path, change):
    """Change a JSON file in place."""
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def tree(path):
    return {p.relative_to(path): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def refused(folder, *words):
    """Loading gives one line that says all the words, and leaves the directory as it is."""
    before = tree(folder)
    with pytest.raises(BadInput) as e:
        Harness.load(folder)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500
    for word in words:
        assert word in str(e.value), str(e.value)
    assert tree(folder) == before


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
# on disk


def test_shipped_harness_loads(shipped):
    assert [len(shipped.skills), len(shipped.tools), len(shipped.hooks)] == [7, 7, 11]
    assert {s.id for s in shipped.skills if s.kind == "strategy"} == {"compare", "multi_intent"}
    assert re.fullmatch(r"[0-9a-f]{12}", shipped.commit)
    system, user = assemble(shipped, "多少钱", HandRoom().context)
    for thing in [*shipped.skills, *shipped.tools]:
        assert thing.name in system["content"] and thing.description in system["content"]
    assert "60字" in system["content"] and "{" not in system["content"] + user["content"]


def test_save_and_load_give_an_equal_harness(shipped, tmp_path):
    shipped.save(tmp_path / "a")
    again = Harness.load(tmp_path / "a")
    assert again == shipped and again.commit == shipped.commit and again.diff(shipped) == []
    again.save(tmp_path / "a")
    assert Harness.load(tmp_path / "a").commit == shipped.commit


def test_save_keeps_the_order_and_every_text(shipped, tmp_path):
    """Order shows in the prompt, so it is part of the commit and of the files."""
    tools, skills = shipped.tools[::-1], shipped.skills[::-1]
    skills[0] = replace(
        skills[0], description="是: “引号” # 不是注释", body="---\n正文 {a}\n\n| 1 | {b: 2}", rules={"version": "1.0"}
    )
    blocks = shipped.blocks | {"unused": "x", "role": "第一行\n\n第二行"}
    h = shipped.copy(skills=skills, tools=tools, blocks=blocks, limits=Limits(max_turns=3, tool_timeout_s=0.5))
    h.save(tmp_path / "a")
    again = Harness.load(tmp_path / "a")
    assert again.commit == h.commit != shipped.commit
    assert assemble(again, "好", HandRoom().context) == assemble(h, "好", HandRoom().context)


def test_save_refuses_a_directory_with_other_skills(shipped, folder):
    """A folder left over from an old name would be loaded as one skill more."""
    renamed = shipped.copy(skills=[replace(shipped.skills[0], name="other"), *shipped.skills[1:]])
    before = tree(folder)
    with pytest.raises(BadInput, match="new directory"):
        renamed.save(folder)
    assert tree(folder) == before


@pytest.mark.parametrize("name", ["查价", "getPrice", "x" * 65])
def test_save_writes_nothing_that_load_refuses(shipped, tmp_path, name):
    """In memory, under augmentation, a skill may have any name; on disk it is a folder's."""
    with pytest.raises(BadInput, match="cannot be saved"):
        shipped.copy(skills=[replace(shipped.skills[0], name=name)]).save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_copy_shares_nothing_and_knows_its_fields(shipped):
    twin = shipped.copy()
    twin.tools[0].parameters["properties"].clear()
    twin.skills[0].rules["closing"] = "呀"
    twin.hooks[0].params["x"] = 1
    assert shipped == Harness.load(SHIPPED)
    with pytest.raises(TypeError):
        shipped.copy(skils=[])


CHANGES = {
    "skill name": lambda h: {"skills": [replace(h.skills[0], name="other"), *h.skills[1:]]},
    "skill order": lambda h: {"skills": h.skills[::-1]},
    "skill gone": lambda h: {"skills": h.skills[1:]},
    "body far down": lambda h: {"skills": [replace(h.skills[1], body="长" * 300 + "甲"), h.skills[0], *h.skills[2:]]},
    "tool description": lambda h: {"tools": [replace(h.tools[0], description="新"), *h.tools[1:]]},
    "tool order": lambda h: {"tools": h.tools[::-1]},
    "hook order": lambda h: {"hooks": h.hooks[::-1]},
    "second hook of a kind": lambda h: {
        "hooks": [*h.hooks, Hook("reply", "forbidden_claims", params={"words": ["马上"]})]
    },
    "limit": lambda h: {"limits": replace(h.limits, max_turns=3)},
    "block": lambda h: {"blocks": h.blocks | {"role": "你是助手。"}},
    "block order": lambda h: {"system": h.system[::-1]},
    "format": lambda h: {"formats": h.formats | {"link": "{name}"}},
    "fallback": lambda h: {"fallback": "稍等"},
    "parameter order": lambda h: {"tools": [*h.tools[:4], _turned(h.tools[4]), *h.tools[5:]]},
}


def _turned(tool):
    properties = dict(reversed(tool.parameters["properties"].items()))
    return replace(tool, parameters=tool.parameters | {"properties": properties})


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_has_its_commit_and_its_line(shipped, change):
    """Commit and diff tell the same: all that can show in a prompt or in a verdict."""
    other = shipped.copy(**CHANGES[change](shipped))
    assert other.commit != shipped.commit
    lines = shipped.diff(other)
    assert lines and all(line.startswith("- ") and "\n" not in line for line in lines)
    for line in lines:
        old, new = line.split(": ", 1)[1].split(" -> ", 1)
        assert old != new, line


def test_diff_names_module_and_place(shipped):
    [line] = shipped.diff(shipped.copy(limits=replace(shipped.limits, max_turns=3)))
    assert line == "- limits/max_turns: 8 -> 3"
    lines = shipped.diff(shipped.copy(skills=[replace(shipped.skills[0], name="other"), *shipped.skills[1:]]))
    assert lines == ["- skills/after_sale/name: after_sale -> other"]


def test_commit_does_not_depend_on_what_never_shows(shipped):
    assert shipped.copy(blocks={"unused": "x"} | dict(reversed(shipped.blocks.items()))).commit == shipped.commit


GOOD = "---\nname: item_qa\ndescription: 回复\nmetadata:\n  kind: reply\n---\n正文\n"
SKILLS = {  # FAULTS 54: what stands in skills/item_qa/SKILL.md -> words of the refusal, None: it loads
    "crlf": (GOOD.replace("\n", "\r\n"), None),
    "bom": ("\ufeff" + GOOD, None),
    "both": ("\ufeff" + GOOD.replace("\n", "\r\n"), None),
    "spaces after the dashes": (GOOD.replace("---\n", "--- \n"), None),
    "no body": (GOOD.replace("正文\n", ""), None),
    "other metadata": (GOOD.replace("kind: reply", "kind: reply\n  author: me\n  version: 1.0"), None),
    "date": (GOOD.replace("kind: reply", "kind: reply\n  day: 2024-01-02"), ["day", "text or a number"]),
    "no front matter": ("# 标题\n", [":1:", "---"]),
    "empty": ("", [":1:", "---"]),
    "unclosed": ("---\nname: item_qa\ndescription: x\n", [":1:", "not closed"]),
    "list": ("---\n- a\n---\n", [":2:", "mapping"]),
    "text": ("---\nname\n---\n", [":2:", "mapping"]),
    "bad yaml": ("---\nname: item_qa\ndescription: a: b\n---\n", [":3:", "YAML"]),
    "bad date": ("---\nname: item_qa\ndescription: 2024-13-45\n---\n", ["YAML"]),
    "deep yaml": ("---\nname: " + "[" * 1000 + "\n---\n", ["YAML"]),
    "no name": ("---\ndescription: x\n---\n", ["name"]),
    "no description": ("---\nname: item_qa\n---\n", ["description"]),
    "blank description": ("---\nname: item_qa\ndescription: '  '\n---\n", ["description"]),
    "long description": (f"---\nname: item_qa\ndescription: {'x' * 1025}\n---\n", ["1024"]),
    "longest description": (f"---\nname: item_qa\ndescription: {'x' * 1024}\n---\n", None),
    "uppercase": (GOOD.replace("item_qa", "Item_QA"), ["lowercase"]),
    "number": (GOOD.replace("item_qa", "123"), ["lowercase"]),
    "long name": (GOOD.replace("item_qa", "a" * 65), ["1-64"]),
    "other folder": (GOOD.replace("item_qa", "item-qa"), ["folder", "item_qa"]),
    "up": (GOOD.replace("item_qa", "../item_qa"), ["name"]),
    "absolute": (GOOD.replace("item_qa", "/etc/passwd"), ["name"]),
    "metadata list": (GOOD.replace("kind: reply", "- a"), ["metadata"]),
    "kind": (GOOD.replace("kind: reply", "kind: other"), ["kind", "reply or strategy"]),
    "hidden rule": (GOOD.replace("kind: reply", "kind: reply\n  closing: 哈"), ["SKILL.md", "closing", "{closing}"]),
    "double id": (
        GOOD.replace("kind: reply", "id: compare"),
        ["skills/item_qa/SKILL.md", "two skills", "compare", "skills/compare/SKILL.md"],
    ),
}


@pytest.mark.parametrize("case", SKILLS)
def test_skill_files(folder, case):
    """FAULTS 54, 55, 56: a SKILL.md loads, or one line names the file and the line."""
    text, words = SKILLS[case]
    path = folder / "skills" / "item_qa" / "SKILL.md"
    path.write_bytes(text.encode("utf-8"))
    if words is None:
        skill = Harness.load(folder).skill("item_qa")
        assert skill.name == "item_qa" and skill.body == ("" if case == "no body" else "正文" if "正文" in text else "")
    else:
        refused(folder, "item_qa" if "double" not in case else "h", *words)


def test_skill_that_is_not_utf8_or_not_there(folder):
    """FAULTS 54: bytes of another encoding, and a folder without SKILL.md."""
    path = folder / "skills" / "item_qa" / "SKILL.md"
    path.write_bytes(GOOD.encode("gbk"))
    refused(folder, "SKILL.md", "UTF-8")
    path.unlink()
    refused(folder, "item_qa", "no such file")


@pytest.mark.parametrize("name", ["..", "../up", "/etc", "a/b", "a\\b", ".hidden", "", "a..b", 5, None])
def test_names_that_leave_the_folder_are_refused(folder, shipped, name):
    """FAULTS 55: block and skill names become file names, on load and before any save."""
    edit(folder / "harness.json", lambda d: d["system"].append(name))
    refused(folder, "harness.json", "plain file name")
    with pytest.raises(BadInput):
        shipped.copy(skills=[replace(shipped.skills[0], name=name)])


HARNESS_FILES = {  # (file, change) -> words: FAULTS 56, refused at load and not at run
    "two tools": ("tools", lambda d: d.append(d[0]), ["tools.json[7]", "two tools", INFO]),
    "tool list": ("tools", lambda d: d.append(3), ["tools.json[7]", "name"]),
    "tool without a name": ("tools", lambda d: d[1]["function"].pop("name"), ["tools.json[1]", "name"]),
    "tool name": ("tools", lambda d: d[1]["function"].update(name="a b"), ["tools.json[1]", "a b"]),
    "tool schema": ("tools", lambda d: d[1]["function"]["parameters"].update(type=3), ["tools.json[1]", "schema"]),
    "one x-id twice": (
        "tools",
        lambda d: [p.update({"x-id": "n"}) for p in d[4]["function"]["parameters"]["properties"].values()],
        ["tools.json[4]", "x-id"],
    ),
    "load_skill without a skill": (
        "tools",
        lambda d: d[6]["function"].update(parameters={"properties": {"name": {}}}),
        ["tools.json[6]", "skill"],
    ),
    "unknown check": ("hooks", lambda d: d[0].update(check="no_such"), ["hooks.json[0]", "no_such", "built in"]),
    "no such module": ("hooks", lambda d: d[0].update(check="no.such:f"), ["no.such:f", "imported"]),
    "no such function": ("hooks", lambda d: d[0].update(check="json:no_such"), ["json:no_such"]),
    "check params": ("hooks", lambda d: d[0].update(params={"x": 1}), ["hooks.json[0]", "not_empty", "params"]),
    "params list": ("hooks", lambda d: d[0].update(params=[1]), ["params"]),
    "unknown event": ("hooks", lambda d: d[0].update(event="output"), ["output", "tool_result"]),
    "unknown key": ("hooks", lambda d: d[0].update(when="x"), ["hooks.json[0]"]),
    "hook text": ("hooks", lambda d: d.append("x"), ["hooks.json[11]"]),
    "matcher": ("hooks", lambda d: d[0].update(matcher="("), ["hooks.json[0]", "matcher", "regular expression"]),
    "no load_skill": ("tools", lambda d: d.pop(6), ["hooks.json[7]", "load_skill"]),
    "no such kind": ("hooks", lambda d: d[7].update(params={"kind": "replies"}), ["hooks.json[7]", "kind"]),
    "turns": ("harness", lambda d: d["limits"].update(max_turns=0), ["harness.json", "max_turns", "1"]),
    "half a turn": ("harness", lambda d: d["limits"].update(max_turns=1.5), ["max_turns", "int"]),
    "retries": ("harness", lambda d: d["limits"].update(max_retries=-1), ["max_retries", "0"]),
    "chars": ("harness", lambda d: d["limits"].update(max_reply_chars="60"), ["max_reply_chars"]),
    "true": ("harness", lambda d: d["limits"].update(max_reply_chars=True), ["max_reply_chars"]),
    "endless": ("harness", lambda d: d["limits"].update(tool_timeout_s=float("inf")), ["tool_timeout_s"]),
    "nan": ("harness", lambda d: d["limits"].update(tool_timeout_s=float("nan")), ["tool_timeout_s"]),
    "unknown limit": ("harness", lambda d: d["limits"].update(max_turn=3), ["max_turn", "known"]),
    "limits": ("harness", lambda d: d.update(limits=3), ["limits"]),
    "no name": ("harness", lambda d: d.pop("name"), ["name"]),
    "no system": ("harness", lambda d: d.pop("system"), ["system"]),
    "system": ("harness", lambda d: d.update(system="role"), ["system"]),
    "no block": ("harness", lambda d: d["system"].append("extra"), ["extra.md"]),
    "formats": ("harness", lambda d: d["formats"].update(tols="x"), ["tols"]),
    "fallback": ("harness", lambda d: d.update(fallback="<b>稍等</b>"), ["fallback"]),
}


@pytest.mark.parametrize("case", HARNESS_FILES)
def test_wrong_files_are_refused_at_load(folder, case):
    """FAULTS 56."""
    name, change, words = HARNESS_FILES[case]
    edit(folder / f"{name}.json", change)
    refused(folder, str(folder), *words)


@pytest.mark.parametrize("name", ["harness", "tools", "hooks"])
def test_unparseable_json_names_file_line_and_column(folder, name):
    """FAULTS 60: one line with the place; nothing on disk is touched."""
    path = folder / f"{name}.json"
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[1] = lines[1] + " oops"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(BadInput) as e:
        Harness.load(folder)
    line, column = map(int, re.search(rf"{name}\.json:(\d+):(\d+)", str(e.value)).groups())
    assert line in (2, 3) and column >= 1
    refused(folder, "JSON")
    for text in ("3", '"x"', "null", "[[" if name == "harness" else "{}"):
        path.write_text(text, encoding="utf-8")
        refused(folder, f"{name}.json")
    path.unlink()
    refused(folder, f"{name}.json")


def test_bom_and_crlf_in_every_file(folder, shipped):
    """FAULTS 54: an editor on Windows changes no meaning."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert Harness.load(folder).commit == shipped.commit


def test_hidden_folders_are_no_skills(folder, shipped):
    (folder / "skills" / ".git").mkdir()
    (folder / "skills" / "notes.txt").write_text("x")
    assert Harness.load(folder).commit == shipped.commit


def test_skill_folders_of_others_load_or_say_why(shared_data):
    """FAULTS 54: published skills load; the three whose name is not their folder's say so in one line."""
    loaded, errors = [], []
    for path in sorted((shared_data / "skills").rglob("SKILL.md")):
        try:
            loaded.append(load_skill(path))
        except BadInput as e:
            errors.append(str(e))
    assert len(loaded) >= 6 and all(s.body and s.description for s in loaded)
    assert any("\u4e00" <= c <= "\u9fff" for s in loaded for c in s.body)
    assert not any("\r" in s.body for s in loaded)
    assert all("\n" not in e and "folder" in e and "SKILL.md:2" in e for e in errors)


def test_tools_of_others_load(shared_data, shipped):
    """Published tool lists are Tools, with a signature and a schema that equals what was read."""
    for name in ("tau_retail", "mcp_cn_commerce"):
        data = json.loads((shared_data / "tools" / f"{name}.json").read_text(encoding="utf-8"))
        tools = {t.name: t for t in map(load_tool, data)}
        shipped.copy(tools=list(tools.values()), hooks=[])
        for each in data:
            t = load_tool(each)
            assert t.schema()["function"] == {k: each["function"][k] for k in ("name", "description", "parameters")}
            assert t.signature().startswith(t.name + "(") and "\n" not in t.signature()


SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


@pytest.mark.parametrize("key", ["parameters", "inputSchema", "input_schema"])
def test_tool_dialects(key, folder):
    """OpenAI, MCP tools/list and Anthropic tools are read alike, and written as OpenAI's."""
    bare = {"name": "look", "description": "看", key: SCHEMA}
    want = Tool("look", "look", "看", SCHEMA, {"q": "q"})
    assert load_tool(bare) == load_tool({"type": "function", "function": bare}) == want
    path = folder / "tools.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({"tools": [*data, bare]}), encoding="utf-8")
    assert Harness.load(folder).tool("look") == want


def test_tool_without_parameters():
    t = load_tool({"name": "now"})
    assert t.signature() == "now()" and t.parameters == {"type": "object", "properties": {}}


def test_signatures_of_odd_schemas():
    """A type may be a list or absent, an enum may hold numbers, a schema may be `true`."""
    kinds = {"a": {"type": ["string", "null"]}, "b": {}, "c": {"enum": [1, 2]}, "d": True, "e": {"enum": ["x", "y"]}}
    assert (
        load_tool({"name": "f", "parameters": {"properties": kinds}}).signature()
        == "f(a?:str|null, b?:any, c?:1|2, d?:any, e?:x|y)"
    )


# ---------------------------------------------------------------------------------------------------------------------
# names


def test_renamed_harness_shows_no_old_name(shipped):
    """FAULTS 53: prompt, disclosed bodies, hook messages and the oracle's trajectory know the new names only."""
    originals = {x.name for x in [*shipped.skills, *shipped.tools]}
    checked = 0
    for seed in range(60):
        h = random_harness(shipped, random.Random(seed_of("names", seed)))
        new = " ".join(x.name for x in [*h.skills, *h.tools])
        old = {name for name in originals if name not in new}  # a random name may happen to hold an original one
        task = make_task(WORLD, seed)
        t = teach(h, task, HERMES, seed, verbosity=2, slip=0.5)
        shown = [HERMES.decode(t.ids), *(h.skill_text(s) for s in h.skills)]
        shown += [h.fill(hook.message, {}) for hook in h.hooks]
        for name in old:
            assert not any(re.search(rf"(?<!\w){name}(?!\w)", text) for text in shown), (seed, name)
        assert "{tool:" not in "".join(shown) and "{skill:" not in "".join(shown)
        assert set(score(h, task, t).values()) == {1.0}
        checked += len(old)
    assert checked > 600


def test_the_trace_speaks_in_ids(shipped):
    """FAULTS 53: under any names, what was done is the same."""

    def done(h, seed):
        t = teach(h, make_task(WORLD, seed), HERMES, seed)
        kinds = ("tool_call", "skill")
        return [
            (e.get("tool"), e.get("skill"), e.get("arguments"))
            for e in t.events
            if e["event"] in kinds and e.get("tool") != SKILL
        ]

    for seed in range(30):
        assert done(random_harness(shipped, random.Random(seed)), seed) == done(shipped, seed)


def test_braces_of_viewers_and_tools_are_not_filled(shipped):
    """Text that looks like a placeholder is text: filling is one pass."""
    t, [turn] = drive(shipped, [Sample([], [], "error")], request="{skills} {tool:load_skill} {max_turns}")
    assert turn.messages[1]["content"] == "弹幕: {skills} {tool:load_skill} {max_turns}"


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


def test_a_schema_reaches_for_nothing_outside(shipped):
    """A $ref to somewhere else is an error in the trace, not a download."""
    tool = Tool("t", "t", "", {"type": "object", "properties": {"x": {"$ref": "http://localhost:1/x.json"}}})
    h = shipped.copy(tools=[tool], hooks=[x for x in shipped.hooks if x.check != "skill_loaded"])
    t, _ = drive(h, [Message("", "", [Call("t", {"x": 1})])])
    assert "Unresolvable" in events(t, "hook_error")[0]["error"] and t.stop_reason == "fallback"


BAD_REPLIES = (
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


# ---------------------------------------------------------------------------------------------------------------------
# commands


def test_trace_shows_the_worst_first_and_names_a_torn_line(shipped, tmp_path, capsys):
    t = teach(shipped, make_task(WORLD, 0), HERMES, 0)
    path = tmp_path / "t.jsonl"
    rows = [json.dumps(replace(t, seed=i, rewards={"tool": r}).to_dict()) for i, r in enumerate((1.0, None, 0.5))]
    path.write_text("\n".join([*rows, ""]), encoding="utf-8")
    main(["trace", str(path), "--count", "2"])
    out = capsys.readouterr().out
    assert out.index("== seed 1 ") < out.index("== seed 2 ") and "== seed 0 " not in out
    for bad in (rows[0][:50], "[]", "3", '{"when": 1}', '{"ids": [1]}'):
        path.write_text("\n".join([rows[0], bad]), encoding="utf-8")
        with pytest.raises(BadInput, match=r"t\.jsonl:2: not a stored rollout"):
            main(["trace", str(path)])


@pytest.mark.parametrize("argv", [[], ["shw"], ["trace"], ["trace", "--count"], ["show", "--no-such"], ["--seed", "3"]])
def test_wrong_commands_are_one_line(argv):
    with pytest.raises(BadInput):
        main(argv)


def test_help_and_show(capsys):
    for word in ("-h", "--help"):
        with pytest.raises(SystemExit) as end:
            main([word])
        assert end.value.code == 0 and "--greedy" in capsys.readouterr().out
    main(["show", "--harness", str(SHIPPED), "--world", str(ROOT / "data" / "world" / "zh.json")])
    assert "[system]" in capsys.readouterr().out
