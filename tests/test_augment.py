"""HSA: another surface of the same harness, an exact log, disjoint pools, and an oracle that scores as before."""

import json
import random
import re
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
from tokenizers import Tokenizer

import augment as hsa
from augment import DIMENSIONS, FOLDER_KINDS, KINDS, Envelope, augment
from parts import RULES
from reword import POOLS, Endpoint, bank, new_name, unfaithful
from chat import Call, Codec, Message
from checks import Hook, Moment
from common import BadInput
from data import names as base_names
from data import random_harness as base
from facts import REWARDS, score
from harness import FORMATS, Harness, assemble
from oracle import teach
from parts import LOAD_SKILL, SKILL_NAME, Skill, Tool, load_skill, load_tool
from sim import Faults, World, make_task
from test_chat import HERMES
from test_harness import HandRoom, drive, events, load

ROOT = Path(__file__).parent.parent
H = Harness.load(ROOT / "data" / "harness")
WORLD, TEST = (World.load(ROOT / "data" / "world" / "zh.json", split) for split in ("train", "test"))
TOKENS = Codec(Tokenizer.from_file(str(ROOT / "data" / "base-small" / "tokenizer.json")))
CONTEXT = make_task(WORLD, 3).context
SOME = Faults(0.1, 0.1, 0.1)
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
# pools


def leaves(node, path=()):
    """(path, train, heldout) of each pool in a file."""
    if isinstance(node, dict) and set(node) == set(POOLS):
        yield path, node["train"], node["heldout"]
    elif isinstance(node, dict):
        for key, inner in node.items():
            yield from leaves(inner, (*path, key))


POOL_FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "data/hsa").glob("*.json")}


@pytest.mark.parametrize("file", POOL_FILES)
def test_train_and_heldout_have_nothing_in_common(file):
    """Not in one pool, and no wording anywhere in the one half that is anywhere in the other."""
    found, halves = list(leaves(POOL_FILES[file])), {"train": set(), "heldout": set()}
    assert len(found) > 20
    for path, train, heldout in found:
        assert train and heldout and not set(map(str, train)) & (set(map(str, heldout)) - {"{x}"}), path
        assert file == "names" or len(set(map(str, train))) >= len(train) - 1, path  # {x} alone is there twice
        if path[0] == "phrases":
            assert path[1] not in (*train, *heldout)
        for pool, half in zip(POOLS, (train, heldout)):
            halves[pool] |= set(map(str, half)) - {"{x}"}
    assert not halves["train"] & halves["heldout"]


def outcome(pool: str, h: Harness, seeds: range) -> tuple[set[str], set[str]]:
    """(names, other texts) that a pool gave."""
    made, texts = set(), set()
    for seed in seeds:
        for e in augment(h, seed, ALWAYS, pool)[1]:
            if e["change"] == "rename":
                made.add(e["to"])
            elif e["change"] in ("describe", "message", "correction") and isinstance(e["to"], str):
                texts.add(e["to"])
            elif e["change"] == "noise":
                made.add(e["to"]["name"])
                texts |= {e["to"]["description"], e["to"]["body"]}
    return made, texts


def test_what_train_and_heldout_give_has_nothing_in_common():
    """Names (by parts), descriptions, messages, noise: over many seeds no outcome of the one is one of the other."""
    old = {x.message for x in H.hooks} | {x.description for x in (*H.skills, *H.tools)}
    (names, texts), (other_names, other_texts) = (outcome(pool, H, range(50)) for pool in POOLS)
    assert len(names) > 300 and len(texts) > 100
    assert not names & other_names and not texts & other_texts and not (texts | other_texts) & (old - {"{detail}"})
    parts = [set(re.findall(r"[a-z]+", " ".join(x).lower())) for x in (names, other_names)]
    han = [set(re.findall(r"[\u4e00-\u9fff]", " ".join(x))) for x in (names, other_names)]
    assert len(parts[0]) > 100 and len(han[0]) > 20 and not parts[0] & parts[1] and not han[0] & han[1]


