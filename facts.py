"""Ground-truth facts about a rollout: four rewards, from the world, the trace and the harness that was in force.

    accuracy       0 / 1        no number, name or claim beyond what the tools returned, and something asked is answered
    effectiveness  0 / 0.5 / 1  all that is asked is answered and nothing else, by the rules of the right reply skill
    tool           0 .. 1       asks served by right calls / (asks + needless, repeated or refused calls)
    skill          0 .. 1       Jaccard of the skills loaded and the skills wanted

Facts need no judge and cannot be talked round: a claim counts where it is made, of the very link that it is made of,
and only what a tool has returned may be claimed. The rules that a reply must keep (closing particle, must-say ...) are
those of the skill in the harness, never of this file; what they tell it to say is no claim of the policy's.

    python facts.py --seed 3        one task, how the oracle handles it, and its rewards

Left out, judges see to it:
- synonyms beyond world.synonym: a right answer in words that the world does not know is no answer here;
- claims in words that the world does not know ("特别好用", a product of no pool that no number precedes), and a number
  that was read about the link, said of another thing in the same unit ("只要20元" of a coupon of 20).
"""

import json
import re
from collections import Counter, defaultdict
from functools import lru_cache

from options import parse
from common import cli
from chat import Trajectory
from parts import LOAD_SKILL
from checks import broken_rule, own_words, terms_of
from harness import Harness
from sim import ROUTES, Ask, Task, World, readable, same_call, wanted
from oracle import Config, demo

REWARDS = ("accuracy", "effectiveness", "tool", "skill")
NUMBERS = ("price", "coupon", "stock", "hours", "days")  # the numbers that world.say states about a link
FIELD = re.compile(r"\{(\w+)\}")  # of a template
CLAUSE = "，。；！？,.;!?"  # what ends one


def score(h: Harness, task: Task, t: Trajectory) -> dict[str, float | None]:
    """Ground-truth rewards in [0, 1]; all None when the rollout died for reasons that are not the policy's.

    A rollout without a reply of the policy (fallback, cut, too many turns) has accuracy and effectiveness 0.
    An ask that no tool would tell counts as answered by an honest word, "cannot be checked". Effectiveness is 0.5 when
    the rules are broken, when only some asks are answered, or when more is read out than was asked.
    """
    if t.stop_reason == "error":
        return dict.fromkeys(REWARDS)
    calls = [e for e in t.events if e["event"] == "tool_call"]
    arguments = {e["call_id"]: same_call(task.world, e["arguments"]) for e in calls}
    results = [e for e in t.events if e["event"] == "tool_result" and e["tool"] != LOAD_SKILL]
    made = [(e["tool"], arguments[e["call_id"]], e["text"]) for e in results]
    loads = [e["skill"] for e in t.events if e["event"] == "skill"]
    loaded, expected = set(loads), {id for id in (task.reply_skill, task.strategy) if h.skill(id)}
    wasted = sum(e["event"] == "tool_error" for e in t.events) + len(loads) - len(loaded)

    tool, fates = _tool_rationality(h, task, made, wasted)
    skill = len(loaded & expected) / len(loaded | expected) if loaded | expected else 1.0
    accuracy = effectiveness = 0.0
    if t.stop_reason == "reply":
        right = h.skill(task.reply_skill)
        rules = right.rules if right else {}
        reply, read = _plain(task.world, own_words(t.reply, rules)), _read(made)
        answered = [_answers(task, ask, reply, fate) for ask, fate in zip(task.asks, fates)]
        accuracy = float(any(answered) and _truthful(task, reply, read, fates))
        perfect = all(answered) and not broken_rule(t.reply, rules) and not _unasked(task, reply, read)
        effectiveness = 1.0 if perfect else 0.5 if any(answered) else 0.0
    return {"accuracy": accuracy, "effectiveness": effectiveness, "tool": tool, "skill": skill}


# ---------------------------------------------------------------------------------------------------------------------
# tools: which calls served an ask


