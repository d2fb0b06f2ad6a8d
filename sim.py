"""The live room: a world of products, viewers, a tool server with faults, an oracle teacher, and ground-truth rewards.

    task = make_task(world, seed)                     what one viewer says in one room; a pure function of the seed
    room = task.open(faults, seed)                    a fresh sandboxed tool server: world x call x seed -> text
    trajectory = teach(harness, task, codec, seed)    the oracle acts through the same loop as any policy
    rewards = score(harness, task, trajectory)        accuracy, effectiveness, tool, skill

Everything is addressed by tool and skill *ids*, so a renamed harness needs no change here. Which rules a reply must
keep (closing particle, must-say ...) is read from the harness that was in force, never from this file.

Intents by the report's shares: product question 46%, small talk 19%, clarification 16%, the rest after-sale, discount
and purchase. Names, attribute values and topics come from disjoint train and test pools of data/world/<language>.json.

    python sim.py --seed 3        one task with its truth, and how the oracle would handle it

Left out: several requests in one session, viewers who react to the reply.
"""

import copy
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from chat import Call, Codec, Message, Sample, Trajectory
from common import cli, option, parse, read_json, seed_of
from harness import LOAD_SKILL, Harness, canonical, print_events, run, terms_of

INTENTS = {"product": 0.46, "small_talk": 0.19, "clarify": 0.16, "after_sale": 0.06, "discount": 0.07, "purchase": 0.06}
KINDS = {  # what a viewer of that intent asks for; weights in order
    "product": {"price": 4, "attr": 3, "stock": 2, "faq": 2, "shipping": 2, "compare": 2},
    "small_talk": {"greet": 1, "praise": 1, "bye": 1},
    "clarify": {"price": 1, "stock": 1, "shipping": 1, "coupon": 1, "faq": 1, "attr": 1},
    "after_sale": {"return": 1},
    "discount": {"coupon": 2, "promo": 1},
    "purchase": {"buy": 1},
}
P_MERGED = 0.15  # two bullet comments in one request, for intents other than small talk and clarification
P_NOISE = 0.15  # a typo or an emoji in a bullet comment

INFO, STOCK, COUPON = "get_product_info_by_link_id", "get_inventory", "get_coupon"
SHIPPING, FAQ, ROOM = "get_shipping", "search_faq", "get_room_state"
# kind -> (tool that answers it, another one that can, reply skill)
ROUTES = {
    "price": (INFO, COUPON, "item_qa"),
    "attr": (INFO, None, "item_qa"),
    "stock": (STOCK, None, "item_qa"),
    "faq": (FAQ, None, "item_qa"),
    "compare": (INFO, COUPON, "item_qa"),
    "buy": (STOCK, None, "item_qa"),
    "shipping": (SHIPPING, None, "logistics"),
    "coupon": (COUPON, None, "price_promo"),
    "promo": (ROOM, None, "price_promo"),
    "return": (FAQ, None, "after_sale"),
    "greet": (None, None, "small_talk"),
    "praise": (None, None, "small_talk"),
    "bye": (None, None, "small_talk"),
}
NUMBERS = ("price", "coupon", "stock", "hours", "days")  # the numbers that world.say states about a link
REWARDS = ("accuracy", "effectiveness", "tool", "skill")


@dataclass
class Faults:
    """Probability that a call meets each fault. A timeout or a malformed answer happens once per call and arguments:
    the retry succeeds. A denied tool stays denied for the whole rollout."""

    timeout: float = 0.04
    malformed: float = 0.03
    denied: float = 0.03


NO_FAULTS = Faults(0.0, 0.0, 0.0)

# ---------------------------------------------------------------------------------------------------------------------
# world and tasks


