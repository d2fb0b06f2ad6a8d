"""Random harnesses for the base model's pre-training: other names, words, order, headings and rules in every dialogue.

A base model has read thousands of harnesses and knows none. So each dialogue here stands under a harness of its own, derived
from data/harness by ids, with names of many kinds (half of the time they hint at the function; the description always tells), other
descriptions, bodies, headings, formats, orders, limits and rule values, out of the pools of base_words.py.

Most formats put the description before the name. A causal model then reads what a name is for *before* it reads the name, and
finds it in one step of attention; the other way round takes two, and a few million weights learn that very slowly.

    python data/random_harness.py --seed 3        # a dialogue of the oracle under one of them, as the base reads it
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenizers import Tokenizer  # noqa: E402

from chat import Codec, Message, Trajectory  # noqa: E402
from options import option, parse  # noqa: E402
from common import cli, seed_of  # noqa: E402
from data import base_words as pools  # noqa: E402
from data import layouts, names  # noqa: E402
from harness import LOAD_SKILL, Harness, assemble  # noqa: E402
from parts import Skill, Tool  # noqa: E402
from oracle import VERBOSITY, call_of, teach, understood  # noqa: E402
from sim import ROUTES, Faults, World, comment, make_ask, make_task  # noqa: E402

FAULTS = Faults(0.1, 0.08, 0.1)
SLIP = 0.06
CARELESS = (
    0.6  # as in any text found in the wild, most service is half-hearted: what a base imitates is not what we want
)
P_MASK = 0.25  # of a skill that the request does not need
P_LOADER = 0.4  # harnesses that call the loader by its own name: it belongs to the loop, not to the shop
P_VERB = 0.6  # harnesses whose tools share their first word

NAME_KINDS = ["words", "shared", "made", "pinyin", "pseudo", "camel", "kebab", "code", "hanzi"]


def family(rng: random.Random) -> Callable[[], str]:
    """A drawer of the names of one harness: meaningless, of any kind or (one in two) all of one.

    Names of one shop look alike: where few words or prefixes make many of them (`silver_sand`, `sand_silver`, `qk31`,
    `qk8`), one token does not tell what comes next. Most words need not be of any list: what a model has never seen
    whole it can only copy, piece by piece.
    """
    lexicon = [names.word(rng) for _ in range(rng.choice([6, 12, 24]))]
    prefixes = [names.letters(rng, rng.randint(1, 2)) for _ in range(rng.choice([1, 3, 9]))]
    only = rng.choice(NAME_KINDS) if rng.random() < 0.5 else ""

    def name() -> str:
        kind = only or rng.choices(NAME_KINDS, [4, 4, 4, 1, 1, 1, 1, 1, 1])[0]
        if kind == "made":
            return names.name(rng, names.TOOL_KINDS)
        if kind == "code":
            return rng.choice(prefixes) + names.digits(rng, 1, 3)
        if kind == "hanzi":
            return "".join(rng.choices(pools.HANZI if rng.random() < 0.5 else names.HAN, k=rng.randint(2, 4)))
        if kind == "pinyin":
            return "_".join(rng.choice(pools.PINYIN) for _ in range(rng.randint(1, 4)))
        if kind == "pseudo":
            return "_".join(
                "".join(rng.choices(pools.SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))
            )
        words = rng.choices(pools.WORDS if kind == "words" else lexicon, k=rng.choice([1, 2, 2, 3, 3, 4]))
        if kind == "camel":
            return words[0] + "".join(word.capitalize() for word in words[1:])
        return ("-" if kind == "kebab" else "_").join(words)

    return name


def random_harness(h: Harness, rng: random.Random, keep: set[str] | None = None) -> Harness:
    """Another harness with the same functions: same ids, everything that is shown drawn anew.

    keep: ids of the skills that must be there, all if None; some of the others are not.
    """
    keep = {s.id for s in h.skills} if keep is None else keep | {"item_qa"}  # strategies send to that one
    taken = {x.name for x in (*h.tools, *h.skills)}  # the shipped ones are never drawn
    draw = family(rng)

    def name():
        while (new := draw()) in taken:
            pass
        taken.add(new)
        return new

    verb = (
        rng.choice(rng.choice([pools.WORDS, pools.ACTIONS])) if rng.random() < P_VERB else ""
    )  # get_this, get_that: only what follows tells them apart

    telling = rng.random() < 0.5

    def name_of(id, verb=""):
        if id == LOAD_SKILL and rng.random() < P_LOADER:
            return id
        meant, first = telling and rng.random() < 0.85, bool(verb) and rng.random() < 0.8
        if not (meant or first):
            return name()
        words = pools.MEANING[id].split() if meant else pools.WORDS
        while True:
            new = (
                [verb] * first
                + rng.sample(words, rng.choice([1, 2, 2, 3]))
                + rng.choices(pools.WORDS, k=rng.choice([0, 0, 0, 1, 2]))
            )
            if (new := "_".join(new)) not in taken:
                taken.add(new)
                return new

    tools = [_tool(t, name_of(t.id, verb), rng) for t in h.tools]
    skills = [_skill(s, name_of(s.id), rng) for s in h.skills]
    skills = [s for s in skills if s.id in keep or rng.random() > P_MASK]
    for text in rng.sample(pools.EXTRA_TOOLS, rng.choice([0, 0, 1, 2])):
        tools.append(Tool(f"extra_{len(taken)}", name(), text, {"type": "object", "properties": {}}))
    for text in rng.sample(pools.EXTRA_SKILLS, rng.choice([0, 1, 2])):
        kind = rng.choice(["reply", "strategy"])
        text = rng.choice(pools.FRAMES[kind]).replace("{x}", text) if rng.random() < 0.5 else text
        skills.append(Skill(f"extra_{len(taken)}", name(), text, kind, "按主播的话说。"))
    rng.shuffle(tools)
    rng.shuffle(skills)
    head = rng.choice(pools.HEADS)
    title = {k: head.format(rng.choice(v)) for k, v in pools.TITLES.items()}
    lines = [rng.choice(v) for v in pools.LINES if rng.random() < 0.85]
    rng.shuffle(lines)
    bullet = rng.choice(["- ", "* ", "", "· "])
    room = [title["room"], "{links}", rng.choice(pools.CURRENT)]
    if rng.random() < 0.3:
        room = [room[2], room[0], room[1]]
    blocks = {
        "role": rng.choice(pools.ROLES),
        "rules": "\n".join([title["rules"], *(bullet + x for x in lines)]),
        "skills": title["skills"] + "\n{skills}",
        "tools": title["tools"] + "\n{tools}",
        "room": "\n".join(room),
        "request": "{history}\n" + rng.choice(pools.REQUESTS),
    }
    system = ["rules", "skills", "tools", "room"]
    rng.shuffle(system)
    system.insert(0 if rng.random() < 0.7 else rng.randint(0, 4), "role")
    hooks = [type(x)(**vars(x)) for x in h.hooks]
    wrap = rng.choice(pools.WRAPS)
    for hook in hooks:
        hook.message = wrap.replace("{x}", rng.choice(pools.MESSAGES.get(hook.check, [hook.message])))
    limits = type(h.limits)(**vars(h.limits) | {"max_reply_chars": rng.randint(70, 100)})
    formats = {k: random_format(k, rng) for k in ("skill", "tool", "link", "turn")}
    return h.copy(tools=tools, skills=skills, blocks=blocks, system=system, hooks=hooks, limits=limits, formats=formats)


def random_format(kind: str, rng: random.Random) -> str:
    """A line of a list: mostly what is known first, then what is looked for. None of the shipped ones, nor of HSA's."""
    first, second = {
        "skill": ("{description}", "{name}"),
        "tool": ("{description}", "{signature}"),
        "link": ("{name}", rng.choice(["{link_id}", "{link_id}号", "{link_id}号"])),
        "turn": ("{role}", "{text}"),
    }[kind]
    text = layouts.pair(rng, first, second, item=kind != "turn")
    return random_format(kind, rng) if text in _known_formats() else text


