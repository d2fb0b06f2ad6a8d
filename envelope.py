"""What the dimensions of HSA work with: the Envelope, how far a harness may move, and a Draft, a harness under change.

    d = Draft(harness, ENVELOPE, bank("train"), keep=None, rewrite=bank("train"))
    d.roll(seed, "tool")                                       dice of that dimension alone
    d.put("limit", "limits/max_turns", d.h.limits, "max_turns", 9)      changes, and notes it in d.log

A Draft renames wherever a name is said and keeps one that cannot be renamed safely; it takes a rewriter's text only if
that is faithful; it moves sentences and bullets that stand on their own, and no others. augment.py says what for.
"""

import copy
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from options import BadInput, option
from common import seed_of
from parts import LOAD_SKILL, RULES
from checks import Hook
from harness import Harness
from reword import BULLETS, IDENTIFIER, LINE, PLACEHOLDER, SENTENCE, STEP, STIFF, Bank, Rewriter
from reword import language, mention, new_name, unfaithful

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
PATH = r"[A-Za-z0-9_./:%#?=&~-]"  # characters of an address or a file's path
KINDS = ("telling", "snake", "kebab", "camel", "pinyin", "pseudo", "code", "han")  # of names
MANY_KINDS = (*KINDS, "telling", "telling", "snake", "pseudo")


@dataclass(frozen=True)
class Envelope:
    """How far a harness may move: what acts how often, and the legal range of each number."""

    # the five dimensions; 0 leaves one out
    skill_id: float = option(0.8, "P(skill names, descriptions and the list of skills change)", min=0, max=1)
    skill_content: float = option(0.8, "P(skill bodies change)", min=0, max=1)
    tool: float = option(0.8, "P(tool definitions change)", min=0, max=1)
    prompt: float = option(0.8, "P(the system prompt changes)", min=0, max=1)
    hook: float = option(0.6, "P(hooks and the retry budget change)", min=0, max=1)

    # inside a dimension that acts
    rename: float = option(0.9, "P(a tool or skill gets another name)", min=0, max=1)
    describe: float = option(0.7, "P(a description is rewritten)", min=0, max=1)
    reword: float = option(0.6, "P(a sentence, heading or message is reworded)", min=0, max=1)
    reorder: float = option(0.8, "P(an order is drawn anew)", min=0, max=1)
    restyle: float = option(0.5, "P(headings, a list format, the layout of a block change)", min=0, max=1)
    noise: tuple[int, int] = option((0, 2), "least and most noise skills", min=0, max=99)
    mask_skill: float = option(0.25, "P(a skill that the task does not need is left out)", min=0, max=1)
    mask_rule: float = option(0.1, "P(a rule of form is left out, with what checks it)", min=0, max=1)
    rename_parameters: float = option(0.0, "P(tool parameters get other names)", min=0, max=1)
    native_tools: float = option(0.0, "P(one-line tool list <-> the format's JSON list)", min=0, max=1)
    correct: float = option(0.15, "P(an added hook sends replies back)", min=0, max=1)
    kinds: tuple[str, ...] = option(MANY_KINDS, f"kinds of names, repeated = more often: {', '.join(KINDS)}")

    # legal ranges
    reply_chars: tuple[float, float] = option((0.85, 1.5), "max_reply_chars over the harness's own", min=0.1)
    turns: tuple[float, float] = option((0.9, 1.5), "max_turns over the harness's own", min=0.1)
    retries: tuple[int, int] = option((-1, 2), "max_retries less the harness's own; never less than 1", min=-99)

    def __post_init__(self):
        for name in ("noise", "reply_chars", "turns", "retries"):
            low, high = getattr(self, name)
            if low > high:
                raise BadInput(f"envelope: {name} is {low},{high}; the lower end comes first")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise BadInput(f"envelope: kinds are some of {', '.join(KINDS)}, not {self.kinds}")


ENVELOPE = Envelope()


