"""Hooks and their checks: what may pass between viewer, policy, tools and the public, decided by code.

    check(moment, **params)  ->  None (allow)  |  Deny(detail)  |  Rewrite(value)

A hook runs one check at one event: input (the bullet comment), tool_call (a Call), tool_result (its text), reply (the
public text). What a check denies is not done: the hook's message goes back to the policy and costs a retry. What it
rewrites goes on as rewritten. A check that raises denies, with its error in the trace (harness.Rollout.hooks).

In hooks.json, {detail} in a message is what the check found, {tool:ID} and {skill:ID} are shown names:

    {"event": "tool_call", "matcher": "^get_", "check": "repeated_call", "params": {"most": 2}, "message": "..."}

Your own check is any function that can be imported, named "package.module:function":

    def no_digits(m, most=4):
        return Deny("digits") if sum(c.isdigit() for c in m.subject) > most else None

Left out: checks that call other models.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from options import BadInput
from parts import Skill, Tool

EVENTS = ("input", "tool_call", "tool_result", "reply")
# Public text is spoken aloud: no tags, no Markdown, no JSON, no tool syntax, no special tokens, no broken bytes.
MARKUP = re.compile(
    r"</?[A-Za-z!]|<\w[^>]*>|<\||\|>|```|\*\*|^#+ |^[-*] |\]\(|[\[{]\s*[\"'{]|tool_call|[\0-\x08\x0e-\x1f\ufffd]",
    re.MULTILINE,
)
TERM = re.compile(r"[A-Za-z][A-Za-z0-9]*|\d+(?:\.\d+)?")
ENDS = "[。！!.~～ ]*$"  # what may end a sentence behind its last words


def broken_rule(reply: str, rules: dict) -> str:
    """The value of the first rule of a skill (parts.RULES) that a reply does not keep; empty if it keeps them all."""
    keeps = {
        "opening": reply.startswith,
        "must_say": reply.__contains__,
        "must_not_say": lambda value: value not in reply,
        "closing": lambda value: re.search(re.escape(value) + ENDS, reply),
        "max_chars": lambda value: len(reply) <= int(value),
    }
    said = {key: str(rules[key]) for key in keeps if key in rules}
    return next((value for key, value in said.items() if value and not keeps[key](value)), "")


def own_words(reply: str, rules: dict) -> str:
    """A reply without what the rules of its skill told it to say: that is no claim of the policy's."""
    for key in ("opening", "must_say"):
        reply = reply.replace(str(rules[key]), "，") if rules.get(key) else reply
    return re.sub(f"(?:{re.escape(str(rules.get('closing', '')))})?{ENDS}", "", reply)


def terms_of(text: str) -> list[str]:
    """The numbers and Latin words of a text: what a reply may not make up. SPF50 is one word, 1,299.0 is 1299."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return [re.sub(r"(?<=\d)\.0+$", "", term) for term in TERM.findall(text)]


def canonical(arguments: dict) -> str:
    """Equal arguments, equal text."""
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False, default=str)


@dataclass
class Deny:
    """Not like this. detail: what was found, for the hook's message."""

    detail: str = ""


@dataclass
class Rewrite:
    """Go on with another subject, of the same type."""

    value: Any


@dataclass
class Moment:
    """What a check sees: the subject of its event (input text, Call, result text or reply) and all that came before."""

    harness: Any  # the Harness in force; its room stands below this one
    subject: Any
    context: dict
    danmaku: str = ""
    tool: Tool | None = None  # the called tool, for tool events
    loaded: list[Skill] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)  # (tool id, canonical arguments) that were executed
    evidence: list[str] = field(default_factory=list)  # tool results: what grounds a number


Check = Callable[..., Deny | Rewrite | None]

# ---------------------------------------------------------------------------------------------------------------------
# built-in checks


def not_empty(m: Moment):
    """Something was said."""
    return None if str(m.subject).strip() else Deny("empty")


def input_length(m: Moment):
    """The input is cut at max_input_chars."""
    limit = m.harness.limits.max_input_chars
    return Rewrite(m.subject[:limit]) if len(m.subject) > limit else None


def known_tool(m: Moment):
    """The called tool is one of the harness."""
    return None if m.tool else Deny(f"unknown tool {m.subject.name!r}")


def valid_arguments(m: Moment):
    """The arguments are those of the tool's JSON schema."""
    if m.tool is None:
        return None
    error = next(m.harness.validators[m.tool.id].iter_errors(m.subject.arguments), None)
    return Deny(error.message[:120]) if error else None


def repeated_call(m: Moment, most: int = 2):
    """The same call with the same arguments may be made `most` times: once, and once more after a fault."""
    if m.tool is None:
        return None
    return Deny("repeated") if m.calls.count((m.tool.id, canonical(m.subject.arguments))) >= most else None


def skill_loaded(m: Moment, kind: str = "reply"):
    """A skill of that kind was disclosed before."""
    return None if any(s.kind == kind for s in m.loaded) else Deny(kind)