def _tool_rationality(h: Harness, task: Task, made: list[tuple], wasted: int) -> tuple[float, list[str]]:
    """(score, fate of each ask): had = its facts were read; gone = every way to them failed for good; untried.

    A retry is right after a timeout or a malformed answer; the other tool after a failure, or in place of the main one;
    anything else is needless.
    made: (tool, canonical arguments, result text) of each call. wasted: other calls that should not have been made.
    """
    routes = []  # per ask: its calls, each with the call that may replace it
    for ask in task.asks:
        main, other, _ = ROUTES[ask.kind]
        calls, swaps = ([(tool, same_call(task.world, args)) for tool, args in ask.calls(way)] for way in (main, other))
        routes.append(list(zip(calls, swaps or [None] * len(calls))))
    mains = {call for pairs in routes for call, _ in pairs}
    replaces = {swap: call for pairs in routes for call, swap in pairs if swap}

    done, needless, called = set(), wasted, {call[:2] for call in made}
    failures = Counter({call: 2 for call in mains | set(replaces) if h.tool(call[0]) is None})  # not in this harness
    for tool, args, text in made:
        call = (tool, args)
        right = call in mains or (call in replaces and (failures[replaces[call]] > 0 or replaces[call] not in called))
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
    needed = [f for pairs, f in zip(routes, fates) if pairs]
    served = sum(f != "untried" for f in needed) if needed else 1
    return served / (max(len(needed), 1) + needless), fates


# ---------------------------------------------------------------------------------------------------------------------
# reading a reply


def says(text: str, piece: str) -> bool:
    """Whether a text contains a piece; a number at its edge must stand alone ('89' is not in '189')."""
    before = r"(?<![\d.])" if piece[0].isdigit() else ""
    after = r"(?!\d|\.\d)" if piece[-1].isdigit() else ""
    return piece in text and re.search(before + re.escape(piece) + after, text) is not None


def by_link(task: Task, reply: str) -> list[tuple[int | None, str]]:
    """(link that it is about, text) for each part of a reply. A part begins where a link is named; None: before any."""
    named = [(found.start(), int(re.search(r"\d+", found[0])[0])) for found in _refs(task.world).finditer(reply)]
    named += [(found.start(), x["link_id"]) for x in task.links for found in re.finditer(re.escape(x["name"]), reply)]
    named = [(0, None), *sorted(named), (len(reply), None)]
    return [(n, reply[start:end]) for (start, n), (end, _) in zip(named[:-1], named[1:]) if start < end]


def _plain(w: World, reply: str) -> str:
    """The reply with the world's word for each synonym."""
    for pattern, word in w["synonym"].items():
        reply = re.sub(pattern, word, reply)
    return reply


def _answers(task: Task, ask: Ask, reply: str, fate: str) -> bool:
    """Whether the reply tells what was asked, where it speaks of that link, numbers with their unit."""
    w, keywords = task.world, task.world["small_talk_keyword"]
    about = "".join(text for n, text in by_link(task, reply) if n is None or not ask.links or n in ask.links)
    if fate != "had":
        return fate == "gone" and w["denied_keyword"] in about
    key, values, pieces = wanted(task, ask)
    if ask.kind == "faq":
        return _verdicts(w, about, ask.key) == set(pieces)
    if ask.kind in keywords:
        return [word for word in keywords.values() if word in reply] == pieces  # one more would be a hedge
    units = {str(values[field]): _units(w).get(field, "") for field in FIELD.findall(w["say"][key])}
    return all(says(about, piece + units.get(piece, "")) for piece in pieces)


def _verdicts(w: World, text: str, topic: str) -> set[str]:
    """The answers, yes or no, that a text gives on a topic."""
    clauses = re.split(f"[{CLAUSE}]", text)
    about = "，".join(clause for clause in clauses if topic in clause) or text
    yes, no = w["faq_answer"]["yes"], w["faq_answer"]["no"]
    return {word for word, text in ((no, about), (yes, about.replace(no, ""))) if word in text}


# ---------------------------------------------------------------------------------------------------------------------
# truth: nothing is claimed that was not read

world_cache = lru_cache(maxsize=8)  # worlds in use at a time