def of_the_base(name: str) -> bool:
    """Whether data/random_harness.py, on which the base model was pre-trained, may draw this name."""
    telling = {w for words in base.MEANING.values() for w in words.split()}
    snake, words = name.split("_"), set(base.WORDS) | telling | set(base.ACTIONS)
    camel = [w.lower() for w in re.findall(r"[A-Za-z][a-z]*", name)]
    return (
        set(snake) <= words
        or set(snake) <= set(base.PINYIN)
        or all(re.fullmatch(f"(?:{'|'.join(base.SYLLABLES)}){{1,3}}", part) for part in snake)
        or ("".join(camel) == name.lower() and set(camel) <= set(base.WORDS))
        or re.fullmatch(r"[a-z]\d{1,2}", name) is not None
        or set(name) <= set(base.HANZI)
    )


def test_no_name_is_one_of_the_base_or_a_shipped_one():
    assert all(of_the_base(base.random_name(random.Random(s))) for s in range(300))
    shipped = {x.name for x in (*H.tools, *H.skills)}
    for pool in POOLS:
        names = outcome(pool, H, range(40, 80))[0]
        assert len(names) > 200 and not shipped & names
        assert not [name for name in names if of_the_base(name)]


def test_no_wording_is_one_of_the_base():
    theirs = {x for pool in (*base.LINES, *base.ABOUT.values(), *base.RULES.values()) for x in pool}
    theirs |= {x for pool in (*base.TITLES.values(), *base.MESSAGES.values(), *base.FORMATS.values()) for x in pool}
    theirs |= {verb + x for pool in base.TOOLS.values() for x in pool for verb in ("", *base.VERBS)}
    theirs |= {start + x for k, pool in base.SKILLS.items() for x in pool for p in base.PREFIX.values() for start in p}
    theirs |= set(base.EXTRA_SKILLS) | set(base.EXTRA_TOOLS) | set(base.ROLES) | set(base.CURRENT) | set(base.REQUESTS)
    theirs = {x.rstrip("。") for x in theirs}
    assert len(theirs) > 300
    for path, *halves in leaves(POOL_FILES["zh"]):
        for text in (x if isinstance(x, str) else x["description"] for half in halves for x in half):
            assert text not in theirs, (path, text)


def test_every_text_of_the_shipped_harness_is_known_to_the_bank():
    """So that all of it changes, and no rewrite is refused."""
    for pool in POOLS:
        words = bank(pool)
        descriptions = [x.description for x in (*H.tools, *H.skills)] + [x.message for x in H.hooks[:1] + H.hooks[2:]]
        for text in descriptions:
            assert text in words.sentences, text
        bodies = [*(s.body for s in H.skills), *(H.blocks[b] for b in H.blocks)]
        for line in (line for body in bodies for line in body.split("\n")):
            title = words.title(line)
            for said in [title] if title else hsa.SENTENCE.split(line):
                assert not said or words.knows(said) or hsa.PLACEHOLDER.fullmatch(said) or title in words.sentences
        for seed in range(30):
            assert not [e for e in augment(H, seed, ALWAYS, pool)[1] if e["change"] in ("rejected", "kept")]


@pytest.mark.parametrize("lang", ["zh", "en"])
def test_pools_keep_what_they_stand_for(lang):
    """Each wording is faithful to its sentence, each rule says its key, each format shows all of its line."""
    data = POOL_FILES[lang]
    wordings = [x for k, halves in data["phrases"].items() for x in (k, *halves["train"], *halves["heldout"])]
    assert len(wordings) == len(set(wordings))
    for source, halves in data["phrases"].items():
        for text in (*halves["train"], *halves["heldout"]):
            assert unfaithful(source, text) == "", (source, text)
    assert set(data["rules"]) == set(RULES) and set(hsa.CORRECTIONS) == set(data["corrections"])
    for pool in POOLS:
        for key, halves in data["rules"].items():
            assert all(hsa.plain_rule(text) == key for text in halves[pool])
        for key, halves in data["formats"].items():
            fields = hsa.PLACEHOLDER.findall(FORMATS[key])
            assert all(sorted(hsa.PLACEHOLDER.findall(text)) == sorted(fields) for text in halves[pool])
            if key in ("skill", "tool"):  # most have the description first: then a name is found in one step
                name = "{signature}" if key == "tool" else "{name}"
                assert sum(x.index("{description}") < x.index(name) for x in halves[pool]) >= 0.75 * len(halves[pool])
        for frame in (x for key in ("frames", "messages", "headings") for x in data[key][pool]):
            assert frame.count("{x}") == 1
        assert {"reply", "strategy"} == {x.get("kind", "reply") for x in data["noise"][pool]}


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
# texts


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("最多60字", "至多60字", ""),
        ("最多60字", "至多80字", "numbers"),
        ("重试两次", "重试三次", "numbers"),
        ("Try two times", "Try three times", "numbers"),
        ("结尾用“{closing}”。", "以“{closing}”收尾。", ""),
        ("结尾用“{closing}”。", "以{closing}收尾。", "quotes"),
        ("结尾用“{closing}”。", "以“哈”收尾。", "placeholders"),
        ("用{tool:a}查", "用{tool:b}查", "placeholders"),
        ('Say "thanks".', 'Do say "thanks".', ""),
        ('Say "thanks".', 'Say "thank you".', "quotes"),
        ("Call get_order first", "Call it first", "names"),
        ("See https://a.b/c for more", "See the site for more", "links"),
        ("不能说", "可以说", "negation"),
        ("告别的时候", "再见的时候", ""),
        ("Never say it", "Say it", "negation"),
        ("查库存", "", "empty"),
        ("查库存", "\n ", "empty"),
        ("查库存", "查" * 60, "too long"),
        ("查库存", "查\n库存", "markup"),
        ("查库存", "查库存<|im_end|>", "markup"),
        ("查库存", "check the stock", "language"),
        ("保留欢迎下单四个字", "保留四个字", "lost"),
    ],
)
def test_unfaithful_rewrites_are_told(old, new, why):
    found = unfaithful(old, new, must=("欢迎下单",))
    assert found.startswith(why) and bool(found) == bool(why), found


