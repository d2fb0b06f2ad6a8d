"""HSA, Harness-State Augmentation: other states of one harness, so that a policy reads the one it is given.

    augment(harness, seed)  ->  (harness', log)       another surface; the same ids, functions and task

The five dimensions of the report, each with its own probability in the Envelope, and the shortcut that each breaks:

    skill_id       rename, rewrite descriptions, add noise skills, mask irrelevant ones      routing by a fixed name
    skill_content  reword rules, reorder them, mask non-essential ones                        position and wording
    tool           rename, rewrite descriptions, reorder; parameters too, on request          tool-name matching
    prompt         reorder blocks and their items, headings, list formats, numeric limits     a known template
    hook           retry budget, wording of messages, an added hook that corrects a reply     a memorised retry

One Envelope serves supervised data and reinforcement learning. All words come from data/hsa, where every pool has a
train and a heldout half without a common entry: what was trained on the one is tested on the other. A dimension's dice
depend on the seed alone, so to leave one out (its probability 0) changes nothing in the others.

What a text *means* stays. The bank rewords by whole sentences that it knows, by rule key ({closing}, {must_say} ...)
and, for texts of strangers, word by word outside of quotes, code, links and names; an Endpoint asks a language model.
Either way `unfaithful` compares numbers, quotes, names, negations, bounds and order, and a text that fails stays.

    python augment.py show --seed 3 [--harness DIR] [--pool heldout] [--only tool]      before and after, as a diff
    python augment.py show --endpoint http://localhost:8000/v1 --llm NAME               texts reworded by a server

Left out: changes of rule values, of the fallback reply and of hook params; masking what no metadata calls optional,
unless the caller says which ids the task needs; reordering of numbered steps and of prose that the bank does not know.
Expect: a harness in five milliseconds; the shipped prompt grows by 15% on average, noise skills included.
"""

import difflib
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Literal

from options import BadInput, closest, option, parse
from common import cli
from parts import LOAD_SKILL, Skill
from checks import Deny, Hook, Moment, broken_rule
from harness import FORMATS, Harness, assemble
from reword import LINE, PLACEHOLDER, SENTENCE, STIFF, Endpoint, Rewriter
from reword import bank, language, mention, new_format, plain_rule
from envelope import ENVELOPE, Draft, Envelope, hook_places, read

FORM_RULES = ("closing", "opening", "must_say", "max_chars")  # may be masked; what must *not* be said always stays
LISTS = {"skill": "{skills}", "tool": "{tools}", "link": "{links}", "turn": "{history}", "signal": "{signals}"}

# ---------------------------------------------------------------------------------------------------------------------
# the five dimensions


def skill_id(d: Draft) -> None:
    """Routing by a fixed name ends: other names and descriptions, more skills or fewer, in any order."""
    h, own, before = d.h, list(d.h.skills), [s.id for s in d.h.skills]
    old = {s.id: s.name for s in own}
    for s in d.rng.sample(own, len(own)):
        if d.chance(d.e.mask_skill) and not needed(d, s):
            d.note("mask", f"skills/{s.id}", shown(s), None)
            h.skills.remove(s)
            own.remove(s)
    for made in d.rng.sample(d.words["noise"], min(d.rng.randint(*d.e.noise), len(d.words["noise"]))):
        id = next(id for n in count() if (id := f"noise_{n}") not in before and h.skill(id) is None)
        h.skills.append(Skill(id, d.draw_name(d.taken()), **made))
        d.note("noise", f"skills/{id}", None, shown(h.skills[-1]))
    d.rename("skills", own, {t.name for t in h.tools})
    for s in own:
        d.describe(f"skills/{s.id}", s)
    for s in [s for s in h.skills if s not in own]:  # among the others, even where the order stays
        h.skills.remove(s)
        h.skills.insert(d.rng.randint(0, len(h.skills)), s)
    d.reorder("skills", before)
    loader = h.tool(LOAD_SKILL).parameters["properties"].values() if h.tool(LOAD_SKILL) else ()
    for schema in (x for x in loader if isinstance(x, dict) and "enum" in x):  # it lists what it loads, or some of it
        listed, known = schema["enum"], [*old.values()]
        whole = all(name in listed for name in known)
        new = [s.name for s in h.skills if whole or old.get(s.id) in listed] + [x for x in listed if x not in known]
        d.put("mention", f"tools/{LOAD_SKILL}/parameters", schema, "enum", new)


def shown(s: Skill) -> dict:
    """All of a skill that counts."""
    return {key: value for key, value in asdict(s).items() if key != "extra"}


