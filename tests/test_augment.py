"""HSA: another surface of the same harness, an exact log, disjoint pools, and an oracle that scores as before."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import augment as hsa
from augment import DIMENSIONS, augment
from reword import POOLS, bank, new_name
from chat import Call, Codec, Message
from checks import Hook, Moment
from options import BadInput
from data import names as base_names
from envelope import KINDS, Envelope
from facts import REWARDS, score
from harness import Harness, assemble
from parts import LOAD_SKILL, SKILL_NAME, Skill, Tool, load_skill, load_tool
from sim import Faults, World, make_task
from test_chat import HERMES, teach
from test_harness import HandRoom, drive, events, load

ROOT = Path(__file__).parent.parent
H = Harness.load(ROOT / "data" / "harness")
WORLD, TEST = (World.load(ROOT / "data" / "world" / "zh.json", split) for split in ("train", "test"))
TOKENS = Codec(Tokenizer.from_file(str(ROOT / "data" / "base-small" / "tokenizer.json")))
CONTEXT = make_task(WORLD, 3).context
SOME = Faults(0.1, 0.1, 0.1)
FOLDER_KINDS = tuple(kind for kind in KINDS if kind not in ("camel", "han"))  # names that a skill's folder may have
NOTHING = Envelope(**dict.fromkeys(DIMENSIONS, 0.0))
ALWAYS = Envelope(**dict.fromkeys(DIMENSIONS, 1.0), rename=1.0, describe=1.0, reword=1.0, reorder=1.0, restyle=1.0)
MODULES = {  # what a dimension may touch in the shipped harness, as Harness.diff names it
    "skill_id": r"skills/\w+(/name|/description)?|skills order",
    "skill_content": r"skills/\w+/(body|rules)(/\w+)?",
    "tool": r"tools/\w+/(name|description|order|parameters/properties/\w+/description)|tools order",
    "prompt": r"blocks/\w+|formats/\w+|system|limits/(max_reply_chars|max_turns)",
    "hook": r"hooks/[\w.:]+( 2)?(/message)?|hooks order|limits/(max_retries|max_turns)",
}


def only(dimension: str, e: Envelope = ALWAYS) -> Envelope:
    return replace(e, **{name: float(name == dimension) for name in DIMENSIONS})


def places(h: Harness, other: Harness) -> list[str]:
    """What Harness.diff says changed, without the values."""
    return [line.removeprefix("- ").partition(": ")[0] for line in h.diff(other)]


def under(place: str, above: str) -> bool:
    return place == above or place.startswith(above + "/")


def rendered(h: Harness) -> str:
    """All that the policy can come to read."""
    messages = assemble(h, "弹幕", CONTEXT) + [x.schema() for x in h.tools]
    texts = [h.skill_text(s) for s in h.skills] + [h.fill(x.message) for x in h.hooks] + [h.fallback]
    return json.dumps([messages, texts], ensure_ascii=False)


def needs(task) -> set[str]:
    return {task.reply_skill, task.strategy}


# ---------------------------------------------------------------------------------------------------------------------
# the contract


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_dimension_changes_its_module_alone_and_the_log_says_all_of_it(dimension):
    """Each place that Harness.diff finds stands in the log, each entry of the log is such a place, with its values."""
    seen = Counter()
    for pool in POOLS:
        for seed in range(40):
            h, log = augment(H, seed, only(dimension), pool, keep={"item_qa"})
            changed = places(H, h)
            assert changed and h.commit != H.commit
            done = [e for e in log if e["change"] not in ("kept", "rejected")]
            for place in changed:
                assert re.fullmatch(MODULES[dimension], place), place
                assert any(under(place, e["at"]) for e in done), (place, seed)
            assert {e["dimension"] for e in log} == {dimension}
            for e in done:
                assert any(under(place, e["at"]) for place in changed), (e, seed)
                if e["change"] == "rename":
                    id, kind = e["at"].split("/")[1], e["at"].split("/")[0][:-1]
                    assert getattr(H, kind)(id).name == e["from"] and getattr(h, kind)(id).name == e["to"]
            seen.update(e["change"] for e in done)
    wanted = {
        "skill_id": {"rename", "describe", "noise", "mask", "reorder"},
        "skill_content": {"recast", "mask"},
        "tool": {"rename", "describe", "reorder"},
        "prompt": {"recast", "reorder", "format", "limit"},
        "hook": {"message", "retries", "correction"},
    }
    assert set(seen) == wanted[dimension]


def test_nothing_is_nothing():
    for pool in POOLS:
        h, log = augment(H, 5, NOTHING, pool)
        assert h.commit == H.commit and not log and h is not H
    quiet = Envelope(rename=0, describe=0, reword=0, reorder=0, restyle=0, noise=(0, 0), mask_skill=0, mask_rule=0)
    quiet = replace(quiet, correct=0, reply_chars=(1, 1), turns=(1, 1), retries=(0, 0), **dict.fromkeys(DIMENSIONS, 1))
    for seed in range(20):
        assert augment(H, seed, quiet)[0].commit == H.commit


def test_same_seed_same_harness():
    """FAULTS 30."""
    for pool in POOLS:
        made = [augment(H, s, pool=pool) for s in range(20)]
        assert [augment(H, s, pool=pool) for s in reversed(range(20))] == made[::-1]
        assert len({h.commit for h, _ in made}) == 20
    assert Harness.load(ROOT / "data" / "harness") == H


def test_to_leave_one_out_leaves_the_others_as_they_were():
    for seed in range(12):
        e = replace(ALWAYS, kinds=("telling", "pinyin"))  # kinds of few names: some are taken
        whole = augment(H, seed, e)[0]
        for name in DIMENSIONS:
            part = augment(H, seed, replace(e, **{name: 0.0}))[0]
            for place in places(whole, part):
                kind, _, id = place.removesuffix("/name").partition("/")  # a name may be taken in one of the two
                taken = (
                    kind == "tools" and name == "skill_id" and part.tool(id) and part.tool(id).name in rendered(whole)
                )
                assert re.fullmatch(MODULES[name], place) or place == "limits/max_turns" or taken, (name, place)


def test_ids_functions_and_rules_stay():
    for pool in POOLS:
        for seed in range(40):
            h, _ = augment(H, seed, replace(ALWAYS, mask_skill=0, mask_rule=0), pool)
            assert {s.id for s in H.skills} == {s.id for s in h.skills if not s.id.startswith("noise_")}
            assert {t.id for t in h.tools} == {t.id for t in H.tools}
            for s in H.skills:
                assert h.skill(s.id).rules == s.rules and h.skill(s.id).kind == s.kind
                assert sorted(hsa.PLACEHOLDER.findall(s.body)) == sorted(hsa.PLACEHOLDER.findall(h.skill(s.id).body))
            for t in H.tools:
                mine = h.tool(t.id)
                assert mine.param_ids == t.param_ids and mine.parameters.keys() == t.parameters.keys()
            assert [x.check for x in h.hooks][: len(H.hooks)] == [x.check for x in H.hooks]
            assert [x.params for x in h.hooks][: len(H.hooks)] == [x.params for x in H.hooks]


def test_an_augmented_harness_can_be_augmented():
    h = H
    for seed in range(12):
        h, log = augment(h, seed, replace(ALWAYS, noise=(1, 1)), POOLS[seed % 2])
        assert log and {t.id for t in h.tools} == {t.id for t in H.tools}
    assert len(h.skills) <= 2 * len(H.skills)  # noise of former rounds may be masked again


def test_save_and_load_give_an_equal_harness(tmp_path):
    for seed in range(10):
        h, _ = augment(H, seed, replace(ALWAYS, kinds=FOLDER_KINDS, correct=1), POOLS[seed % 2], keep=set())
        h.save(tmp_path / str(seed))
        assert Harness.load(tmp_path / str(seed)).commit == h.commit


# ---------------------------------------------------------------------------------------------------------------------
# names


def test_no_old_name_is_left():
    """FAULTS 53: a grep of the whole rendered harness finds no old name."""
    old = [x.name for x in (*H.tools, *H.skills)]
    assert all(name in rendered(H) for name in old)
    for pool in POOLS:
        for seed in range(50):
            text = rendered(augment(H, seed, ALWAYS, pool)[0])
            assert not [name for name in old if name in text]


def test_mentions_without_placeholders_are_renamed_too():
    """FAULTS 53: in bodies, descriptions, blocks and messages of strangers; whole words, and only names."""
    body = (
        "Call get_inventory (not get_inventory_v2), then read item_qa. `compare` comes after.\nSee {tool:get_coupon}."
    )
    skills = [*H.skills, Skill("guide", "guide", "Use before item_qa, item_qa-plus is another", "strategy", body)]
    schema = {"properties": {"x": {"anyOf": [{"type": "string", "description": "as of get_inventory"}]}}}
    tools = [*H.tools, Tool("odd", "odd_one", "Not get_inventory", schema)]
    hooks = [*H.hooks, Hook("reply", "not_empty", message="先用get_inventory查，再用item_qa回")]
    blocks = {**H.blocks, "role": "You know get_inventory. {skills_of_old} get_inventory(link_id=3)"}
    h = H.copy(skills=skills, tools=tools, hooks=hooks, blocks=blocks)
    for seed in range(20):
        new, log = augment(h, seed, replace(ALWAYS, reword=0, describe=0, hook=0, skill_content=0, restyle=0))
        assert all(any(under(place, e["at"]) for e in log) for place in places(h, new))
        tool, qa, compare = new.tool("get_inventory").name, new.skill("item_qa").name, new.skill("compare").name
        want = body.replace("get_inventory (", f"{tool} (").replace("item_qa", qa).replace("compare", compare)
        assert new.skill("guide").body == want
        assert new.skill("guide").description == f"Use before {qa}, item_qa-plus is another"
        assert new.tool("odd").parameters["properties"]["x"]["anyOf"][0]["description"] == f"as of {tool}"
        assert new.hooks[-1].message == f"先用{tool}查，再用{qa}回"
        assert new.blocks["role"].count(tool) == 2 and "{skills_of_old}" in new.blocks["role"]


def moved(text: str, where: str = "rules", seeds: int = 40, **changes) -> list[str]:
    """What a block with this text becomes in the prompt dimension, for each seed."""
    h = H.copy(blocks={**H.blocks, where: text}, **changes)
    return [augment(h, seed, only("prompt"))[0].blocks[where] for seed in range(seeds)]


@pytest.mark.parametrize(
    "text, together",
    [
        ("- Be brief.\n- Answer with this template:\n```json\n{}\n```", "template:\n```json"),
        ("- 说话客气\n- 本场链接：\n{links}", "本场链接：\n{links}"),
        ("- One\n- A long line that is wrapped\nhere without indentation.", "wrapped\nhere without indentation."),
        ("- 如果有货，就报库存。\n- 否则说暂时查不到。", "库存。\n- 否则"),
        ("- If in stock, say so.\n- Otherwise say that you do not know.", "say so.\n- Otherwise"),
        ('~~~python\nfind = create("important")\n- x\n- y\n~~~', 'find = create("important")\n- x\n- y\n'),
        ("````\n```\n- x\n- y\n```\n- z\n````", "```\n- x\n- y\n```\n- z"),
        ("````\n```\n- x\n- y\n````", "```\n- x\n- y\n````"),
        ("```\n```json\n- x\n- y\n```", "```json\n- x\n- y\n```"),
        ("Do this.\n\n    create = find(important)\n    - x\n    - y", "create = find(important)\n    - x\n    - y"),
    ],
)
def test_what_belongs_together_stays_together(text, together):
    assert all(together in new for new in moved(text))


def test_bullets_of_their_own_move():
    assert len({*moved("- 说话客气\n- 不要着急\n- 多笑一笑")}) > 3


def test_what_is_asked_comes_last_among_bullets_too():
    for new in moved("# 请求\n- 历史：{history}\n- 弹幕：{danmaku}", H.user):
        assert new.index("{history}") < new.index("{danmaku}")


def test_a_format_keeps_placeholders_of_ones_own():
    h = H.copy(formats={**H.formats, "link": "{link_id}. {name} {price}元"})
    assert all(augment(h, seed, only("prompt"))[0].formats["link"] == h.formats["link"] for seed in range(30))
    assert len({augment(H, seed, only("prompt"))[0].formats["link"] for seed in range(30)}) > 5


def test_addresses_and_files_keep_their_names_and_metadata_does_not():
    """FAULTS 53: a rule of one's own that names a tool is shown too."""
    skill = Skill("pdf", "pdf-tools", "Work with PDFs", body="Use {first_tool}.", rules={"first_tool": "get_inventory"})
    linked = replace(skill, body="Use {first_tool}. Run scripts/pdf-tools/run.py, see https://x.com/a/pdf-tools/issues")
    for seed in range(20):
        new = augment(H.copy(skills=[*H.skills, linked]), seed)[0]
        body = new.skill("pdf").body
        assert "scripts/pdf-tools/run.py" in body and "x.com/a/pdf-tools/issues" in body
        tool = new.tool("get_inventory").name
        assert f"Use {tool}." in new.skill_text(new.skill("pdf"))
    names = {augment(H.copy(skills=[*H.skills, skill]), seed)[0].skill("pdf").name for seed in range(20)}
    assert len(names) > 5