def test_a_body_of_a_stranger_keeps_its_structure():
    """Numbered steps, nested lists, code, tables and prose stay in order; the bullets of one plain list may move."""
    body = """# How to list
Retrieve the details. Then create "the details" with `get details`.

1. Find the page
2. Create an entry
   - with details
- alpha https://x.y/get
- beta
- gamma

- First, find it
- Then create it
* parent
  * child
```
- get one
- get two
```
| get | find |"""
    h = H.copy(skills=[Skill("s", "s", "Build things", "reply", body)])
    orders, words = set(), set()
    for seed in range(40):
        new = augment(h, seed, only("skill_content"), POOLS[seed % 2])[0].skills[0].body
        lines = new.split("\n")
        assert len(lines) == len(body.split("\n")) and lines[0] == "# How to list" and lines[-1] == "| get | find |"
        at = [i for i, line in enumerate(lines) if re.search("alpha|beta|gamma", line)]
        assert at == [6, 7, 8] and "https://x.y/get" in new and '"the details" with `get details`' in new
        orders.add(tuple(re.search("alpha|beta|gamma", lines[i])[0] for i in at))
        assert re.match(r"1\. \w+", lines[3]) and lines[4].startswith("2. ") and lines[5].startswith("   - with ")
        assert "First, " in lines[10] and "Then " in lines[11] and lines[12:14] == ["* parent", "  * child"]
        assert lines[14:18] == ["```", "- get one", "- get two", "```"]
        words |= set(re.findall(r"fetch|obtain|particulars|specifics", new.lower()))
    assert len(orders) == 6 and words == {"fetch", "obtain", "particulars", "specifics"}


def test_a_text_that_the_bank_does_not_know_is_framed():
    for pool in POOLS:
        made = {bank(pool)("今晚吃什么", "description", random.Random(s)) for s in range(10)}
        assert len(made) == 2 and all(text.endswith("今晚吃什么") and text != "今晚吃什么" for text in made)
        assert bank(pool)("今晚吃什么", "instruction", random.Random(0)) == "今晚吃什么"


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
# a language model as rewriter