def needed(d: Draft, s: Skill) -> bool:
    """Whether a skill must stay: the task needs it, another text sends to it, or it is the last of its kind.

    Without `keep` nobody knows the task: then only what is marked may go (metadata optional: true, or noise).
    """
    optional = bool(s.rules.get("optional")) or s.id.startswith("noise_")
    if s.id in d.keep if d.keep is not None else not optional:
        return True
    texts = [read(box, key) for _, box, key in d.texts() if box is not s]
    named = any(found in (s.name, f"{{skill:{s.id}}}") for text in texts for found in mention([s.name]).findall(text))
    return named or not any(other.kind == s.kind for other in d.h.skills if other is not s)


def skill_content(d: Draft) -> None:
    """Position and wording of a rule end to tell it: sentences reworded and moved, rules of form masked."""
    for s in d.h.skills:
        d.roll(d.seed, d.dimension, s.id)
        masked = {key for key in FORM_RULES if key in s.rules and d.chance(d.e.mask_rule) and only_plain(s.body, key)}
        free = d.bank.knows if s.kind == "reply" else plain_rule  # what else a strategy says are steps, in order
        body = d.recast(f"skills/{s.id}/body", s.body, free, {f"{{{key}}}" for key in masked}).strip()
        if not body:
            continue  # nothing but masked rules
        d.put("mask" if masked else "recast", f"skills/{s.id}/body", s, "body", body)
        d.put("mask", f"skills/{s.id}/rules", s, "rules", {k: v for k, v in s.rules.items() if k not in masked})


def only_plain(body: str, key: str) -> bool:
    """Whether a rule stands in sentences of its own and nowhere else, so that these can go."""
    lines = [line for line in body.split("\n") if f"{{{key}}}" in line]
    said = [x for line in lines for x in SENTENCE.split(LINE.fullmatch(line)[2]) if f"{{{key}}}" in x]
    return all(plain_rule(x) == key for x in said) and "```" not in body and not any(map(STIFF.match, lines))


def tool(d: Draft) -> None:
    """Tool-name matching ends: other names, descriptions and orders, the same functions."""
    before = [t.id for t in d.h.tools]
    d.rename("tools", d.h.tools, {s.name for s in d.h.skills})
    if d.chance(d.e.rename_parameters):
        rename_parameters(d)
    for t in d.h.tools:
        d.roll(d.seed, d.dimension, t.id)
        at, properties = f"tools/{t.id}", t.parameters["properties"]
        d.describe(at, t)
        for key, schema in properties.items():
            if isinstance(schema, dict) and isinstance(schema.get("description"), str):
                d.describe(f"{at}/parameters/properties/{key}", schema, "parameter")
        if (keys := d.order(properties)) != list(properties):
            d.note("reorder", f"{at}/order", list(properties), keys)
            t.parameters["properties"] = {key: properties[key] for key in keys}
    d.reorder("tools", before)


SIMPLE = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema"}