class Draft:
    """A copy of the harness, the dice of the dimension at work, and the log of what was done.

    Log entries: dimension, change, at (the place as Harness.diff names it), from, to. Two kinds changed nothing:
    "rejected", a rewrite that was unfaithful (with text and why), and "kept", a name that could not be changed safely.
    """

    def __init__(self, h: Harness, e: Envelope, bank: Bank, keep: set[str] | None, rewrite: Rewriter):
        self.h, self.e, self.bank, self.keep, self.rewrite = h.copy(), e, bank, keep, rewrite
        self.log: list[dict] = []
        self.language = language("".join(h.blocks[b] for b in [*h.system, h.user]))
        self.words = bank.words[self.language]

    def roll(self, seed: int, dimension: str, *of: str) -> None:
        """Fresh dice for a dimension, or for one thing in it: they depend on nothing that another one did."""
        self.seed, self.dimension = seed, dimension
        self.rng = random.Random(seed_of("hsa", seed, self.bank.pool, dimension, *of))

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def note(self, change: str, at: str, old: Any, new: Any) -> None:
        entry = {"dimension": self.dimension, "change": change, "at": at, "from": old, "to": new}
        self.log.append(copy.deepcopy(entry))

    def put(self, change: str, at: str, box: Any, key: str, value: Any) -> None:
        """Set box.key, or box[key] of a dict; noted when it was another value."""
        if (old := read(box, key)) != value:
            self.note(change, at, old, value)
            box.__setitem__(key, value) if isinstance(box, dict | list) else setattr(box, key, value)

    def reword(self, text: str, what: str, at: str) -> str:
        """The rewriter's text, or the same one when that is not faithful."""
        if not text.strip():
            return text
        must = [x.name for x in (*self.h.skills, *self.h.tools)]
        must += [str(value) for s in self.h.skills for value in s.rules.values() if len(str(value)) > 1]
        new = self.rewrite(text, what, self.rng).strip()
        new = new and re.match(r"\s*", text)[0] + new + re.search(r"\s*$", text)[0]  # a model gives the words alone
        if why := unfaithful(text, new, tuple(must), max(1024, len(text)) if what == "description" else 4096):
            self.log.append({"dimension": self.dimension, "change": "rejected", "at": at, "text": text, "why": why})
            return text
        return new

    def texts(self) -> Iterator[tuple[str, Any, str]]:
        """(place, box, key) of every text that the policy may read."""
        for s in self.h.skills:
            yield from ((f"skills/{s.id}/{key}", s, key) for key in ("description", "body"))
            said = (key for key, value in s.rules.items() if isinstance(value, str) and key not in RULES)
            yield from ((f"skills/{s.id}/rules/{key}", s.rules, key) for key in said)
        for t in self.h.tools:
            yield f"tools/{t.id}/description", t, "description"
            yield from descriptions(f"tools/{t.id}/parameters", t.parameters, t.id == LOAD_SKILL)
        yield from ((f"{at}/message", hook, "message") for at, hook in hook_places(self.h))
        yield from ((f"blocks/{name}", self.h.blocks, name) for name in dict.fromkeys([*self.h.system, self.h.user]))
        yield from ((f"formats/{key}", self.h.formats, key) for key in self.h.formats)
        yield "fallback", self.h, "fallback"

    def said(self) -> list[str]:
        """Those texts themselves."""
        return [read(box, key) for _, box, key in self.texts()]

    def ambiguous(self, names: Iterable[str], others: set[str]) -> set[str]:
        """Those of the names that a text mentions so that it may not be meant: a word of prose that is neither quoted
        nor called ("compare the two"), a part of an address or a file's path, or a name of something else too."""
        names, found = set(names), set()
        pattern = mention(names)
        for text in self.said():
            for m in pattern.finditer(text):
                around = text[max(m.start() - 1, 0) : m.start()] + text[m.end() : m.end() + 1]
                place = re.search(rf"{PATH}*$", text[: m.start()])[0] + m[0] + re.match(rf"{PATH}*", text[m.end() :])[0]
                code = around.endswith("(") or around in ("``", "''", '""', "“”", "「」")
                address = "://" in place or re.search(r"/[^/]*\.[A-Za-z0-9]{1,5}$", place)
                if m[0] in others or address or not (code or IDENTIFIER.fullmatch(m[0])):
                    found.add(m[0])
        return found & names

    def rename(self, kind: str, things: list, others: set[str]) -> None:
        """New names for some skills or tools, in all texts too. others: names of the other kind."""
        chosen = [x for x in things if self.chance(self.e.rename)]
        stuck = self.ambiguous((x.name for x in chosen), others)
        style = self.rng.choice(self.e.kinds) if self.chance(0.5) else ""  # one kind for all, or each its own
        sense = {word: self.rng.choice(options) for word, options in self.bank.names["meaning"].items()}
        taken, new = self.taken(), {}
        for x in chosen:
            self.roll(self.seed, self.dimension, "name", x.id)
            if x.name in stuck:
                self.note("kept", f"{kind}/{x.id}/name", x.name, x.name)
            else:
                new[x.name] = self.draw_name(taken, style, x.name, sense)
                self.put("rename", f"{kind}/{x.id}/name", x, "name", new[x.name])
        self.replace_mentions(new)

    def taken(self) -> list[str]:
        """Where no new name may stand yet."""
        return [*self.said(), *(word for x in (*self.h.skills, *self.h.tools) for word in (x.id, x.name))]

    def draw_name(self, taken: list[str], style: str = "", old: str = "", sense: dict | None = None) -> str:
        """A name of a kind of the envelope that stands in none of the texts `taken`, and is added to them."""
        for n in count():
            kind = style or self.rng.choice(self.e.kinds)
            name = new_name(self.bank.names, kind, old, sense or {}, n // 2, self.rng)
            if not any(name in text for text in taken):
                taken.append(name)
                return name

    def replace_mentions(self, new: dict[str, str]) -> None:
        """Each old name in any text becomes the new one, all in one pass."""
        pattern = mention(new)
        for at, box, key in list(self.texts()):
            self.put("mention", at, box, key, pattern.sub(lambda m: new.get(m[0], m[0]), read(box, key)))

    def describe(self, at: str, box: Any, what: str = "description") -> None:
        """Another description of a skill, a tool or a parameter."""
        if self.chance(self.e.describe):
            at = f"{at}/description"
            self.put("describe", at, box, "description", self.reword(read(box, "description"), what, at))

    def order(self, things: Iterable) -> list:
        """The same things, most often in another order."""
        things = list(things)
        return self.rng.sample(things, len(things)) if self.chance(self.e.reorder) else things

    def reorder(self, kind: str, before: list[str]) -> None:
        """Another order of the skills or the tools; before: their ids at the start of the dimension."""
        self.roll(self.seed, self.dimension, "order")
        things = self.order(getattr(self.h, kind))
        setattr(self.h, kind, things)
        if (after := [x.id for x in things]) != before:
            self.note("reorder", f"{kind} order", before, after)

    def recast(self, at: str, text: str, free: Callable[[str], Any] | None, drop: set[str] = frozenset()) -> str:
        """A body or block with sentences reworded, what is free to move in another order, and another layout.

        free: whether a sentence stands on its own; None: nothing moves. drop: {rules} whose sentences are left out.
        Bullets of one list move too, unless one speaks of an order, leads on to what is below it or is continued there;
        all else keeps its place.
        """
        lines, runs, out = text.split("\n"), [], []  # runs: (kind, bullet, sentences) of each line
        fenced, indented = "", False  # the fence of the code that is open; a block of code without one
        for above, line, below in zip(["", *lines], lines, [*lines[1:], ""]):
            fence = FENCE.match(line)
            indented = line.startswith(("    ", "\t")) and (indented or not above.strip())
            code = fence or fenced or indented
            if fenced and fence and fence[1].startswith(fenced) and line.strip() == fence[1]:
                fenced = ""
            elif fence and not fenced:
                fenced = fence[1]
            mark, rest = LINE.fullmatch(line).groups()
            said = [s for s in SENTENCE.split(rest) if s and not drop & set(PLACEHOLDER.findall(s))]
            if code or STIFF.match(line):
                runs.append(("stiff", "", [line]))
            elif said:
                free_all = free is not None and all(map(free, said))
                if not PLACEHOLDER.fullmatch(rest):  # {links}: lines of its own
                    said = [self.reword(s, "instruction", at) if self.chance(self.e.reword) else s for s in said]
                leads = rest.rstrip().endswith((":", "：")) or below.strip() and LINE.fullmatch(below)[1] not in BULLETS
                listed = mark in BULLETS and not leads
                kind = "list" if listed else "loose" if free_all and not mark else "stiff"
                runs.append((kind, mark, ["".join(said)] if listed else said))
        for (kind, mark), group in groupby(runs, lambda run: run[:2]):
            parts = [part for _, _, part in group]
            items = [item for part in parts for item in part]
            fixed = kind == "stiff" or free is None or (kind == "list" and any(map(STEP.search, items)))
            moved = items if fixed else self.order(items)
            if fixed or len(items) < 2 or not (self.chance(self.e.restyle) or moved != items):
                out += [mark + "".join(part) for part in parts]
                continue
            inline = kind == "loose" and len(parts) == 1
            if self.chance(self.e.restyle) and not any(map(PLACEHOLDER.fullmatch, items)):
                inline = kind == "loose" and self.chance(0.4)
                mark = "" if kind == "loose" and self.chance(0.5) else self.rng.choice(BULLETS[:3])
            moved = [item.strip() for item in moved]
            if inline and all(item.endswith(tuple("。！？.!?")) for item in moved):
                out.append(("" if language(moved[0], self.language) == "zh" else " ").join(moved))
            else:
                out += [mark + item for item in moved]
        return "\n".join(out)


def read(box: Any, key: str | int) -> Any:
    return box.get(key) if isinstance(box, dict) else box[key] if isinstance(box, list) else getattr(box, key)


def descriptions(at: str, schema: Any, values: bool = False) -> Iterator[tuple[str, dict | list, str | int]]:
    """(place, box, key) of every text inside a JSON schema: descriptions and titles.

    values: and of what an argument may be, which is a name where skills are loaded, and elsewhere is the tool's own.
    """
    texts = ("description", "title", *(("default", "const") if values else ()))
    for x in schema if isinstance(schema, list) else ():  # Harness.diff names a list as a whole
        yield from ((at, box, key) for _, box, key in descriptions(at, x, values))
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in texts and isinstance(value, str):
            yield f"{at}/{key}", schema, key
        elif values and key == "examples" and isinstance(value, list):
            yield from ((f"{at}/{key}", value, i) for i, x in enumerate(value) if isinstance(x, str))
        yield from descriptions(f"{at}/{key}", value, values)


def hook_places(h: Harness) -> list[tuple[str, Hook]]:
    """Each hook with its place as Harness.diff names it."""
    seen, places = Counter(), []
    for x in h.hooks:
        seen[key := f"{x.event}.{x.check}"] += 1
        places.append((f"hooks/{key}" if seen[key] == 1 else f"hooks/{key} {seen[key]}", x))
    return places