class World:
    """The word pools and templates of one language; `split` chooses the train or the test half of each pool."""

    def __init__(self, data: dict, split: str = "train"):
        self.data, self.split = data, split

    @classmethod
    def load(cls, path: str | Path, split: str = "train") -> "World":
        return cls(read_json(path), split)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def pool(self, *keys: str) -> list:
        node = self.data
        for key in keys:
            node = node[key]
        return node[self.split]

    @cached_property
    def values(self) -> set[str]:
        """Every attribute value, city and promotion there is: words that a reply may say only when it has read them."""
        pools = [*self["attribute"].values(), self["city"], self["promotion"]]
        return {value for pool in pools for split in pool.values() for value in split}

    @cached_property
    def stated(self) -> list[tuple[str, re.Pattern]]:
        """(which number, its pattern with the character on either side) for each number in world.say."""
        found = [x for text in self["say"].values() for x in re.findall(r"([^\s{}]?)\{(\w+)\}([^\s{}]?)", text)]
        number = r"(\d+(?:\.\d+)?)"
        return [(key, re.compile(re.escape(a) + number + re.escape(b))) for a, key, b in found if key in NUMBERS]

    @cached_property
    def naming(self) -> str:
        """Pattern of what stands between a link's number and its name in world.say."""
        gaps = {gap for text in self["say"].values() for gap in re.findall(r"\{n\}([^{}]*)\{name\}", text)}
        return "|".join(re.escape(gap) for gap in sorted(gaps))

    def links(self, rng: random.Random) -> list[dict]:
        """4-8 products with all their facts; names differ."""
        links, names, count = [], set(), rng.randint(4, 8)
        while len(links) < count:
            name = rng.choice(self.pool("prefix")) + rng.choice(self.pool("noun"))
            if name in names:
                continue
            names.add(name)
            name += rng.choice(self["model"]) if rng.random() < 0.2 else ""
            coupon = rng.choice([0, 5, 10, 15, 20, 30, 50])
            price = rng.randint(9, 399)
            keys = rng.sample(list(self["attribute"]), rng.randint(2, 3))
            links.append(
                {
                    "link_id": len(links) + 1,
                    "name": name,
                    "price": price,
                    "coupon": coupon,
                    "list_price": price + coupon,
                    "stock": 0 if rng.random() < 0.1 else rng.randint(3, 999),
                    "attributes": {k: rng.choice(self.pool("attribute", k)) for k in keys},
                    "faq": {t: rng.random() < 0.6 for t in rng.sample(self.pool("faq"), 3)},
                    "city": rng.choice(self.pool("city")),
                    "hours": rng.choice(self["hours"]),
                    "return_days": rng.choice(self["return_days"]),
                }
            )
        return links


@dataclass
class Ask:
    """One thing that a bullet comment wants. link/other: link ids, None for the room; key: attribute or FAQ topic."""

    kind: str
    link: int | None = None
    key: str = ""
    other: int | None = None
    ref: str = "number"  # how the viewer named the link: number | name | current | history

    def calls(self, tool: str | None) -> list[tuple[str, dict]]:
        """The calls of `tool` that answer this."""
        if tool is None:
            return []
        if tool == ROOM:
            return [(ROOM, {})]
        links = [self.link] if self.other is None else [self.link, self.other]
        return [(tool, {"link_id": n} | ({"topic": self.key} if tool == FAQ else {})) for n in links]


@dataclass
class Task:
    """What one request is about, with the truth behind it. Plain data; `open` gives a room to act in."""

    seed: int
    intent: str
    asks: list[Ask]
    danmaku: list[str]
    context: dict
    links: list[dict]
    promotion: str
    world: World = field(repr=False)

    def open(self, faults: Faults = NO_FAULTS, seed: int = 0) -> "Room":
        return Room(self, faults, seed)

    def link(self, n: int) -> dict:
        return self.links[n - 1]

    @property
    def strategy(self) -> str | None:
        if len(self.asks) > 1:
            return "multi_intent"
        return "compare" if self.asks[0].kind == "compare" else None

    @property
    def reply_skill(self) -> str:
        return ROUTES[self.asks[0].kind][2]