@world_cache
def _refs(w: World) -> re.Pattern:
    """Any link named by its number."""
    refs = sorted(w["ref"]["number"], key=len, reverse=True)
    return re.compile("|".join(re.escape(ref.format(n="@")).replace("@", r"(?<!\d)\d{1,9}") for ref in refs))


@world_cache
def _stated(w: World) -> list[tuple[str, re.Pattern]]:
    """(which number, its pattern with the character on either side) for each number in world.say."""
    found = [x for text in w["say"].values() for x in re.findall(r"([^\s{}]?)\{(\w+)\}([^\s{}]?)", text)]
    number = r"(\d+(?:\.\d+)?)"
    return [(key, re.compile(re.escape(a) + number + re.escape(b))) for a, key, b in found if key in NUMBERS]


@world_cache
def _units(w: World) -> dict[str, str]:
    """Which number -> the character that follows it in world.say."""
    found = [x for text in w["say"].values() for x in re.findall(r"\{(\w+)\}(\s?\w)", text)]
    units = {key: unit for key, unit in found if key in NUMBERS}
    return units | {"list_price": units["price"]}


@world_cache
def _valued(w: World) -> re.Pattern:
    """(attribute, value that is said to be its value), the value being of any attribute."""
    keys = "|".join(map(re.escape, w["attribute"]))
    values = {value for pool in w["attribute"].values() for split in pool.values() for value in split}
    values = "|".join(re.escape(v) for v in sorted(values, key=len, reverse=True))
    gap = re.escape(re.search(r"\{key\}([^{}]*)\{value\}", w["say"]["attr"])[1])
    return re.compile(f"({keys})(?:{gap})?({values})")


@world_cache
def _naming(w: World) -> re.Pattern:
    """(link's number, what makes it a reference or leads to a name in world.say, the rest of the clause)."""
    gaps = {gap for text in w["say"].values() for gap in re.findall(r"\{n\}([^{}]*)\{name\}", text)}
    gaps |= {ref.partition("{n}")[2] for ref in w["ref"]["number"] if ref.startswith("{n}")}
    gaps = "|".join(re.escape(gap) for gap in sorted(gaps, key=len, reverse=True))
    return re.compile(rf"(?<!\d)(\d{{1,9}})({gaps})(?=([^{CLAUSE}]*))")


def _read(made: list[tuple]) -> dict[int | None, list[dict]]:
    """Link (None: the room) -> what was read about it."""
    read = defaultdict(list)
    for _, args, text in made:
        link = json.loads(args).get("link_id")
        if (data := readable(text)) is not None and isinstance(link, int | None):  # the policy may write anything there
            read[link].append(data)
    return read


def _truthful(task: Task, reply: str, read: dict, fates: list[str]) -> bool:
    """No claim beyond the evidence: each number, name and known value was read, and is said of the right link."""
    asked = {n for ask in task.asks for n in ask.links}
    gone = {ask.link for ask, fate in zip(task.asks, fates) if fate == "gone"}
    for owner, text in by_link(task, reply):
        if owner is not None and owner not in asked:
            return False  # nobody asked about that link
        scope = {owner} if owner else asked
        facts = [data for n in (None, *scope) for data in read.get(n, [])]
        excused = gone & {owner, None} if owner else gone
        if not _grounded(task, text, scope, facts, excused):
            return False
        for key, pattern in _stated(task.world):
            if not set(pattern.findall(text)) <= {str(task.link(n)[key]) for n in scope}:
                return False  # that number is another link's, or another fact's
        for key, value in _valued(task.world).findall(text):
            if value not in [task.link(n)["attributes"].get(key) for n in scope]:
                return False  # that value is another attribute's
    return not _misnamed(task, reply) and not _misjudged(task, reply, fates)