def reply_length(m: Moment):
    """The reply has no more than max_reply_chars."""
    limit = m.harness.limits.max_reply_chars
    return Deny(f"{len(m.subject)}>{limit}") if len(m.subject) > limit else None


def reply_format(m: Moment):
    """The reply is public text, free of MARKUP."""
    found = MARKUP.search(m.subject)
    return Deny(found[0][:20]) if found else None


def forbidden_claims(m: Moment, words: tuple = ()):
    """The reply holds none of the words."""
    word = next((w for w in words if w and w in m.subject), None)
    return Deny(word) if word else None


def fact_risk(m: Moment, ref: str = "{n}号"):
    """Every number and Latin word of the reply must stand in a tool result or a product's name.

    Nothing else grounds a number, least of all what viewers say; a link's own number counts only where `ref` names the
    link. A Latin word may also be the viewer's. What a loaded skill orders to say is no risk of the policy's.
    """
    text, links = m.subject, m.context.get("links", [])
    for skill in m.loaded:
        text = own_words(text, skill.rules)
    for link in links:
        own = rf"(?<!\d){re.escape(str(link['link_id']))}(?!\d)"
        text = re.sub(re.escape(ref.format(n="@")).replace("@", own), "", text)
    # TERM too, here and below: what reads as 1,299 may be two numbers of a list
    sources = [*m.evidence, *(x["name"] for x in links)]
    known = {w.lower() for source in sources for w in (*terms_of(source), *TERM.findall(source))}
    known |= {w.lower() for w in terms_of(m.danmaku) if w[0].isalpha()}
    made_up = [[w for w in terms if w.lower() not in known] for terms in (terms_of(text), TERM.findall(text))]
    return Deny(made_up[0][0]) if all(made_up) else None


CHECKS: dict[str, Check] = {
    f.__name__: f
    for f in (
        *(not_empty, input_length, known_tool, valid_arguments, repeated_call),
        *(skill_loaded, reply_length, reply_format, forbidden_claims, fact_risk),
    )
}
OF_CALLS = (known_tool, valid_arguments, repeated_call)  # these look at a call, those at a text; the others at neither
OF_TEXTS = (input_length, reply_length, reply_format, forbidden_claims, fact_risk)


def find_check(name: str) -> Check:
    """A built-in check, or a user's own as "package.module:function"; BadInput when there is none."""
    if name in CHECKS:
        return CHECKS[name]
    module, _, function = name.partition(":")
    if not function:
        raise BadInput(f"hook check {name!r} does not exist; built in: {', '.join(CHECKS)}; yours: module:function")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as e:  # the module is user code: whatever stops its import
        raise BadInput(f"hook check {name!r} cannot be imported: {e}") from None


# ---------------------------------------------------------------------------------------------------------------------
# hooks


@dataclass
class Hook:
    """One check at one event. matcher: regex over the tool id (tool events only). message: what the policy reads."""

    event: str
    check: str
    matcher: str = ""
    params: dict = field(default_factory=dict)
    message: str = "{detail}"

    def validate(self) -> None:
        """The check exists, and takes these params."""
        for f in fields(self):
            if not isinstance(getattr(self, f.name), f.type):
                raise BadInput(f"hook {self.check!r}: params must be an object, everything else a text")
        if self.event not in EVENTS:
            raise BadInput(f"hook {self.check!r}: event {self.event!r} is none of {', '.join(EVENTS)}")
        check = find_check(self.check)
        if check in (OF_TEXTS if self.event == "tool_call" else OF_CALLS):
            raise BadInput(f"hook {self.check!r}: there is no such thing to check at {self.event!r}")
        try:
            taken = inspect.signature(check)
            taken.bind(None, **self.params)
            re.compile(self.matcher)
        except TypeError as e:
            raise BadInput(f"hook {self.check!r}: params {self.params} do not fit: {e}") from None
        except ValueError:  # a function of C without a signature
            raise BadInput(f"hook check {self.check!r} has no signature; it must be a Python function") from None
        except re.error as e:
            raise BadInput(f"hook {self.check!r}: matcher {self.matcher!r} is no regular expression: {e}") from None
        if not self.event.startswith("tool_") and not re.search(self.matcher, ""):
            raise BadInput(f"hook {self.check!r}: matcher {self.matcher!r}: there is no tool at {self.event!r}")
        for key, value in self.params.items() if self.check in CHECKS else ():
            kind = {tuple: list}.get(kind := type(taken.parameters[key].default), kind)
            fits = isinstance(value, kind | tuple if kind is list else kind)
            if not fits or kind is list and not all(isinstance(x, str) for x in value):
                raise BadInput(f"hook {self.check!r}: {key} is {value!r}; it must be a {kind.__name__}")


def load_hook(data: dict, where: str) -> Hook:
    """An entry of hooks.json; where: for errors."""
    if not isinstance(data, dict) or not {"event", "check"} <= set(data) <= {f.name for f in fields(Hook)}:
        raise BadInput(f"{where}: a hook has event and check, and may have matcher, params, message")
    return Hook(**data)