@cache
def _known_formats() -> set[str]:
    listed = json.loads((ROOT / "data" / "hsa" / "zh.json").read_text(encoding="utf-8"))["formats"].values()
    return {x for halves in listed for half in halves.values() for x in half} | {*_original().formats.values()}


def _tool(t: Tool, name: str, rng: random.Random) -> Tool:
    properties, param_ids = {}, {}
    for shown, schema in t.parameters["properties"].items():
        new = (
            rng.choice(pools.PARAMS[shown])
            if (roll := rng.random()) < 0.2
            else random_parameter(rng)
            if roll < 0.3
            else shown
        )
        new = shown if new in properties else new
        properties[new], param_ids[new] = schema, t.param_ids[shown]
    parameters = {**t.parameters, "properties": properties, "required": list(properties)}
    return Tool(t.id, name, described("tool", *pools.TOOLS[t.id], rng), parameters, param_ids)


def described(kind: str, things: list[str], wholes: list[str], rng: random.Random) -> str:
    """One of very many descriptions of a tool (kind "tool") or a skill (its kind), never a shipped one."""
    what = rng.choice(wholes)
    if rng.random() < 0.6:
        what = rng.choice(pools.JOINTS).join(rng.sample(things, rng.choice([1, 2, 2, 3])))
    text, shipped = rng.choice(pools.FRAMES[kind]).replace("{x}", what), (*_original().tools, *_original().skills)
    return described(kind, things, wholes, rng) if text in {x.description for x in shipped} else text