def test_a_name_that_is_a_word_of_prose_is_kept():
    """Nobody can tell whether "compare" is meant; a quoted or called one is meant."""
    skills = [*H.skills, Skill("guide", "guide", "How to compare two things", body="Compare, or `logistics`.")]
    new, log = augment(H.copy(skills=skills), 1, only("skill_id", replace(ALWAYS, describe=0, noise=(0, 0))))
    assert new.skill("compare").name == "compare" and new.skill("guide").description == "How to compare two things"
    assert [e["at"] for e in log if e["change"] == "kept"] == ["skills/compare/name"]
    assert new.skill("logistics").name != "logistics" and f"`{new.skill('logistics').name}`" in new.skill("guide").body


def test_names_are_plain_tokens_of_many_kinds():
    """A name is the same tokens in the list, in the call and in a sentence: a small model copies token by token."""
    rng = random.Random(0)
    for pool in POOLS:
        words = bank(pool).names
        assert set(words["han"]) <= set(base_names.HAN)  # a token each
        for kind in KINDS:
            drawn = {new_name(words, kind, "get_product_price", {"get": "grab"}, 0, rng) for _ in range(80)}
            assert len(drawn) > (8 if kind == "telling" else 50)
            for name in drawn:
                Tool("t", name, "", {}).validate()
                Skill("s", name, "d").validate()
                assert kind not in FOLDER_KINDS or SKILL_NAME.fullmatch(name)
                own = TOKENS.encode(name)
                assert len(own) <= 24
                for text in (
                    f"查库存：{name}(link_id:int)",
                    f'{{"name": "{name}", "arguments": {{}}}}',
                    f"用{name}查。",
                ):
                    ids = TOKENS.encode(text)
                    assert any(ids[i : i + len(own)] == own for i in range(len(ids))), (name, text)