def _draw(rng: random.Random, weights: dict) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def make_task(world: World, seed: int) -> Task:
    """The task of this seed. Same world and seed, same task."""
    rng = random.Random(seed_of("task", seed))
    links = world.links(rng)
    current = rng.randint(1, len(links))
    intent = _draw(rng, INTENTS)
    kind = _draw(rng, KINDS[intent])
    history, asks = [], [_ask(world, rng, kind, links, current)]
    if intent == "clarify":
        asks[0].ref = "history"
    elif intent != "small_talk" and kind != "compare" and rng.random() < P_MERGED:
        kinds = {**KINDS["product"], "coupon": 1, "return": 1}
        del kinds["compare"], kinds[kind if kind in kinds else "attr"]
        second = _ask(world, rng, _draw(rng, kinds), links, current)
        while _same_call(asks[0], second):  # one call for both would leave nothing to merge
            second = _ask(world, rng, _draw(rng, kinds), links, current)
        asks.append(second)
    if intent == "clarify" or rng.random() < 0.15:  # without a follow-up the history is a distraction
        about = links[asks[0].link - 1] if intent == "clarify" else rng.choice(links)
        before = Ask("price", about["link_id"])
        text = _comment(world, rng, before, links)
        history.append({"role": world["role"]["viewer"], "text": text})
        said = world["say"]["price"].format(n=about["link_id"], **about)
        history.append({"role": world["role"]["avatar"], "text": said})
    context = {
        "links": [{"link_id": x["link_id"], "name": x["name"]} for x in links],
        "current_link_id": current,
        "history": history,
        "signals": {"online": rng.randint(20, 9999)},
    }
    danmaku = [_comment(world, rng, a, links) for a in asks]
    return Task(seed, intent, asks, danmaku, context, links, rng.choice(world.pool("promotion")), world)


def _same_call(a: Ask, b: Ask) -> bool:
    return any(call in b.calls(ROUTES[b.kind][0]) for call in a.calls(ROUTES[a.kind][0]))


def _ask(world, rng, kind, links, current) -> Ask:
    if ROUTES[kind][0] in (None, ROOM):
        return Ask(kind)
    ref = _draw(rng, {"number": 5, "name": 3, "current": 2})
    n = current if ref == "current" else rng.randint(1, len(links))
    link = links[n - 1]
    if kind == "compare":
        other = rng.choice([x["link_id"] for x in links if x["price"] != link["price"]] or [n % len(links) + 1])
        return Ask(kind, n, other=other, ref=ref)
    key = {"attr": rng.choice(list(link["attributes"])), "faq": rng.choice(list(link["faq"]))}.get(kind, "")
    return Ask(kind, n, world["return_topic"] if kind == "return" else key, ref=ref)


def _comment(world, rng, ask: Ask, links) -> str:
    text = rng.choice(world["ask"][ask.kind])
    if ask.link is not None:
        name = links[ask.link - 1]["name"]
        ref = rng.choice(world["ref"][ask.ref]).format(n=ask.link, name=name)
        ref2 = rng.choice(world["ref"]["number"]).format(n=ask.other)
        text = text.format(ref=ref, ref2=ref2, key=ask.key)
    if rng.random() < P_NOISE:
        typos = [(a, b) for a, b in world["typo"].items() if a in text]
        text = (
            text.replace(*rng.choice(typos), 1) if typos and rng.random() < 0.5 else text + rng.choice(world["emoji"])
        )
    return text


# ---------------------------------------------------------------------------------------------------------------------
# the tool server