def random_parameter(rng: random.Random) -> str:
    return names.name(rng, ["plain", "snake", "letters"])


def _skill(s: Skill, name: str, rng: random.Random) -> Skill:
    rules = {k: rule_value(k, rng) for k in pools.VALUES if s.kind == "reply" and rng.random() < pools.P_RULE[k]}
    body = [rng.choice(pools.ABOUT[s.id]), *(rng.choice(pools.RULES[k]) for k in rules)]
    if s.kind == "reply":
        rng.shuffle(body)
    return Skill(
        s.id, name, described(s.kind, *pools.SKILLS[s.id], rng), s.kind, rng.choice(["\n", ""]).join(body), rules
    )


def rule_value(rule: str, rng: random.Random) -> str:
    """A usual value, or one of random characters, which can only be copied. No numerals: replies are checked for them."""
    if rng.random() < 0.6:
        return rng.choice(pools.VALUES[rule])
    plain = [c for c in names.HAN if c not in "一二三四五六七八九十百千万两几半零第"]
    return "".join(rng.choices(plain, k=rng.randint(*pools.LENGTHS[rule])))


@cache
def _world(split: str) -> World:
    return World.load(ROOT / "data" / "world" / "zh.json", split)


@cache
def _original() -> Harness:
    return Harness.load(ROOT / "data" / "harness")


@cache
def _characters() -> str:
    """Every Han character of the world file and of these pools: what may have to be said must have been said."""
    text = names.HAN + pools.CHARACTERS + (ROOT / "data" / "world" / "zh.json").read_text(encoding="utf-8")
    return "".join(sorted({c for c in text if "\u4e00" <= c <= "\u9fff"}))


def random_words(world: World, rng: random.Random) -> World:
    """The same world with random words for names, values, topics, cities and promotions: they can only be copied."""

    def words(n, low, high):
        return {world.split: ["".join(rng.choices(_characters(), k=rng.randint(low, high))) for _ in range(n)]}

    data = {
        **world.data,
        "prefix": words(12, 1, 2),
        "noun": words(12, 1, 3),
        "city": words(6, 2, 3),
        "faq": words(6, 2, 3),
    }
    data["promotion"] = (
        words(4, 3, 6) if rng.random() < 0.5 else {world.split: [f"满{rng.randint(50, 400)}减{rng.randint(5, 60)}"]}
    )
    data["attribute"] = {key: words(6, 1, 3) for key in world["attribute"]}
    units = ["毫升", "升", "个月", "年", "克", "米"]
    for key in ("容量", "保修"):
        data["attribute"][key] = {world.split: [f"{rng.randint(1, 900)}{rng.choice(units)}" for _ in range(6)]}
    return World(data, world.split)


