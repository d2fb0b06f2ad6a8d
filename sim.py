"""The live room: a world of products, viewers, and a tool server with faults.

    task = make_task(world, seed)                     what one viewer says in one room; a pure function of the seed
    room = task.open(faults, seed)                    a fresh sandboxed tool server: world x call x seed -> text
    key, values, pieces = wanted(task, ask)           the truth: what a right answer says

Everything is addressed by tool and skill *ids*, so a renamed harness needs no change here. Which rules a reply must
keep (closing particle, must-say ...) is read from the harness that was in force, never from this file.

Intents by the report's shares: product question 46%, small talk 19%, clarification 16%, the rest after-sale, discount
and purchase. Names, attribute values and topics come from disjoint train and test pools of data/world/<language>.json.

    python oracle.py --seed 3        one task with its truth, and how the oracle would handle it

Left out: several requests in one session, viewers who react to the reply.
"""

import copy
import json
import random
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from options import BadInput
from common import read_json, seed_of
from chat import Trajectory
from parts import LOAD_SKILL
from checks import canonical

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
MOST_LINKS = 8  # products in a room
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


@dataclass
class Faults:
    """Probability that a call meets each fault. A timeout or a malformed answer happens once per call and arguments:
    the retry succeeds. A denied tool stays denied for the whole rollout."""

    timeout: float = 0.04
    malformed: float = 0.03
    denied: float = 0.03


NO_FAULTS = Faults(0.0, 0.0, 0.0)

SHAPE = {  # keys that a world file must have -> what must stand under each, if that is fixed
    **dict.fromkeys(("prefix", "noun", "faq", "city", "promotion"), ("train", "test")),
    **dict.fromkeys(("model", "attribute", "hours", "return_days", "return_topic", "emoji", "typo"), ()),
    **dict.fromkeys(("promise", "hearsay", "filler", "synonym", "spelled_number", "in_stock_keyword", "cheaper"), ()),
    **dict.fromkeys(("denied_keyword", "sold_out_keyword", "no_coupon_keyword"), ()),
    **dict.fromkeys(("ask", "topic"), tuple(ROUTES)),
    "say": (*ROUTES, "stock0", "coupon0", "buy0", "unknown", "unknown_room"),
    "ref": ("number", "name", "current", "history"),
    "role": ("viewer", "avatar"),
    "faq_answer": ("yes", "no"),
    "small_talk_keyword": tuple(KINDS["small_talk"]),
    "think": tuple(
        "read ask ask_room ask_compare talk link plan skill strategy verbose found at retry swap denied rules"
        " verbose_reply fix".split()
    ),
}


def check_harness(h: Any) -> None:
    """BadInput unless the requests of this room mean something under a Harness: their tools and reply skills, by id."""
    wants = {id: {"link_id"} for *ways, _ in ROUTES.values() for id in ways if id}
    wants |= {FAQ: {"link_id", "topic"}, ROOM: set(), LOAD_SKILL: {"skill"}}
    lacks = [
        f"tool {id} ({', '.join(sorted(takes))})" for id, takes in wants.items() if not can_take(h.tool(id), takes)
    ]
    lacks += [f"skill {id}" for id in dict.fromkeys(skill for *_, skill in ROUTES.values()) if not h.skill(id)]
    if lacks:
        means = "x-id and metadata.id say which of yours are meant; of other rooms, sft.py takes --logs"
        raise BadInput(f"harness {h.name}: the requests of the live room need the {lacks[0]}; {means}")


def can_take(tool: Any, parameters: set[str]) -> bool:
    """Whether a Tool is there and takes these, by id."""
    return tool is not None and parameters <= {*tool.param_ids.values()}


# ---------------------------------------------------------------------------------------------------------------------
# world and tasks