def test_telling_names_tell():
    sense = {"get": "grab", "inventory": "supply"}
    drawn = {new_name(bank("train").names, "telling", "get_inventory", sense, 0, random.Random(s)) for s in range(60)}
    assert {"grab_supply"} < drawn and all({"grab", "supply"} & set(name.split("_")) for name in drawn)


def test_a_hundred_tools_get_a_hundred_names():
    tools = [load_tool({"name": f"get_order_{i}", "description": f"Get order {i}"}) for i in range(120)]
    h = H.copy(tools=[*H.tools, *tools])
    for kind in KINDS:
        new, _ = augment(h, 3, only("tool", replace(ALWAYS, kinds=(kind,), describe=0)))
        assert len({t.name for t in new.tools}) == 127 and not {t.name for t in new.tools} & {t.name for t in h.tools}


# ---------------------------------------------------------------------------------------------------------------------
# the task stays what it was


def either_world(seed: int):
    return make_task((WORLD, TEST)[seed % 2], seed)


@cache
def before(seed: int) -> dict:
    """What the oracle scores under the shipped harness."""
    return score(H, either_world(seed), teach(H, either_world(seed), HERMES, seed, SOME, verbosity=seed % 3, slip=0.2))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("envelope", [Envelope(), replace(ALWAYS, correct=1.0, mask_skill=0.6, mask_rule=0.4)])