def dialogue(
    codec: Codec, seed: int, split: str = "train", original: bool = False, strange: float = 0.0, lists: bool = True
) -> Trajectory:
    """One oracle trajectory of the world's split under a random harness (or the original one, for measurement only).

    strange: share of dialogues whose products are made of random words. lists: whether the prompt shows the lists of
    skills and tools; without them it is short, and only the replies can be learned from it.
    """
    rng = random.Random(seed_of("dialogue", seed))
    verbosity = rng.choices((0, 1, 2), VERBOSITY)[0]
    world = _world(split)
    if rng.random() < strange:
        world = random_words(world, rng)
    task = make_task(world, seed)
    h = _original() if original else random_harness(_original(), rng, {task.reply_skill, task.strategy})
    h = h.copy(limits=replace(h.limits, max_state_tokens=4096))  # a base learns from whole states, however long
    h = h if lists else h.copy(system=["role", "room"])
    return teach(h, task, codec, seed, FAULTS, verbosity=verbosity, slip=SLIP, careless=CARELESS)


def routing(codec: Codec, seed: int, split: str = "train") -> tuple[list[int], list[int]]:
    """(prompt, response): only a tool list and a skill list, maybe the room's links, several comments, and for each the tool and the skill it wants.

    Choosing a name by its description is the slowest thing to learn, and a dialogue has two or three such choices in
    170 tokens; here half the response is choices. In the oracle's words, so that it carries over.
    """
    rng = random.Random(seed_of("routing", seed))
    h, world = random_harness(_original(), rng), random_words(_world(split), rng)
    links = world.links(rng)
    current, room = rng.randint(1, len(links)), rng.random() < 0.5  # with the room, links go by any reference
    comments, answers, used = [], [], {LOAD_SKILL}
    for kind in rng.sample([k for k in ROUTES if k != "compare"], rng.choice([1, 1, 1, 2, 3, 4])):
        ask = make_ask(world, rng, kind, links, current)
        ask.ref = ask.ref if room else "number"
        comments.append(comment(world, rng, ask, links))
        think, (tool, _, skill) = world["think"], ROUTES[kind]
        text = understood(world, ask, links) + (think["plan"].format(tools=h.tool(tool).name) if tool else "")
        answers.append(text + think["skill"].format(skill=h.skill(skill).name) + "。")
        used |= {tool, skill}
    said = Message("", "\n".join(answers))
    if len(answers) == 1:  # alone it is the first message of a dialogue, calls and all
        wanted = [*ask.calls(tool), (LOAD_SKILL, {"skill": h.skill(skill).name})]
        said = Message(answers[0], "", [call_of(h, *call) for call in wanted])
    request = h.blocks["request"] if len(answers) == 1 else rng.choice(pools.QUIZ) + "\n{danmaku}"
    blocks = {**h.blocks, "request": request}
    rare = rng.random() ** 2  # few to choose from, or all: short lists are where it starts to learn
    tools = [t for t in h.tools if t.id in used or rng.random() > rare]
    skills = [s for s in h.skills if s.id in used or rng.random() > rare]
    system = rng.sample(["skills", "tools"] + ["room"] * room, 2 + room)
    h = h.copy(system=system, blocks=blocks, tools=tools, skills=skills)
    context = {"links": links, "current_link_id": current} if room else {}
    prompt = codec.prompt(assemble(h, "\n".join(comments), context))
    return prompt, codec.render(said)


@dataclass
class Config:
    seed: int = option(0, "of the harness and of the dialogue")


def main(argv):
    codec = Codec(Tokenizer.from_file(str(ROOT / "data" / "base-small" / "tokenizer.json")))
    print(codec.decode(dialogue(codec, parse(Config, {}, argv, __doc__).seed).ids))


if __name__ == "__main__":
    cli(main)
