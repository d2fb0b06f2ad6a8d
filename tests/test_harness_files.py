"""The harness on disk: what loads, what is refused in one line, what is shown under which name."""

import datetime
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from chat import Sample
from checks import Hook
from options import BadInput
from common import seed_of
from data.random_harness import random_harness
from facts import score
from harness import Harness, assemble
from parts import Limits, Tool, load_skill, load_tool
from sim import World, make_task
from test_chat import HERMES, teach
from test_harness import HandRoom, drive

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "data" / "harness"
WORLD = World.load(ROOT / "data" / "world" / "zh.json")
INFO, SKILL = "get_product_info_by_link_id", "load_skill"


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
    path.write_text(json.dumps(data, ensure_ascii="ud83d" in str(data)), encoding="utf-8")


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


def test_what_the_policy_never_reads_is_kept(folder, shipped):
    """A licence of a skill, `strict` of a tool: neither shows, so neither counts, and saving loses neither."""
    path = folder / "skills" / "item_qa" / "SKILL.md"
    text = path.read_text(encoding="utf-8").replace("\nmeta", "\nlicense: MIT\nmeta", 1)
    text = text.replace("\n  id: item_qa", "\n  id:\n  tags: [a, b]\n  day: 2024-01-02\n  author:")
    path.write_text(text, encoding="utf-8")
    (folder / "skills" / "README.md").write_text("not a skill")
    edit(folder / "tools.json", lambda d: d[1]["function"].update(strict=True))
    edit(folder / "tools.json", lambda d: d[1]["function"]["parameters"]["properties"].update(any=True))
    h = Harness.load(folder)
    any_id = replace(h.tools[1], param_ids=h.tools[1].param_ids | {"any": "some"})
    h = h.copy(tools=[h.tools[0], any_id, *h.tools[2:]])
    h.save(folder)
    again = Harness.load(folder)
    more = {"tags": ["a", "b"], "day": datetime.date(2024, 1, 2)}
    assert again.skill("item_qa").extra == {"license": "MIT", "metadata": more}
    assert again.tools[1].extra == {"strict": True}
    assert again.tools[1].param_ids["any"] == "some" and again.tools[1].parameters["properties"]["any"] == {}
    edit(folder / "tools.json", lambda d: d[1]["function"].update(strict=False))  # OpenAI's `strict` of a function
    assert Harness.load(folder).commit == again.commit


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
    "null": lambda h: {"tools": [_defaulted(h.tools[0]), *h.tools[1:]]},
    "parameter order": lambda h: {"tools": [*h.tools[:4], _turned(h.tools[4]), *h.tools[5:]]},
}


def _defaulted(tool):
    return replace(tool, parameters=tool.parameters | {"default": None})


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
        assert old != new or change == "null", line


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
    "date": (GOOD.replace("kind: reply", "kind: reply\n  closing: 2024-01-02"), ["closing", "text or a number"]),
    "kind list": (GOOD.replace("kind: reply", "kind: [reply]"), ["metadata.kind is ['reply']"]),
    "no front matter": ("# 标题\n", [":1:", "---"]),
    "empty": ("", [":1:", "---"]),
    "unclosed": ("---\nname: item_qa\ndescription: x\n", [":1:", "not closed"]),
    "list": ("---\n- a\n---\n", [":2:", "mapping"]),
    "text": ("---\nname\n---\n", [":2:", "mapping"]),
    "bad yaml": ("---\nname: item_qa\ndescription: a: b\n---\n", [":3:", "YAML"]),
    "bad texts of types": (GOOD.replace("description: 回复", "description: !!bool maybe"), ["YAML"]),
    "folded description": (GOOD.replace("description: 回复", "description: >\n  回复"), None),
    "max_chars": (GOOD.replace("kind: reply", "max_chars: thirty"), ["max_chars", "whole number"]),
    "yes and no": (GOOD.replace("kind: reply", "closing: no"), ["closing", "text or a number"]),
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
    with pytest.raises(BadInput):
        shipped.copy(system=[name], blocks=shipped.blocks | {name: "x"})


CLAIM = {"event": "reply", "check": "forbidden_claims"}
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
    "x-id": ("tools", lambda d: d[1]["function"].update({"x-id": ["a"]}), ["tools.json[1]", "x-id", "text"]),
    "half a character": (
        "tools",
        lambda d: d[1]["function"].update(description="\ud83d"),
        ["tools.json", "surrogates"],
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
    "matcher without a tool": (
        "hooks",
        lambda d: d[0].update(matcher="^get_"),
        ["hooks.json[0]", "no tool at 'input'"],
    ),
    "text check of a call": (
        "hooks",
        lambda d: d[0].update(check="reply_length", event="tool_call"),
        ["hooks.json[0]"],
    ),
    "call check of a text": ("hooks", lambda d: d[0].update(check="known_tool"), ["hooks.json[0]", "'input'"]),
    "words": ("hooks", lambda d: d.append(CLAIM | {"params": {"words": "绝对"}}), ["hooks.json[11]", "list"]),
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
    "unknown key of all": ("harness", lambda d: d.update(falback="x"), ["harness.json", "falback", "fallback"]),
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
    for text in ("3", '"x"', "null", "[[" if name == "harness" else "{}", "[" * 10**5, "9" * 5001):
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