class Room:
    """Sandboxed tools over one task's world. Copies everything: what one rollout does, no other sees."""

    def __init__(self, task: Task, faults: Faults, seed: int):
        self.task, self.faults, self.seed = task, faults, seed
        self.context = copy.deepcopy(task.context)
        self.tried: set[tuple[str, str]] = set()

    def call(self, tool: str, arguments: dict) -> str:
        """The answer to one call, as JSON text, or a fault. A wrong link or topic is an answer too, no exception."""
        answer = json.dumps(self.answer(tool, arguments), ensure_ascii=False)
        if random.Random(seed_of(self.seed, "denied", tool)).random() < self.faults.denied:
            return json.dumps({"error": "permission_denied"})
        key = (tool, canonical(arguments))
        draw = random.Random(seed_of(self.seed, *key)).random()
        first = key not in self.tried
        self.tried.add(key)
        if first and draw < self.faults.timeout:
            return json.dumps({"error": "timeout"})
        if first and draw < self.faults.timeout + self.faults.malformed:
            return answer[: len(answer) // 2]
        return answer

    def answer(self, tool: str, arguments: dict) -> dict:
        if tool == ROOM:
            return {"promotion": self.task.promotion, "online": self.context["signals"]["online"]}
        n = arguments.get("link_id")
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= len(self.task.links):
            return {"error": "no_such_link"}
        x = self.task.link(n)
        if tool == INFO:
            return {"name": x["name"], "price": x["price"], **x["attributes"]}
        if tool == STOCK:
            return {"stock": x["stock"]}
        if tool == COUPON:
            return {"list_price": x["list_price"], "coupon": x["coupon"], "price": x["price"]}
        if tool == SHIPPING:
            return {"city": x["city"], "hours": x["hours"]}
        if tool == FAQ:
            topic, words = str(arguments.get("topic", "")), self.task.world["faq_answer"]
            if topic and topic[0] == self.task.world["return_topic"][0]:
                return {"days": x["return_days"]}
            return (
                {"answer": words["yes" if x["faq"][topic] else "no"]}
                if topic in x["faq"]
                else {"error": "no_such_topic"}
            )
        return {"error": "no_such_tool"}


def readable(text: str) -> dict | None:
    """A tool result as data; None for a fault or an error."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and "error" not in data else None


# ---------------------------------------------------------------------------------------------------------------------
# truth: what an ask wants said


def wanted(task: Task, ask: Ask) -> tuple[str, dict, list[str]]:
    """(template of world.say, its values, the pieces of it that a right answer must contain)."""
    w = task.world
    if ask.kind in w["small_talk_keyword"]:
        return ask.kind, {}, [w["small_talk_keyword"][ask.kind]]
    if ask.kind == "promo":
        return "promo", {"promotion": task.promotion}, [task.promotion]
    x = task.link(ask.link)
    values = {"n": ask.link, "key": ask.key, "days": x["return_days"], **x}
    if ask.kind == "attr":
        values["value"] = x["attributes"][ask.key]
        return "attr", values, [values["value"]]
    if ask.kind == "faq":
        values["answer"] = w["faq_answer"]["yes" if x["faq"][ask.key] else "no"]
        return "faq", values, [values["answer"]]
    if ask.kind == "compare":
        best = min(task.link(ask.link), task.link(ask.other), key=lambda y: y["price"])
        values = {"n": best["link_id"], **best}
        return "compare", values, [w["cheaper"].format(**values)]
    if ask.kind in ("stock", "buy") and x["stock"] == 0:
        return ask.kind + "0", values, [w["sold_out_keyword"]]
    if ask.kind == "coupon" and x["coupon"] == 0:
        return "coupon0", values, [w["no_coupon_keyword"]]
    needs = {"price": ["price"], "stock": ["stock"], "buy": ["stock"], "coupon": ["coupon", "price"]}
    needs |= {"shipping": ["city", "hours"], "return": ["days"]}
    return ask.kind, values, [str(values[k]) for k in needs[ask.kind]]


def says(text: str, piece: str) -> bool:
    """Whether a text contains a piece; a number at its edge must stand alone ('89' is not in '189')."""
    before = r"(?<![\d.])" if piece[0].isdigit() else ""
    after = r"(?!\d|\.\d)" if piece[-1].isdigit() else ""
    return piece in text and re.search(before + re.escape(piece) + after, text) is not None


def parts(task: Task, reply: str) -> list[tuple[int | None, str]]:
    """(link that it is about, text) for each part of a reply. A part begins where a link is named; None: before any."""
    refs = [re.escape(ref.format(n="@")).replace("@", r"(?<!\d)(\d{1,9})") for ref in task.world["ref"]["number"]]
    named = [(found.start(), int(found[1])) for ref in refs for found in re.finditer(ref, reply)]
    named += [(found.start(), x["link_id"]) for x in task.links for found in re.finditer(re.escape(x["name"]), reply)]
    named = [(0, None), *sorted(named), (len(reply), None)]
    return [(n, reply[start:end]) for (start, n), (end, _) in zip(named[:-1], named[1:], strict=True) if start < end]


def keeps_rules(reply: str, rules: dict) -> bool:
    """Whether a reply keeps the checkable rules of a skill."""
    end = reply.rstrip("。！!.~～ ")
    return (
        end.endswith(str(rules.get("closing", "")))
        and reply.startswith(str(rules.get("opening", "")))
        and str(rules.get("must_say", "")) in reply
        and ("must_not_say" not in rules or str(rules["must_not_say"]) not in reply)
        and len(reply) <= int(rules.get("max_chars", 10**9))
    )


# ---------------------------------------------------------------------------------------------------------------------
# rewards


def score(h: Harness, task: Task, t: Trajectory) -> dict[str, float | None]:
    """Ground-truth rewards in [0, 1]; all None when the rollout died for reasons that are not the policy's.

    accuracy (0 or 1): dispatched by the policy; no number, name or claim beyond what its tools returned about the very
    link that it is said of; no false promise, no false "cannot be checked"; and at least one ask answered right (or
    honestly called unavailable when it was).
    effectiveness (0, 0.5, 1): all asks answered and the rules of the right reply skill kept; one of the two, or some
    asks; neither. tool: asks served by right calls over (asks + needless or refused calls). skill: Jaccard.
    """
    if t.stop_reason == "error":
        return dict.fromkeys(REWARDS)
    results = [(e["tool"], e["call_id"], e["text"]) for e in t.events if e["event"] == "tool_result"]
    arguments = {e["call_id"]: canonical(e["arguments"]) for e in t.events if e["event"] == "tool_call"}
    made = [(tool, arguments[id], text) for tool, id, text in results if tool != LOAD_SKILL]
    loads = [e["skill"] for e in t.events if e["event"] == "skill"]
    loaded, expected = set(loads), {id for id in (task.reply_skill, task.strategy) if id and h.skill(id)}
    wasted = sum(e["event"] == "tool_error" for e in t.events) + len(loads) - len(loaded)

    tool, fates = _tool_rationality(h, task, made, wasted)
    skill = len(loaded & expected) / len(loaded | expected) if loaded | expected else 1.0
    if t.stop_reason != "reply":
        return {"accuracy": 0.0, "effectiveness": 0.0, "tool": tool, "skill": skill}
    answered = [_answers(task, a, t.reply, fate) for a, fate in zip(task.asks, fates, strict=True)]
    accuracy = float(any(answered) and _truthful(task, t.reply, made, fates))
    right_skill = h.skill(task.reply_skill)
    rules = right_skill is None or keeps_rules(t.reply, right_skill.rules)
    share = sum(answered) / len(answered)
    effectiveness = 1.0 if share == 1 and rules else 0.5 if share > 0 else 0.0
    return {"accuracy": accuracy, "effectiveness": effectiveness, "tool": tool, "skill": skill}


def _tool_rationality(h: Harness, task: Task, made: list, wasted: int) -> tuple[float, list[str]]:
    """(score, fate of each ask): had = its facts were read; gone = every way to them failed for good; untried.

    A retry is right after a timeout or a malformed answer, the other tool after a failure; anything else is needless.
    made: (tool, canonical arguments, result text) of each call. wasted: other calls that should not have been made.
    """
    routes = []  # per ask: its calls, each with the call that may replace it
    for ask in task.asks:
        main, other, _ = ROUTES[ask.kind]
        calls = [(tool, canonical(args)) for tool, args in ask.calls(main)]
        swaps = [(tool, canonical(args)) for tool, args in ask.calls(other)] or [None] * len(calls)
        routes.append(list(zip(calls, swaps, strict=True)))
    mains = {call for pairs in routes for call, _ in pairs}
    replaces = {swap: call for pairs in routes for call, swap in pairs if swap}

    done, needless = set(), wasted
    failures = Counter({call: 2 for call in mains | set(replaces) if h.tool(call[0]) is None})  # not in this harness
    for tool, args, text in made:
        call = (tool, args)
        right = call in mains or (call in replaces and failures[replaces[call]] > 0)
        needless += not right or call in done or failures[call] >= 2
        if readable(text) is not None:
            done.add(call)
        else:
            failures[call] += 2 if "permission_denied" in text else 1

    def fate(call, swap):
        if call in done or swap in done:
            return "had"
        return "gone" if failures[call] >= 2 and (swap is None or failures[swap] >= 2) else "untried"

    fates = []
    for pairs in routes:
        each = {fate(*pair) for pair in pairs}
        fates.append(next((f for f in ("untried", "gone") if f in each), "had"))
    needed = [f for pairs, f in zip(routes, fates, strict=True) if pairs]
    served = sum(f != "untried" for f in needed) if needed else 1
    return served / (max(len(needed), 1) + needless), fates


def _answers(task: Task, ask: Ask, reply: str, fate: str) -> bool:
    """Whether the reply tells what was asked, where it speaks of that link, numbers with their unit."""
    w, keywords = task.world, task.world["small_talk_keyword"]
    about = "".join(text for n, text in parts(task, reply) if ask.link is None or n in (None, ask.link, ask.other))
    if fate != "had":
        return fate == "gone" and w["denied_keyword"] in about
    key, values, pieces = wanted(task, ask)
    if ask.kind == "faq":
        return _verdicts(w, about, ask.key) == set(pieces)
    if ask.kind in keywords and all(word in reply for word in keywords.values()):
        return False  # says everything, to be right whatever was said
    units = re.findall(r"\{(\w+)\}(\s?\w?)", w["say"][key])
    units = {str(values[name]): unit for name, unit in units if name in NUMBERS}
    return all(says(about, piece + units.get(piece, "")) for piece in pieces)


def _verdicts(w: World, text: str, topic: str) -> set[str]:
    """The answers, yes or no, that a text gives on a topic."""
    clauses = re.split(r"[，。；！？,.;!?]", text)
    about = "，".join(clause for clause in clauses if topic in clause) or text
    yes, no = w["faq_answer"]["yes"], w["faq_answer"]["no"]
    return {word for word, text in ((no, about), (yes, about.replace(no, ""))) if word in text}


def _truthful(task: Task, reply: str, made: list[tuple[str, str, str]], fates: list[str]) -> bool:
    """No claim beyond the evidence: each number, name and known value was read, and is said of the right link."""
    w, kin, read = task.world, {}, {}  # kin: the links that one ask is about together
    for ask in task.asks:
        for n in (ask.link, ask.other):
            if n is not None:
                kin[n] = kin.get(n, set()) | {ask.link, ask.other or ask.link}
    for _, args, text in made:
        if (data := readable(text)) is not None:
            read.setdefault(json.loads(args).get("link_id"), []).append(data)
    gone = {a.link for a, fate in zip(task.asks, fates, strict=True) if fate == "gone"}

    for owner, text in parts(task, reply):
        if owner not in kin and owner is not None:
            return False  # nobody asked about that link
        scope = kin[owner] if owner else set(kin)
        facts = [data for n in [None, *scope] for data in read.get(n, [])]
        words = {str(value) for data in facts for value in data.values()}
        words |= {ask.key for ask in task.asks} | {task.link(n)["name"] for n in scope} | {str(n) for n in scope}
        terms = {term for word in words for term in terms_of(word)}
        if any(term not in terms for term in terms_of(text)) or any(word in text for word in w["promise"]):
            return False
        if any(says(text, value) and value not in words for value in w.values):
            return False
        if w["denied_keyword"] in text and not (gone & {owner, None} if owner else gone):
            return False
        claims = (w["sold_out_keyword"], "stock", 0), (w["no_coupon_keyword"], "coupon", 0)
        for claim, key, value in (*claims, (w["faq_answer"]["no"], "answer", w["faq_answer"]["no"])):
            if claim in text and not any(data.get(key) == value for data in facts):
                return False
        for key, pattern in w.stated:
            key = "return_days" if key == "days" else key
            if not set(pattern.findall(text)) <= {str(task.link(n)[key]) for n in ([owner] if owner else scope)}:
                return False
    for x in task.links:
        if x["name"] in reply:
            numbers = re.findall(rf"(\d+)(?:{w.naming}){re.escape(x['name'])}", reply)
            if not set(numbers) <= {str(x["link_id"])}:
                return False  # that number is another link
    for ask, fate in zip(task.asks, fates, strict=True):
        right = set(wanted(task, ask)[2]) if fate == "had" else set()
        about = "".join(text for n, text in parts(task, reply) if n in (None, ask.link))
        if ask.kind == "faq" and ask.key in about and not _verdicts(w, about, ask.key) <= right:
            return False
        cheaper = {w["cheaper"].format(n=n) for n in (ask.link, ask.other)} if ask.kind == "compare" else set()
        if any(says(reply, claim) for claim in cheaper - right):
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# the oracle teacher


class Oracle:
    """Reads the harness it is given and the world; says the right next message, with reasoning of chosen verbosity.

    verbosity 0, 1, 2: about 15, 35, 60 reasoning tokens a state. slip: probability of one mistake that a hook corrects.
    """

    def __init__(self, h: Harness, task: Task, rng: random.Random, verbosity: int = 0, slip: float = 0.0):
        self.h, self.task, self.rng, self.verbosity = h, task, rng, verbosity
        self.think = task.world["think"]
        self.slips = rng.random() < slip
        self.state = 0
        # every fact call as [ask, tool, arguments, data or None, tries]
        self.facts = [[a, *call, None, 0] for a in task.asks for call in a.calls(self._tool(a))]
        self.sent: list[list] = []  # the fact calls of the last message
        self.lost = [a for a in task.asks if ROUTES[a.kind][0] and not self._tool(a)]  # what no tool will tell
        self.strategy = task.strategy if task.strategy and h.skill(task.strategy) else None
        self.skill = h.skill(task.reply_skill)
        self.skill_loaded = self.skill is None

    def _tool(self, ask: Ask) -> str | None:
        """The first tool for this that the harness has."""
        return next((id for id in ROUTES[ask.kind][:2] if id and self.h.tool(id)), None)

    def say(self, messages: list[dict]) -> Message:
        """The next message, given what the loop appended: the prompt first, then tool results or a hook's message."""
        note = self._read(messages)
        if self.state and messages[-1]["role"] == "user":
            note = self.rng.choice(self.think["fix"])
        self.state += 1
        skills = []
        if self.state == 1 and self.strategy:
            self.sent, skills = [], [self.h.skill(self.strategy)]
        else:
            self.sent = [f for f in self.facts if f[3] is None and f[0] not in self.lost]
            if not self.sent and self.slips:  # forgot the skill: replies too early, and a hook asks for it
                self.slips = False
                return self._reply(note)
            if not self.skill_loaded and not self.slips:
                skills, self.skill_loaded = [self.skill], True
        if not self.sent and not skills:
            return self._reply(note)
        tools = [self._call(f[1], f[2]) for f in self.sent]
        loads = [self._call(LOAD_SKILL, {"skill": s.name}) for s in skills]
        return Message(self._plan(note, tools, skills), "", tools + loads)

    def _call(self, tool_id: str, arguments: dict) -> Call:
        tool = self.h.tool(tool_id)
        shown = {id: name for name, id in tool.param_ids.items()}
        return Call(tool.name, {shown[k]: v for k, v in arguments.items()})

    def _read(self, messages) -> str:
        """Takes in the results of the calls just made; returns what reasoning has to say about failures."""
        notes = []
        for fact, message in zip(self.sent, [m for m in messages if m["role"] == "tool"], strict=False):
            ask, tool, arguments, _, tries = fact
            fact[3], fact[4] = readable(message["content"]), tries + 1
            if fact[3] is not None:
                continue
            names = {"tools": self.h.tool(tool).name}
            other = ROUTES[ask.kind][1]
            if "permission" not in message["content"] and fact[4] < 2:
                notes.append(self.think["retry"].format(**names))
            elif other and tool != other and self.h.tool(other):
                fact[1], fact[4] = other, 0
                notes.append(self.think["swap"].format(other=self.h.tool(other).name, **names))
            else:
                self.lost.append(ask)
                notes.append(self.think["denied"].format(**names))
        return "".join(dict.fromkeys(notes))

    def _plan(self, note: str, tools: list[Call], skills: list) -> str:
        th, w = self.think, self.task.world
        parts = [note]
        if self.state == 1:
            if self.verbosity:
                parts.append(self.rng.choice(th["read"]).format(danmaku="，".join(self.task.danmaku)))
            for i, a in enumerate(self.task.asks):
                kind = "ask_compare" if a.other else "ask" if a.link else "ask_room" if a.kind == "promo" else "talk"
                text = th[kind].format(n=a.link, m=a.other, topic=w["topic"][a.kind].format(key=a.key))
                parts.append(("，" if i else "") + text + th["link"].get(a.ref, "").format(n=a.link))
        if tools and not note:
            parts.append(th["plan"].format(tools="、".join(dict.fromkeys(c.name for c in tools))))
        parts += [th["skill" if s.kind == "reply" else "strategy"].format(skill=s.name) for s in skills]
        text = "".join(parts).strip("，。") + "。"
        return text + "".join(self.rng.sample(th["verbose"], 2) if self.verbosity == 2 else [])

    def _reply(self, note: str) -> Message:
        th, w = self.think, self.task.world
        rules = self.skill.rules if self.skill else {}
        clauses, facts = [], []
        for ask in self.task.asks:
            if ask in self.lost:
                clauses.append(w["say"]["unknown" if ask.link else "unknown_room"].format(n=ask.link))
                continue
            key, values, pieces = wanted(self.task, ask)
            clauses.append(w["say"][key].format(**values))
            if ask.kind == "compare":
                facts += [str(self.task.link(n)["price"]) for n in (ask.link, ask.other)]
            facts += pieces if ask.kind not in w["small_talk_keyword"] else []
        closing = str(rules.get("closing", ""))
        middle = [str(rules["must_say"])] if "must_say" in rules else []
        opening = [str(rules["opening"])] if "opening" in rules else []
        reply = "，".join([*opening, *clauses, *middle]) + closing + "。"
        thought = note + (th["found"].format(facts="，".join(facts)) if facts else "")
        thought += "".join(th["rules"][k].format(**rules) for k in th["rules"] if k in rules)
        if self.verbosity:
            thought = (self.rng.choice(th["verbose_reply"]) if self.verbosity == 2 else "") + thought
            thought += self.rng.choice(th["verbose_reply"])
        return Message(thought or clauses[0], reply)


def teach(h: Harness, task: Task, codec: Codec, seed: int, faults: Faults = NO_FAULTS, **style) -> Trajectory:
    """One oracle trajectory through the real loop, with rewards. style: verbosity, slip. Log-probs are 0."""
    rng = random.Random(seed_of("oracle", seed))
    oracle = Oracle(h, task, rng, **style)
    loop = run(h, task.danmaku, task.open(faults, seed), codec, seed)
    try:
        turn = next(loop)
        while True:
            ids = codec.render(oracle.say(turn.messages))
            turn = loop.send(Sample(ids, [0.0] * len(ids), "stop"))
    except StopIteration as end:
        t = end.value
    return replace(t, rewards=score(h, task, t))


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Config:
    harness: str = option("data/harness", "harness directory")
    world: str = option("data/world/zh.json", "world file")
    model: str = option("data/base-small", "directory of the tokenizer")
    split: Literal["train", "test"] = option("train", "half of the word pools")
    seed: int = option(0, "the task")
    verbosity: int = option(1, "of the oracle's reasoning: 0, 1 or 2", min=0, max=2)
    faults: bool = option(True, "let tools fail now and then")


def main(argv: list[str]) -> None:
    c = parse(Config, {}, argv, __doc__)
    h, task = Harness.load(c.harness), make_task(World.load(c.world, c.split), c.seed)
    print(f"{task.intent}: {task.asks}\ntruth: {[wanted(task, a)[2] for a in task.asks]}")
    codec = Codec(Tokenizer.from_file(str(Path(c.model) / "tokenizer.json")))
    t = teach(h, task, codec, c.seed, Faults() if c.faults else NO_FAULTS, verbosity=c.verbosity)
    print_events(t.events)
    print(f"rewards: {t.rewards}")


if __name__ == "__main__":
    cli(main)