def rename_parameters(d: Draft) -> None:
    """One new name for each parameter name, in every tool; a schema that may refer to its keys keeps all of them."""
    odd = [t for t in d.h.tools if not set(t.parameters) <= SIMPLE]
    fixed = {key for t in odd for key in t.parameters["properties"]}
    shown = dict.fromkeys(key for t in d.h.tools for key in t.parameters["properties"] if key not in fixed)
    stuck = d.ambiguous(shown, {x.name for x in (*d.h.tools, *d.h.skills)})
    taken, words, new = "\n".join([*d.taken(), *shown, *fixed]), d.bank.names["parameters"], {}
    for key in shown:
        drawn = ("_".join(d.rng.sample(words, min(1 + n // 8, len(words)))) for n in count())
        if key not in stuck:
            new[key] = next(x for x in drawn if x not in taken and x not in new.values())
    for t in (t for t in d.h.tools if t not in odd):
        schema = {**t.parameters, "properties": {new.get(k, k): v for k, v in t.parameters["properties"].items()}}
        if "required" in schema:
            schema["required"] = [new.get(k, k) for k in schema["required"]]
        if list(schema["properties"]) != list(t.param_ids):
            d.note("rename", f"tools/{t.id}/order", list(t.param_ids), list(schema["properties"]))
        d.put("rename", f"tools/{t.id}/param_ids", t, "param_ids", {new.get(k, k): v for k, v in t.param_ids.items()})
        d.put("rename", f"tools/{t.id}/parameters", t, "parameters", schema)
    d.replace_mentions(new)


def prompt(d: Draft) -> None:
    """The known template ends: other order, headings, list formats, words and limits."""
    h, e = d.h, d.e
    if d.chance(e.native_tools):
        switch_tool_list(d)
    d.put("reorder", "system", h, "system", d.order(h.system))
    style = d.rng.choice(d.words["headings"]) if d.chance(e.restyle) else ""

    def stands_alone(text):
        return d.bank.knows(text) or PLACEHOLDER.fullmatch(text)

    for name in dict.fromkeys([*h.system, h.user]):
        at, (head, below, rest) = f"blocks/{name}", h.blocks[name].partition("\n")
        if below and (title := d.bank.title(head)):
            new = d.reword(title, "heading", at) if d.chance(e.reword) else title
            head = (style.replace("{x}", new) if style else head.replace(title, new)) + "\n"
        else:
            head, rest = "", h.blocks[name]
        # what is asked comes last, whatever stands before it
        rest = d.recast(at, rest, stands_alone if name != h.user else None)
        d.put("recast", at, h.blocks, name, head + rest)
    shown = "".join(h.blocks[b] for b in [*h.system, h.user])
    for key, listing in LISTS.items():
        if listing in shown and d.chance(e.restyle):
            old, new = h.formats.get(key, FORMATS[key]), new_format(d.words, key, d.language, d.rng)
            shown_too = {*PLACEHOLDER.findall(old)} <= {*PLACEHOLDER.findall(new)}  # a {price} of one's own stays
            if shown_too:
                d.put("format", f"formats/{key}", h.formats, key, new)
    for key, legal in (("max_reply_chars", e.reply_chars), ("max_turns", e.turns)):
        d.put("limit", f"limits/{key}", h.limits, key, legal_limit(d, key, *legal))


def switch_tool_list(d: Draft) -> None:
    """From the one-line list in a block to the chat format's JSON list, or back."""
    h = d.h
    listing = [b for b in h.system if "{tools}" in h.blocks[b]]
    if h.native_tools:
        name = next(name for n in count() if (name := f"tools{n or ''}") not in h.blocks)
        h.blocks[name] = d.rng.choice(d.words["headings"]).replace("{x}", d.rng.choice(d.words["tools"])) + "\n{tools}"
        d.note("format", f"blocks/{name}", None, h.blocks[name])
        d.put("format", "system", h, "system", [*h.system, name])
    elif len(listing) == 1 and re.fullmatch(r"(?:[^\n]*\n)?\{tools\}", h.blocks[listing[0]]):
        d.note("format", f"blocks/{listing[0]}", h.blocks[listing[0]], None)
        d.put("format", "system", h, "system", [b for b in h.system if b not in listing])
    else:
        return  # the list stands among other words, or in several places
    d.put("format", "native_tools", h, "native_tools", not h.native_tools)


def legal_limit(d: Draft, key: str, low: float, high: float) -> int:
    """A value within low..high times the limit's own. Stricter only where the prompt shows it as {key}; the same where
    some text spells it out in digits, which would then be wrong."""
    own, shown = getattr(d.h.limits, key), "".join(d.h.blocks[b] for b in [*d.h.system, d.h.user])
    texts = [shown, *(x.message for x in d.h.hooks), *(s.body for s in d.h.skills)]
    if any(re.search(rf"(?<!\d){own}(?!\d)", text) for text in texts):
        return own
    least = math.ceil(own * low) if f"{{{key}}}" in shown else own
    return d.rng.randint(min(least, own), max(own, math.floor(own * high)))


def hook(d: Draft) -> None:
    """A memorised retry ends: other budgets, other words, and now and then a hook that sends a reply back."""
    h, e, own = d.h, d.e, d.h.limits.max_retries
    for at, x in hook_places(h):
        words, said = d.bank.words[language(x.message, d.language)], x.message
        if d.chance(e.reword):
            mute = said == "{detail}"  # no words of its own
            said = d.rng.choice(words["checks"].get(x.check, [said])) if mute else d.reword(said, "message", at)
        frame = d.rng.choice(words["messages"]) if d.chance(e.restyle) else "{x}"
        d.put("message", f"{at}/message", x, "message", frame.replace("{x}", said))
    low, high = (own + step for step in e.retries)
    budget = d.rng.randint(min(own, max(1, low)), max(own, high))
    if d.chance(e.correct):
        kind = d.rng.choice(list(CORRECTIONS))
        check, params, cost = CORRECTIONS[kind]
        before = [at.removeprefix("hooks/") for at, _ in hook_places(h)]
        h.hooks.append(Hook("reply", check, "", dict(params), d.rng.choice(d.words["corrections"][kind])))
        at = hook_places(h)[-1][0]
        d.note("correction", at, None, asdict(h.hooks[-1]))
        d.note("correction", "hooks order", before, [*before, at.removeprefix("hooks/")])
        budget += cost  # what a right policy spends on it is paid for
        d.put("correction", "limits/max_turns", h.limits, "max_turns", h.limits.max_turns + cost)
    d.put("retries", "limits/max_retries", h.limits, "max_retries", budget)


DIMENSIONS = {f.__name__: f for f in (skill_id, skill_content, tool, prompt, hook)}


def augment(
    h: Harness,
    seed: int,
    envelope: Envelope = ENVELOPE,
    pool: str = "train",
    keep: set[str] | None = None,
    rewrite: Rewriter | None = None,
) -> tuple[Harness, list[dict]]:
    """Another state of the harness, and the log of what was done to it (see Draft). The report's five HSA dimensions.

    keep: ids of the skills that the task needs; every other one may be masked. Without it only those whose metadata say
    `optional: true`. rewrite: in place of the bank for descriptions, sentences and messages, e.g. an Endpoint.
    Same arguments, same harness (with an Endpoint: if its server is deterministic). BadInput for an unknown pool.
    """
    d = Draft(h, envelope, bank(pool), keep, rewrite or bank(pool))
    for name, act in DIMENSIONS.items():
        d.roll(seed, name)
        if d.chance(getattr(envelope, name)):
            act(d)
    return d.h.copy(), d.log


# ---------------------------------------------------------------------------------------------------------------------
# hook-triggered corrections: checks that an augmented harness may have beside its own


def confirm(m: Moment, pattern: str = "") -> Deny | None:
    """The first reply that matches is sent back once; the next one passes."""
    if getattr(m, "confirmed", False) or not re.search(pattern, m.subject):
        return None
    m.confirmed = True  # a moment belongs to one rollout
    return Deny()


def skill_rules(m: Moment) -> Deny | None:
    """The reply keeps the checkable rules of the reply skill that was loaded last."""
    skill = next((s for s in reversed(m.loaded) if s.kind == "reply"), None)
    broken = broken_rule(m.subject.strip(), skill.rules if skill else {})
    return Deny(broken) if broken else None


CORRECTIONS = {  # kind -> (check, params, states and retries that a right policy spends on it)
    "confirm": ("augment:confirm", {}, 1),
    "confirm_numbers": ("augment:confirm", {"pattern": r"\d"}, 1),
    "skill_rules": ("augment:skill_rules", {}, 0),
}

# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config(Envelope):
    harness: str = option("data/harness", "harness directory")
    seed: int = option(0, "of the augmentation")
    pool: Literal["train", "heldout"] = option("train", "half of the word pools")
    only: Literal["all", "skill_id", "skill_content", "tool", "prompt", "hook"] = option("all", "one dimension, always")
    keep: tuple[str, ...] = option((), "ids of the skills that the task needs; the others may be masked")
    endpoint: str = option("", "OpenAI-compatible server that rewords the texts, e.g. http://localhost:8000/v1")
    llm: str = option("default", "model name for that server")


def show(c: Config) -> None:
    """Print a harness before and after: the log, what changed per module, the assembled prompt as a unified diff."""
    alone = {name: float(name == c.only) for name in DIMENSIONS} if c.only != "all" else {}
    h, rewrite = Harness.load(c.harness), Endpoint(c.endpoint, c.llm, c.pool) if c.endpoint else None
    for id in c.keep:
        if h.skill(id) is None:
            raise BadInput(f"--keep: no skill {id!r} in {c.harness}{closest(id, [s.id for s in h.skills])}")
    new, log = augment(h, c.seed, replace(c, **alone), c.pool, set(c.keep) or None, rewrite)
    for entry in log:
        values = [json.dumps(entry.get(key), ensure_ascii=False) for key in ("from", "to")]
        values = " -> ".join(v if len(v) < 60 else v[:57] + "..." for v in values)
        print(f"{entry['dimension']:13}  {entry['change']:10}  {entry['at']}  {entry.get('why') or values}")
    print(f"\ncommit {h.commit} -> {new.commit}\n" + "\n".join(h.diff(new)) + "\n")
    context = {"links": [{"link_id": n, "name": f"<{n}>"} for n in (1, 2)], "current_link_id": 1}
    texts = ("\n".join(m["content"] for m in assemble(x, "<...>", context)).split("\n") for x in (h, new))
    print("\n".join(difflib.unified_diff(*texts, "before", "after", n=99, lineterm="")))


def main(argv: list[str]) -> None:
    command, *rest = argv or [""]
    if command in ("-h", "--help"):
        parse(Config, {}, ["--help"], __doc__)  # prints it and exits
    if command != "show":
        raise BadInput("augment.py takes a command: show")
    show(parse(Config, {}, rest, __doc__))


if __name__ == "__main__":
    cli(main)