class World:
    """The word pools and templates of one language; `split` chooses the train or the test half of each pool."""

    def __init__(self, data: dict, split: str = "train"):
        self.data, self.split = data, split

    @classmethod
    def load(cls, path: str | Path, split: str = "train") -> "World":
        """A file of data/world; BadInput names what is missing in it."""
        data = read_json(path)
        for key, inner in SHAPE.items():
            if not isinstance(data, dict) or key not in data:
                raise BadInput(f"{path}: no {key!r} in it; data/world/zh.json has all that a world needs")
            for name in inner:
                if not isinstance(data[key], dict) or name not in data[key]:
                    raise BadInput(f"{path}: no {name!r} under {key!r}")
        if not isinstance(data["attribute"], dict):
            raise BadInput(f"{path}: 'attribute' must be an object, attribute -> its values")
        pools = {f"attribute {key!r}": pool for key, pool in data["attribute"].items()}
        pools |= {repr(key): data[key] for key in ("prefix", "noun", "faq", "city", "promotion")}
        for (name, pool), half in product(pools.items(), ("train", "test")):
            words, least = pool.get(half) if isinstance(pool, dict) else None, 3 if name == "'faq'" else 1
            if not isinstance(words, list) or not all(isinstance(x, str) for x in words) or len({*words}) < least:
                raise BadInput(f"{path}: {name} must have {half!r}, a list of {least} texts or more")
        for pattern in (data["filler"], data["spelled_number"], *data["synonym"]):
            try:
                re.compile(pattern)
            except (re.error, TypeError) as e:
                raise BadInput(f"{path}: {pattern!r} is no regular expression: {e}") from None
        for key, pattern in (("attr", r"\{key\}[^{}]*\{value\}"), ("price", r"\{price\}\s?\w")):
            if not re.search(pattern, str(data["say"].get(key))):
                what = "{key} before {value}" if key == "attr" else "{price} and a unit behind it"
                raise BadInput(f"{path}: 'say' needs {key!r}, a text with {what}")
        for half in ("train", "test"):
            names = {a + b for a in data["prefix"][half] for b in data["noun"][half]}
            if len(names) < MOST_LINKS or len(data["attribute"]) < 3:
                found = f"{len(names)} names, {len(data['attribute'])} attributes"
                raise BadInput(f"{path}: {half}: {found}; a room takes {MOST_LINKS} and 3")
        return cls(data, split)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def pool(self, *keys: str) -> list:
        """This split's half of the pool at that place."""
        node = self.data
        for key in keys:
            node = node[key]
        return node[self.split]

    @cached_property
    def values(self) -> set[str]:
        """What a reply may say only of what it has read: any product word, attribute value, topic, city, promotion."""
        pools = [*self["attribute"].values(), *(self[k] for k in ("prefix", "noun", "faq", "city", "promotion"))]
        return {value for pool in pools for split in pool.values() for value in split}

    def strange(self, rng: random.Random) -> "World":
        """The same world in words nobody has heard: every letter of the names, values, cities and topics drawn anew.

        A few hundred names can be learned by heart; these can only be copied.
        """
        pools = {key: self[key] for key in ("prefix", "noun", "city", "faq")}
        letters = sorted({c for pool in pools.values() for words in pool.values() for word in words for c in word})

        def renew(pool):
            words = ["".join(rng.choice(letters) if c.isalpha() else c for c in word) for word in pool[self.split]]
            return {**pool, self.split: words}

        attributes = {key: renew(pool) for key, pool in self["attribute"].items()}
        return World({**self.data, **{k: renew(v) for k, v in pools.items()}, "attribute": attributes}, self.split)

    def links(self, rng: random.Random) -> list[dict]:
        """4-8 products with all their facts; names differ."""
        links, names, count = [], set(), rng.randint(4, MOST_LINKS)
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
                    "days": rng.choice(self["return_days"]),
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

    @property
    def links(self) -> list[int]:
        """The ids of all links that it is about."""
        return [n for n in (self.link, self.other) if n is not None]

    def calls(self, tool: str | None) -> list[tuple[str, dict]]:
        """The calls of `tool` that answer this."""
        if tool == ROOM:
            return [(ROOM, {})]
        topic = {"topic": self.key} if tool == FAQ else {}
        return [(tool, {"link_id": n} | topic) for n in self.links] if tool else []


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
        """A fresh tool server; the seed is that of its faults."""
        return Room(self, faults, seed)

    def link(self, n: int) -> dict:
        """All facts of link n, 1 being the first."""
        return self.links[n - 1]

    @property
    def strategy(self) -> str | None:
        """Id of the strategy skill that helps, if one does."""
        if len(self.asks) > 1:
            return "multi_intent"
        return "compare" if self.asks[0].kind == "compare" else None

    @property
    def reply_skill(self) -> str:
        """Id of the reply skill whose rules count: that of the first ask."""
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
    history, asks = [], [make_ask(world, rng, kind, links, current)]
    if intent == "clarify":
        asks[0].ref = "history"
    elif intent != "small_talk" and kind != "compare" and rng.random() < P_MERGED:
        kinds = {**KINDS["product"], "coupon": 1, "return": 1}
        del kinds["compare"], kinds[kind if kind in kinds else "attr"]
        second = asks[0]
        while _same_call(asks[0], second):  # one call for both would leave nothing to merge
            second = make_ask(world, rng, _draw(rng, kinds), links, current)
        asks.append(second)
    if intent == "clarify" or rng.random() < 0.15:  # without a follow-up the history is a distraction
        about = links[asks[0].link - 1] if intent == "clarify" else rng.choice(links)
        asked = comment(world, rng, Ask("price", about["link_id"]), links)
        said = world["say"]["price"].format(n=about["link_id"], **about)
        history = [{"role": world["role"][who], "text": text} for who, text in (("viewer", asked), ("avatar", said))]
    context = {
        "links": [{"link_id": x["link_id"], "name": x["name"]} for x in links],
        "current_link_id": current,
        "history": history,
        "signals": {"online": rng.randint(20, 9999)},
    }
    danmaku = [comment(world, rng, a, links) for a in asks]
    return Task(seed, intent, asks, danmaku, context, links, rng.choice(world.pool("promotion")), world)