def test_the_oracle_scores_as_before(pool, envelope):
    """FAULTS 53: whatever fails, all four rewards are 1 under both harnesses, and no old name is said."""
    denials = 0
    for seed in range(100):
        task = either_world(seed)
        h, log = augment(H, seed, envelope, pool, keep=needs(task))
        t = teach(h, task, HERMES, seed, SOME, verbosity=seed % 3, slip=0.2)
        assert score(h, task, t) == before(seed) == dict.fromkeys(REWARDS, 1.0), (seed, t.reply)
        said = HERMES.decode(t.ids)
        renamed = [e["from"] for e in log if e["change"] == "rename"]
        assert renamed or envelope.skill_id < 1
        assert not [name for name in renamed if name in said]
        denials += sum(e["event"] == "hook" and e["verdict"] == "deny" for e in t.events)
    assert denials > (30 if envelope.correct == 1 else 5)


def test_limits_stay_in_their_legal_range():
    e = replace(NOTHING, prompt=1.0, hook=1.0, reply_chars=(0.9, 1.3), turns=(0.5, 2.0), retries=(-1, 2), correct=0.0)
    drawn = [augment(H, seed, e)[0].limits for seed in range(120)]
    chars, turns, retries = (
        {getattr(x, key) for x in drawn} for key in ("max_reply_chars", "max_turns", "max_retries")
    )
    assert min(chars) == 54 and max(chars) == 78 and len(chars) > 15
    assert turns == set(range(8, 17))  # the prompt does not show it: never stricter
    assert retries == {1, 2, 3, 4}
    shown = H.copy(blocks={**H.blocks, "role": "最多{max_turns}轮。"})
    assert min(augment(shown, seed, e)[0].limits.max_turns for seed in range(40)) == 4
    others = ("max_input_chars", "max_state_tokens", "max_result_chars", "tool_timeout_s")
    assert all(getattr(x, key) == getattr(H.limits, key) for x in drawn for key in others)
    none = H.copy(limits=replace(H.limits, max_retries=0))
    assert {augment(none, seed, e)[0].limits.max_retries for seed in range(30)} == {0, 1, 2}