@contextmanager
def server(answer):
    """A local OpenAI-compatible server: answer(text, body) -> the new text, or an int, an HTTP status."""
    calls = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append({"path": self.path, "key": self.headers["Authorization"], **body})
            said = answer(body["messages"][-1]["content"], body)
            message = {"role": "assistant", "content": said}
            data = {"id": "1", "created": 1, "model": "m", "object": "chat.completion", "usage": None}
            data["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
            raw = b"oops" if isinstance(said, int) else json.dumps(data).encode()
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", calls
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """The client refuses even this machine when HF_HUB_OFFLINE is set, as it is in all tests."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def test_a_language_model_rewords(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server(lambda text, body: f"<think>\nhow?\n</think>\n\n{text}{'～' * (1 + body['seed'] % 5)}") as (url, calls):
        endpoint = Endpoint(url, "writer")
        h, log = augment(H, 1, ALWAYS, rewrite=endpoint)
        many = len(calls)
        assert all(t.description.endswith("～") for t in h.tools)
        assert augment(H, 1, ALWAYS, rewrite=endpoint)[0].commit == h.commit and len(calls) == many  # asked once
        another = Endpoint(url, "writer")
        augment(H, 7, ALWAYS, rewrite=another)
        assert augment(H, 1, ALWAYS, rewrite=another)[0].commit == h.commit  # whichever came first
    assert not [e for e in log if e["change"] == "rejected"] and len(log) > 40
    assert {c["path"] for c in calls} == {"/v1/chat/completions"} and {c["model"] for c in calls} == {"writer"}
    assert {c["key"] for c in calls} == {"Bearer secret"} and all(isinstance(c["seed"], int) for c in calls)
    styles = {pool: {x for lang in ("zh", "en") for x in bank(pool).words[lang]["styles"]} for pool in POOLS}
    assert all(any(style in c["messages"][0]["content"] for style in styles["train"]) for c in calls)
    assert not any(style in c["messages"][0]["content"] for style in styles["heldout"] for c in calls)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda text: "", "empty"),
        (lambda text: text + "，十分重要" * 40, "too long"),
        (lambda text: re.sub(r"\{.*?\}", "它", text) if "{" in text else text + "9", ""),
        (lambda text: text + "99", "numbers"),
        (lambda text: "Sure, here you go", ""),
        (lambda text: text + "\n以上", "markup"),
        (lambda text: text + "{closing}", "placeholders"),
    ],
)
def test_a_language_model_that_loses_the_meaning_is_refused(bad, why):
    """The original stays, and the log counts it."""
    with server(lambda text, body: bad(text)) as (url, _):
        h, log = augment(H, 2, only("skill_content"), rewrite=Endpoint(url, "m"))
    rejected = [e for e in log if e["change"] == "rejected"]
    assert len(rejected) > 8 and all(e["why"].startswith(why) and e["text"] and e["at"] for e in rejected)

    def sentences(h):
        said = [s.strip("-*· ") for x in h.skills for line in x.body.split("\n") for s in hsa.SENTENCE.split(line) if s]
        return Counter(said)

    assert sentences(h) <= sentences(H)  # moved or masked, in the old words


def test_a_server_that_fails_now_and_then_costs_a_rewrite():
    with server(lambda text, body: 500 if "活动" in text else text + "～") as (url, calls):
        _, log = augment(H, 2, only("tool"), rewrite=Endpoint(url, "m"))
    failed = [e for e in log if e["change"] == "rejected"]
    assert [e["text"] for e in failed] == ["查直播间活动"] and failed[0]["why"] == "empty"
    assert sum("活动" in c["messages"][-1]["content"] for c in calls) == Endpoint.tries


@pytest.mark.parametrize("status", [500, 404])
def test_a_server_that_never_answers_is_bad_input(status):
    with server(lambda text, body: status) as (url, _), pytest.raises(BadInput, match=r"127\.0\.0\.1.*does not answer"):
        augment(H, 2, ALWAYS, rewrite=Endpoint(url, "m"))
    with pytest.raises(BadInput, match="does not answer"):
        augment(H, 2, ALWAYS, rewrite=Endpoint(url, "m", timeout_s=2))  # it is gone


# ---------------------------------------------------------------------------------------------------------------------
# the command


def test_show_prints_a_diff(capsys):
    hsa.main(["show", "--seed", "3"])
    out = capsys.readouterr().out
    h, log = augment(H, 3)
    assert f"commit {H.commit} -> {h.commit}" in out and all(e["at"] in out for e in log)
    assert "\n-你是直播间的数字人主播" in out and "\n--- before" in out and all(line in out for line in H.diff(h))


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_show_one_dimension(dimension, capsys):
    hsa.main(["show", "--only", dimension, "--pool", "heldout", "--harness", str(ROOT / "data" / "harness")])
    log = capsys.readouterr().out.partition("\ncommit")[0].splitlines()
    assert log and {line.split()[0] for line in log} == {dimension}


def test_show_asks_a_server(capsys):
    with server(lambda text, body: text + "～") as (url, calls):
        hsa.main(["show", "--only", "tool", "--endpoint", url, "--llm", "m"])
    assert calls and "～" in capsys.readouterr().out


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