def _same_call(a: Ask, b: Ask) -> bool:
    return any(call in b.calls(ROUTES[b.kind][0]) for call in a.calls(ROUTES[a.kind][0]))


def make_ask(world: World, rng: random.Random, kind: str, links: list[dict], current: int) -> Ask:
    """An ask of that kind about one of the links, or about the room."""
    if ROUTES[kind][0] in (None, ROOM):
        return Ask(kind)
    ref = _draw(rng, {"number": 5, "name": 3, "current": 2})
    n = current if ref == "current" else rng.randint(1, len(links))
    link = links[n - 1]
    if kind == "compare":
        other = rng.choice([x["link_id"] for x in links if x["price"] != link["price"]] or [n % len(links) + 1])
        return Ask(kind, n, other=other, ref=ref)
    keys = {"attr": rng.choice(list(link["attributes"])), "faq": rng.choice(list(link["faq"]))}
    keys["return"] = world["return_topic"]
    return Ask(kind, n, keys.get(kind, ""), ref=ref)


def comment(world: World, rng: random.Random, ask: Ask, links: list[dict]) -> str:
    """How a viewer types it, now and then with a typo or an emoji."""
    text = rng.choice(world["ask"][ask.kind])
    if ask.link is not None:
        name = links[ask.link - 1]["name"]
        ref = rng.choice(world["ref"][ask.ref]).format(n=ask.link, name=name)
        ref2 = rng.choice(world["ref"]["number"]).format(n=ask.other)
        text = text.format(ref=ref, ref2=ref2, key=ask.key)
    if rng.random() < P_NOISE:
        typos = [(a, b) for a, b in world["typo"].items() if a in text]
        if typos and rng.random() < 0.5:
            return text.replace(*rng.choice(typos), 1)
        return text + rng.choice(world["emoji"])
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
        if random.Random(seed_of(self.seed, "denied", tool)).random() < self.faults.denied:
            return json.dumps({"error": "permission_denied"})
        answer = json.dumps(self.answer(tool, arguments), ensure_ascii=False)
        key = (tool, same_call(self.task.world, arguments))
        if key in self.tried:
            return answer
        self.tried.add(key)
        draw = random.Random(seed_of(self.seed, *key)).random()
        if draw < self.faults.timeout:
            return json.dumps({"error": "timeout"})
        return answer[: len(answer) // 2] if draw < self.faults.timeout + self.faults.malformed else answer

    def answer(self, tool: str, arguments: dict) -> dict:
        """The truth, or {"error": "no_such_..."} for a question about what does not exist."""
        if tool == ROOM:
            return {"promotion": self.task.promotion, "online": self.context["signals"]["online"]}
        n = arguments.get("link_id")
        if type(n) is not int or not 1 <= n <= len(self.task.links):  # True is no link
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
        if tool != FAQ:
            return {"error": "no_such_tool"}
        topic, world = plain_topic(self.task.world, arguments.get("topic", "")), self.task.world
        if topic == world["return_topic"]:
            return {"days": x["days"]}
        if topic not in x["faq"]:
            return {"error": "no_such_topic"}
        return {"answer": world["faq_answer"]["yes" if x["faq"][topic] else "no"]}


def plain_topic(world: World, topic: Any) -> str:
    """A topic as the server reads it: whatever begins like that of returns is that one (退款, 退换)."""
    returns = world["return_topic"]
    return returns if str(topic).startswith(returns[0]) else str(topic)


def same_call(world: World, arguments: dict) -> str:
    """Equal text for arguments that the server answers alike."""
    topic = {"topic": plain_topic(world, arguments["topic"])} if "topic" in arguments else {}
    return canonical(arguments | topic)


def readable(text: str) -> dict | None:
    """A tool result as data; None for a fault or an error."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and "error" not in data else None


def met_fault(t: Trajectory) -> bool:
    """Whether a tool failed on this rollout: an unreadable result that is not the answer to a wrong question."""
    results = [e["text"] for e in t.events if e["event"] == "tool_result" and e["tool"] != LOAD_SKILL]
    return any(readable(text) is None and '"no_such_' not in text for text in results)


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
    values = {"n": ask.link, "key": ask.key, **x}
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