def test_a_limit_that_a_text_spells_out_stays():
    h = H.copy(blocks={**H.blocks, "role": "回复不超过60字。"})
    assert {augment(h, seed, only("prompt"))[0].limits.max_reply_chars for seed in range(20)} == {60}


def test_skills_are_masked_only_where_the_task_does_not_need_them():
    e = only("skill_id", replace(ALWAYS, mask_skill=1.0, noise=(0, 0)))
    assert len(augment(H, 0, e)[0].skills) == 7  # nobody said what the task needs
    left = {s.id for s in augment(H, 0, e, keep={"compare"})[0].skills}
    assert left == {"compare", "item_qa"}  # compare sends to item_qa, which is a reply skill too
    for seed in range(10):
        left = [s.kind for s in augment(H, seed, e, keep=set())[0].skills]
        assert {"reply", "strategy"} == set(left)  # the last of its kind stays: hooks may wait for one
    skills = [replace(s, rules={**s.rules, "optional": True}) if s.id == "logistics" else s for s in H.skills]
    assert {s.id for s in H.skills} - {s.id for s in augment(H.copy(skills=skills), 0, e)[0].skills} == {"logistics"}


def test_rules_are_masked_with_what_checks_them():
    """Forms may go, prohibitions never; a rule that shares its sentence with something else stays."""
    e = only("skill_content", replace(ALWAYS, mask_rule=1.0))
    for seed in range(10):
        h, _ = augment(H, seed, e)
        assert {key for s in h.skills for key in s.rules} == {"must_not_say"}
        assert {x for s in h.skills for x in hsa.PLACEHOLDER.findall(s.body)} == {
            *("{must_not_say}", "{tool:get_product_info_by_link_id}", "{skill:item_qa}")
        }
    rules = {"closing": "哈", "must_say": "找客服"}
    odd = Skill("odd", "odd", "奇怪", "reply", "先说答案，再用“{closing}”收尾，并感谢。\n必须说“{must_say}”。", rules)
    assert augment(H.copy(skills=[odd]), 0, e)[0].skills[0].rules == {"closing": "哈"}
    stiff = Skill("stiff", "stiff", "标题", "reply", "# 结尾用“{closing}”\n说清楚。\n必须说“{must_say}”。", rules)
    assert augment(H.copy(skills=[stiff]), 0, e)[0].skills[0].rules == {"closing": "哈"}
    bare = Skill("bare", "bare", "只有规矩", "reply", "必须说“{must_say}”。", {"must_say": "找客服"})
    assert augment(H.copy(skills=[bare]), 0, e)[0].skills[0].rules == bare.rules  # nothing would be left


def test_prompts_stay_short():
    """Prompt length is the cost on a CPU: a quarter more at most, on average over seeds."""

    def length(h):
        return len(TOKENS.prompt(assemble(h, "3号链接多少钱？", CONTEXT)))

    for pool in POOLS:
        grown = [length(augment(H, seed, pool=pool)[0]) / length(H) for seed in range(50)]
        assert 0.95 < sum(grown) / len(grown) < 1.25, grown
        assert max(grown) < 1.7