def _grounded(task: Task, text: str, scope: set[int], facts: list[dict], excused: set) -> bool:
    """Whether a part of the reply claims only what the facts about the links in scope say.

    excused: links (None: the room) of which it may say that they cannot be checked.
    """
    w = task.world
    words = {str(value) for data in facts for value in data.values()} | {task.link(n)["name"] for n in scope}
    words |= {ask.key for ask in task.asks if ask.key and (scope & set(ask.links))}
    rest = _refs(w).sub(CLAUSE[0], text)  # a link's number grounds no other
    for word in sorted(words, key=len, reverse=True):
        rest = rest if word.isdigit() else rest.replace(word, CLAUSE[0])

    for unit in set(_units(w).values()):
        own = {str(data[key]) for data in facts for key, u in _units(w).items() if u == unit and key in data}
        if not set(re.findall(rf"(\d+(?:\.\d+)?)\s*{unit}", rest)) <= own:
            return False
    stock = [data["stock"] for data in facts if "stock" in data]
    claims = [(w["sold_out_keyword"], "stock", 0), (w["no_coupon_keyword"], "coupon", 0)]
    claims.append((w["faq_answer"]["no"], "answer", w["faq_answer"]["no"]))
    return (
        set(terms_of(rest)) <= {term for word in words for term in terms_of(word)}
        and not any(word in rest for word in (*w["promise"], *w["hearsay"]))
        and not re.search(w["spelled_number"], rest)
        and not any(value in rest and not any(value in word for word in words) for value in w.values)
        and (any(stock) or not any(word in rest for word in w["in_stock_keyword"]))
        and (bool(excused) or w["denied_keyword"] not in text)
        and all(any(data.get(key) == x for data in facts) for claim, key, x in claims if claim in text)
    )


def _misnamed(task: Task, reply: str) -> bool:
    """Whether another name than its own stands where a link's name may stand: after its number.

    What stands between the number and what a template of world.say says of it is a name, or fillers and an attribute's
    value; so is all after "N号链接是".
    """
    w = task.world
    for number, gap, text in _naming(w).findall(reply):
        x, tails = task.link(int(number)), []
        for ask in task.asks:
            key, values, _ = wanted(task, ask)
            if int(number) in ask.links:
                _, name, tail = w["say"][key].rpartition("{name}")
                ref = max((r for r in w["ref"]["number"] if tail.startswith(r)), key=len, default="")
                tail = tail if name else tail.removeprefix(ref)
                tails.append(re.split(f"[{CLAUSE}]", tail.format(**values))[0])
        bare = "{n}" + gap in w["ref"]["number"]
        said = next((text.partition(tail)[0] for tail in tails if tail and tail in text), "" if bare else text)
        said = re.sub(w["filler"], "", said.replace(x["name"], ""))
        if said not in x["name"] and said not in x["attributes"].values():
            return True
        if any(text.startswith(other["name"]) for other in task.links if other is not x):
            return True
    return False


def _misjudged(task: Task, reply: str, fates: list[str]) -> bool:
    """Whether a yes or no, or which of two is cheaper, is said otherwise than it was read."""
    w = task.world
    for ask, fate in zip(task.asks, fates):
        right = set(wanted(task, ask)[2]) if fate == "had" else set()
        if ask.kind == "faq":
            about = "".join(text for n, text in by_link(task, reply) if n in (None, ask.link))
            if ask.key in about and not _verdicts(w, about, ask.key) <= right:
                return True
        if ask.kind == "compare":
            cheaper = {w["cheaper"].format(n=n) for n in ask.links}
            if any(says(reply, claim) for claim in cheaper - right):
                return True
    return False


def _unasked(task: Task, reply: str, read: dict) -> bool:
    """Whether something is read out that was read but not asked for."""
    w, due = task.world, []
    for ask in task.asks:
        key, values, _ = wanted(task, ask)
        due += [str(values[field]) for field in FIELD.findall(w["say"][key])]
        due += [task.link(n)["name"] for n in ask.links]
        due += [str(task.link(n)["price"]) for n in ask.links if ask.kind == "compare"]
    facts = [(str(x), str(x) + _units(w).get(key, "")) for each in read.values() for d in each for key, x in d.items()]
    return any(says(reply, text) and not any(says(d, value) for d in due) for value, text in facts)


# ---------------------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    print(f"rewards: {score(*demo(parse(Config, {}, argv, __doc__)))}")


if __name__ == "__main__":
    cli(main)