def test_every_order_is_met():
    """Blocks, skills, tools, parameters, sentences of a reply skill; not the steps of a strategy."""
    first, bodies, keys = Counter(), set(), set()
    e = replace(ALWAYS, reword=0.0, restyle=0.0, mask_rule=0.0, noise=(0, 0), mask_skill=0.0)
    for seed in range(60):
        h, _ = augment(H, seed, e)
        first.update([("block", h.system[0]), ("skill", h.skills[0].id), ("tool", h.tools[0].id)])
        bodies.add(h.skill("price_promo").body)
        keys.add(tuple(h.tool("search_faq").parameters["properties"]))
        assert h.skill("compare").body == H.skill("compare").body
    assert Counter(kind for kind, _ in first) == {"block": 5, "skill": 7, "tool": 7}
    assert len(bodies) == 6 and len(keys) == 2


# ---------------------------------------------------------------------------------------------------------------------
# options that are off by default


def test_parameters_are_renamed_on_request():
    for pool in POOLS:
        for seed in range(15):
            task = make_task(WORLD, seed)
            h, log = augment(H, seed, replace(ALWAYS, rename_parameters=1.0), pool, keep=needs(task))
            shown = {key for t in h.tools for key in t.parameters["properties"]}
            assert len(shown) == 3 and not shown & {"link_id", "topic", "skill"}
            for t in h.tools:
                assert sorted(t.param_ids.values()) == sorted(H.tool(t.id).param_ids.values())
                assert set(t.parameters["required"]) == set(t.parameters["properties"]) == set(t.param_ids)
            for place in places(H, h):
                assert any(under(place, e["at"]) for e in log)
            t = teach(h, task, HERMES, seed, SOME)
            assert score(h, task, t) == dict.fromkeys(REWARDS, 1.0)
    assert not any(e["at"].endswith("param_ids") for seed in range(20) for e in augment(H, seed, ALWAYS)[1])


def test_a_schema_that_refers_to_its_keys_keeps_them():
    schema = {"type": "object", "properties": {"link_id": {"type": "integer"}}, "dependentRequired": {"link_id": []}}
    h = H.copy(tools=[*H.tools, Tool("odd", "odd", "Odd", schema)])
    new, _ = augment(h, 0, only("tool", replace(ALWAYS, rename_parameters=1.0)))
    assert all("link_id" in t.parameters["properties"] for t in new.tools if "link_id" in h.tool(t.id).param_ids)
    assert "topic" not in new.tool("search_faq").parameters["properties"]


def test_the_tool_list_may_change_its_form():
    e = only("prompt", replace(ALWAYS, native_tools=1.0))
    native, _ = augment(H, 1, e)
    assert native.native_tools and "{tools}" not in "".join(native.blocks[b] for b in native.system)
    back, log = augment(native, 1, e)
    assert not back.native_tools and sum("{tools}" in back.blocks[b] for b in back.system) == 1
    for place in places(native, back):
        assert any(under(place, e["at"]) for e in log)
    mixed = H.copy(blocks={**H.blocks, "tools": "前言\n{tools}\n后语"})
    assert not augment(mixed, 1, e)[0].native_tools


def test_the_loader_lists_what_it_loads():
    """A parameter that enumerates the skills follows their names, noise and masks."""
    loader = H.tool(LOAD_SKILL)
    schema = {"type": "string", "enum": [s.name for s in H.skills]}
    loader = replace(loader, parameters={**loader.parameters, "properties": {"skill": schema}})
    h = H.copy(tools=[*H.tools[:-1], loader])
    for seed in range(10):
        new, _ = augment(h, seed, only("skill_id", replace(ALWAYS, mask_skill=0.5)), keep={"item_qa"})
        assert new.tool(LOAD_SKILL).parameters["properties"]["skill"]["enum"] == [s.name for s in new.skills]


def test_no_part_of_the_loaders_schema_keeps_an_old_name():
    """FAULTS 53: an enum of some skills and other words, a default, examples. Another tool's values are its own."""
    names = [s.name for s in H.skills]
    schema = {"type": "string", "enum": ["", *names[1:]], "default": names[1], "examples": names, "title": names[2]}
    loader = replace(H.tool(LOAD_SKILL), parameters={"type": "object", "properties": {"skill": schema}})
    own = {"type": "string", "enum": [*names], "default": names[1]}
    other = replace(H.tools[0], parameters={"type": "object", "properties": {"sort_by": own}}, param_ids={})
    h = H.copy(tools=[other, *H.tools[1:-1], loader])
    for seed in range(10):
        new, log = augment(h, seed, only("skill_id", ALWAYS))
        made, old = new.tool(LOAD_SKILL).parameters["properties"]["skill"], {s.id: s.name for s in H.skills}
        renamed = {old[s.id]: s.name for s in new.skills if s.id in old}
        assert sorted(made["enum"]) == sorted(["", *(renamed[name] for name in names[1:])])
        assert (made["default"], made["title"]) == (renamed[names[1]], renamed[names[2]])
        assert made["examples"] == [renamed[name] for name in names]
        assert new.tool(other.id).parameters["properties"]["sort_by"] == own
        assert all(any(under(place, e["at"]) for e in log) for place in places(h, new))


# ---------------------------------------------------------------------------------------------------------------------
# hook-triggered corrections


def test_a_reply_is_sent_back_once():
    hook = Hook("reply", "augment:confirm", "", {"pattern": r"\d"}, "数字再看一遍")
    h = H.copy(hooks=[*H.hooks, hook])
    say = [load("small_talk"), Message("", "宝宝，欢迎呀")]
    t, _ = drive(h, say)
    assert t.stop_reason == "reply" and not [e for e in events(t, "hook") if e["verdict"] == "deny"]
    look = Message("", "", [Call("get_product_info_by_link_id", {"link_id": 3}), *load().calls])
    right = Message("", "3号链接是防晒霜SPF50，现在券后价89元哈")
    for _ in range(2):  # each rollout anew
        t, turns = drive(h, [look, right, right], HandRoom({"get_product_info_by_link_id": {"price": 89}}))
        assert t.stop_reason == "reply" and turns[2].messages == [{"role": "user", "content": "数字再看一遍"}]


def test_a_reply_must_keep_the_rules_of_the_skill():
    rules = {"opening": "亲", "closing": "哈", "must_say": "找客服", "must_not_say": "马上到", "max_chars": 20}
    skill, plan = Skill("s", "s", "d", "reply", "", rules), Skill("p", "p", "d", "strategy", "", {"closing": "呀"})
    cases = {"亲，找客服哈。": None, "找客服哈": "亲", "亲，找客服": "哈", "亲，好哈": "找客服", "": "亲"}
    cases |= {"亲，找客服，马上到哈": "马上到", "亲，找客服" + "好" * 20 + "哈": "20"}
    for said, broken in cases.items():
        verdict = hsa.skill_rules(Moment(H, said, {}, loaded=[skill, plan]))
        assert (verdict and verdict.detail) == broken, said
    assert hsa.skill_rules(Moment(H, "好", {}, loaded=[plan])) is None
    h = H.copy(hooks=[*H.hooks, Hook("reply", "augment:skill_rules", message="没照“{detail}”")])
    t, turns = drive(h, [load("small_talk"), Message("", "宝宝，欢迎"), Message("", "宝宝，欢迎呀")])
    assert t.stop_reason == "reply" and turns[2].messages[0]["content"] == "没照“呀”"


def test_a_correction_is_paid_for():
    kinds = set()
    for seed in range(60):
        h, log = augment(H, seed, only("hook", replace(ALWAYS, correct=1.0, retries=(0, 0))))
        check, params = h.hooks[-1].check, h.hooks[-1].params
        kinds.add((check, str(params)))
        cost = int(check == "augment:confirm")
        assert h.limits.max_retries == 2 + cost and h.limits.max_turns == 8 + cost
        assert [e["at"] for e in log if e["change"] == "correction"][0] == f"hooks/reply.{check}"
    assert len(kinds) == 3


# ---------------------------------------------------------------------------------------------------------------------
# harnesses of others


def strangers(shared: Path) -> list[Harness]:
    """Harnesses of skills and tools that nobody in this project wrote, in two languages."""
    skills = []
    for path in sorted((shared / "skills").rglob("SKILL.md")):
        try:
            skills.append(load_skill(path))
        except BadInput:
            continue  # a folder of another name: what loads and what does not is test_harness_files' matter
    tools = {}
    for name in ("mcp_cn_commerce", "tau_retail"):
        data = json.loads((shared / "tools" / f"{name}.json").read_text(encoding="utf-8"))
        tools[name] = {x["function"]["name"]: load_tool(x) for x in data}
    assert len(skills) > 4 and len(tools["mcp_cn_commerce"]) > 40
    english = {
        **H.blocks,
        "rules": "# Rules\n- Be kind.\n- Answer in {max_reply_chars} characters.",
        "role": "You help.",
    }
    english |= {"skills": "# Skills\n{skills}", "tools": "# Tools\n{tools}"}
    hooks = [replace(x, message="{detail}") for x in H.hooks]
    return [
        H.copy(skills=[*H.skills, *skills], tools=[*tools["mcp_cn_commerce"].values(), H.tool(LOAD_SKILL)]),
        H.copy(skills=skills, tools=[*tools["tau_retail"].values(), H.tool(LOAD_SKILL)], blocks=english, hooks=hooks),
    ]


def test_harnesses_of_others(shared_data, tmp_path):
    """They validate, change, keep their ids, forget their old names, round-trip; train and heldout stay apart."""
    for i, h in enumerate(strangers(shared_data)):
        texts = {"train": set(), "heldout": set()}
        for seed in range(4):
            pool = POOLS[seed % 2]
            e = replace(ALWAYS, kinds=FOLDER_KINDS, rename_parameters=float(seed > 1), correct=1.0)
            new, log = augment(h, seed, e, pool)
            assert new.commit != h.commit
            assert {t.id for t in new.tools} == {t.id for t in h.tools}
            assert {s.id for s in h.skills} <= {s.id for s in new.skills}
            done = [e for e in log if e["change"] not in ("kept", "rejected")]
            assert all(any(under(place, e["at"]) for e in done) for place in places(h, new))
            texts[pool] |= {e["to"] for e in done if e["change"] == "describe"}
            renamed = [e["from"] for e in done if e["at"].endswith("/name")]
            assert len(renamed) > 0.9 * len(h.tools) + 0.9 * len(h.skills) - 3
            whole = rendered(new)
            for name in renamed:
                edge = "[A-Za-z0-9_]" if name[0].isascii() else "(?!)"
                assert not re.search(
                    f"(?<!{edge})(?<![A-Za-z0-9]-){re.escape(name)}(?!{edge})(?!-[A-Za-z0-9])", whole
                ), name
            assert sum(e["change"] == "rejected" for e in log) < 0.05 * len(log)
            new.save(tmp_path / f"{i}-{seed}")
            assert Harness.load(tmp_path / f"{i}-{seed}").commit == new.commit
        assert len(texts["train"]) > 20 and not texts["train"] & texts["heldout"]


# ---------------------------------------------------------------------------------------------------------------------
# the command


def test_show_prints_a_diff(capsys):
    hsa.main(["show", "--seed", "3"])
    out = capsys.readouterr().out
    h, log = augment(H, 3)
    assert f"commit {H.commit} -> {h.commit}" in out and all(e["at"] in out for e in log)
    assert "\n-你是直播间的数字人主播" in out and "\n--- before" in out and all(line in out for line in H.diff(h))


def test_show_knows_the_skills_to_keep():
    with pytest.raises(BadInput, match="--keep: no skill 'item_q' in data/harness; did you mean item_qa?"):
        hsa.main(["show", "--keep", "item_q", "--harness", "data/harness"])


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_show_one_dimension(dimension, capsys):
    hsa.main(["show", "--only", dimension, "--pool", "heldout", "--harness", str(ROOT / "data" / "harness")])
    log = capsys.readouterr().out.partition("\ncommit")[0].splitlines()
    assert log and {line.split()[0] for line in log} == {dimension}


@pytest.mark.parametrize(
    "argv",
    [[], ["diff"], ["show", "--pool", "test"], ["show", "--only", "all the rest"], ["show", "--tool", "2"]]
    + [["show", "--noise", "2,1"], ["show", "--kinds", "snake,latin"], ["show", "--harness", "nowhere"]],
)
def test_wrong_commands_are_one_line(argv):
    with pytest.raises(BadInput) as error:
        hsa.main(argv)
    assert "\n" not in str(error.value)


def test_wrong_envelopes_and_pools():
    for wrong in (dict(noise=(3, 1)), dict(kinds=()), dict(kinds=("latin",)), dict(turns=(2.0, 1.0))):
        with pytest.raises(BadInput, match="envelope"):
            Envelope(**wrong)
    with pytest.raises(BadInput, match="train | heldout"):
        augment(H, 0, pool="test")
