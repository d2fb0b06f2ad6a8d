"""The harness: Skills + Hooks + system-prompt pipeline + Tools, read from a directory, and the loop that obeys it.

    normalise context -> assemble prompt -> (sample -> parse -> hooks -> tools)* -> extract reply -> dispatch

`run` is the one loop of the project: training, evaluation and serving drive the same generator. It yields the delta
to append to the context, is sent a sampled message, and returns a Trajectory; the engine drives thousands at once.

On disk (the conventions its users already know):

    harness.json            name, limits, prompt block order, item formats, fallback reply
    skills/<name>/SKILL.md  Agent Skills: YAML front matter + Markdown body, disclosed only by load_skill
    tools.json              OpenAI function schemas; MCP tools/list and Anthropic input_schema are read too
    hooks.json              [{"event", "matcher", "check", "params", "message"}]
    prompt/*.md             blocks with {placeholders}

Every skill, tool and parameter has a stable `id` (front matter metadata.id, "x-id" in tools.json; the name where
absent) and a shown `name`. Everything but the model addresses ids, so nothing breaks when names change.
In a SKILL.md body, a hook message or a block, {tool:ID} and {skill:ID} stand for the shown names and {key} for a
rule value of metadata, so a text and the rule that is checked cannot drift apart.

    python harness.py show [--harness DIR] [--seed 3]       the assembled prompt of one request, and the commit
    python harness.py chat [--model DIR] [--seed 3]         type bullet comments against a room, watch every step
    python harness.py trace FILE [--count 10]               browse stored rollouts (JSON lines), worst first

Left out: hooks that call other models, parallel tool execution.
"""

import copy
import hashlib
import importlib
import inspect
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import jsonschema
import referencing
import yaml

from chat import REPLY, TOOL, Call, Codec, Message, Sample, Trajectory, Turn, coerce, valid
from common import BadInput, cli, option, parse, read_json, write_json, write_text

LOAD_SKILL = "load_skill"  # id of the one tool that the harness itself answers
SKILL_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")  # on disk, where a skill's name is its folder's
EVENTS = ("input", "tool_call", "tool_result", "reply")
RULES = ("opening", "must_say", "must_not_say", "closing", "max_chars")  # metadata that replies are checked for

# ---------------------------------------------------------------------------------------------------------------------
# what a harness is made of


@dataclass
class Skill:
    """One SKILL.md. rules: its metadata; those of RULES are checked, and must stand in the body as {key}."""

    id: str
    name: str
    description: str
    kind: Literal["reply", "strategy"] = "reply"
    body: str = ""
    rules: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tool:
    """One function. parameters: its JSON schema over *shown* parameter names; param_ids: shown name -> id."""

    id: str
    name: str
    description: str
    parameters: dict
    param_ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.param_ids = {k: self.param_ids.get(k, k) for k in self.parameters.get("properties", {})}

    def schema(self) -> dict:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def signature(self) -> str:
        """One compact line: name(key:type, optional?:type)."""
        required = self.parameters.get("required", [])
        properties = self.parameters.get("properties", {}).items()
        listed = [f"{k}{'' if k in required else '?'}:{_kind(v)}" for k, v in properties]
        return f"{self.name}({', '.join(listed)})"


def _kind(schema: dict | bool) -> str:
    if not isinstance(schema, dict):
        return "any"
    short = {"integer": "int", "string": "str", "boolean": "bool"}
    kinds = schema.get("type", "any")
    kinds = schema.get("enum") or (kinds if isinstance(kinds, list) else [kinds])
    return "|".join(short.get(str(kind), str(kind)) for kind in kinds)


@dataclass
class Hook:
    """One check at one event. matcher: regex over the tool id (tool events only). message: what the policy reads."""

    event: str
    check: str
    matcher: str = ""
    params: dict = field(default_factory=dict)
    message: str = "{detail}"


@dataclass
class Limits:
    max_turns: int = 6  # assistant messages in one rollout
    max_retries: int = 2  # denials before the fallback reply
    max_reply_chars: int = 60
    max_input_chars: int = 200
    max_state_tokens: int = 512  # sampled tokens in one assistant message
    max_result_chars: int = 2000  # a longer tool result is cut, with a note
    tool_timeout_s: float = 0.0  # 0: tools run in line (the simulator's are pure functions)


@dataclass
class Harness:
    name: str
    skills: list[Skill]
    tools: list[Tool]
    hooks: list[Hook]
    blocks: dict[str, str]  # block name -> text with {placeholders}
    system: list[str]  # block names of the system prompt, in order
    user: str = "request"  # block name of the user message
    limits: Limits = field(default_factory=Limits)
    native_tools: bool = False  # True: the chat format's own JSON tool list; False: the {tools} lines of a block
    formats: dict[str, str] = field(default_factory=dict)  # one line per skill, tool, product, history entry
    fallback: str = ""

    def __post_init__(self):
        validate(self)

    # -- identity

    @cached_property
    def commit(self) -> str:
        """Content hash: the first 12 hex digits of SHA-256 over the canonical JSON of all that the policy can meet."""
        text = json.dumps(self._content(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def copy(self, **changes) -> "Harness":
        """A deep copy with some fields replaced, validated anew: how every other harness state is made."""
        return copy.deepcopy(replace(self, **changes))

    def diff(self, other: "Harness") -> list[str]:
        """What changed per module, a line each: '- skills/item_qa/name: item_qa -> answer'. Empty: the same commit."""
        lines = []

        def walk(path, a, b):
            if isinstance(a, dict) and isinstance(b, dict):
                for key in [*a, *(k for k in b if k not in a)]:
                    walk(f"{path}/{key}" if path else str(key), a.get(key), b.get(key))
            elif a != b or type(a) is not type(b):
                lines.append(f"- {path}: {' -> '.join(_short(a, b))}")

        walk("", self._content(), other._content())
        return lines

    def _content(self) -> dict:
        """All that counts, by id; each order that shows in a prompt is an entry of its own."""
        d, seen = asdict(self), Counter()
        d["blocks"] = {b: self.blocks[b] for b in [*self.system, self.user]}
        for tool in d["tools"]:
            tool["order"] = list(tool["parameters"].get("properties", {}))
        for part in ("skills", "tools"):
            d[part + " order"] = [x["id"] for x in d[part]]
            d[part] = {x["id"]: x for x in d[part]}
        for x in d["hooks"]:
            seen[key := f"{x['event']}.{x['check']}"] += 1
            x["key"] = key if seen[key] == 1 else f"{key} {seen[key]}"
        d["hooks order"] = [x["key"] for x in d["hooks"]]
        d["hooks"] = {x.pop("key"): x for x in d["hooks"]}
        return d

    # -- names

    @cached_property
    def validators(self) -> dict[str, jsonschema.protocols.Validator]:
        """Tool id -> the validator of its arguments."""
        registry = referencing.Registry()  # knows nothing: a reference out of a schema is an error, not a download
        schemas = {t.id: {"additionalProperties": False, **t.parameters} for t in self.tools}
        return {id: jsonschema.Draft202012Validator(schema, registry=registry) for id, schema in schemas.items()}

    def skill(self, id: str) -> Skill | None:
        return next((s for s in self.skills if s.id == id), None)

    def tool(self, id: str) -> Tool | None:
        return next((t for t in self.tools if t.id == id), None)

    def fill(self, text: str, values: dict[str, Any] | None = None) -> str:
        """Replace {tool:ID}, {skill:ID} and the {keys} of values; every other brace stays as it is."""

        def shown(found):
            kind, _, id = found.group(1).partition(":")
            if id and kind in ("tool", "skill"):
                thing = self.tool(id) if kind == "tool" else self.skill(id)
                return thing.name if thing else found.group(0)
            return str(values[found.group(1)]) if values and found.group(1) in values else found.group(0)

        return re.sub(r"\{([A-Za-z_][\w:.\-]*)\}", shown, text)

    def skill_text(self, skill: Skill) -> str:
        """The body as load_skill discloses it."""
        return self.fill(skill.body, skill.rules)

    # -- disk

    @classmethod
    def load(cls, path: str | Path) -> "Harness":
        """Read and validate a harness directory; BadInput names the file (and line) of the first fault."""
        path = Path(path)
        meta, tools, hooks = (read_json(path / f"{x}.json") for x in ("harness", "tools", "hooks"))
        if isinstance(tools, dict):  # the answer to MCP's tools/list
            tools = tools.get("tools")
        for name, value, kind in (("harness", meta, dict), ("tools", tools, list), ("hooks", hooks, list)):
            if not isinstance(value, kind):
                raise BadInput(f"{path / name}.json: must be a JSON {'object' if kind is dict else 'list'}")
        meta = {"limits": {}, "skills": [], "user": "request"} | meta
        for key, kind in (("name", str), ("system", list), ("limits", dict), ("skills", list)):
            if not isinstance(meta.get(key), kind):
                raise BadInput(f"{path / 'harness.json'}: {key!r} is missing or no {kind.__name__}")
        known = [f.name for f in fields(Limits)]
        for key in meta["limits"]:
            if key not in known:
                raise BadInput(f"{path / 'harness.json'}: unknown limit {key!r}; known: {', '.join(known)}")
        wanted = [*meta["system"], meta["user"]]
        blocks = {b: _read_text(path / "prompt" / f"{_safe(b, path / 'harness.json')}.md").strip() for b in wanted}
        keys = {k: meta[k] for k in ("user", "native_tools", "formats", "fallback") if k in meta}
        order = [*meta["skills"], *sorted(d.name for d in (path / "skills").glob("[!.]*") if d.is_dir())]
        folders = [path / "skills" / _safe(name, path / "harness.json") for name in dict.fromkeys(map(str, order))]
        try:
            return cls(
                name=meta["name"],
                skills=[load_skill(d / "SKILL.md") for d in folders],
                tools=[load_tool(t, f"{path / 'tools.json'}[{i}]") for i, t in enumerate(tools)],
                hooks=[_load_hook(h, f"{path / 'hooks.json'}[{i}]") for i, h in enumerate(hooks)],
                blocks=blocks,
                system=meta["system"],
                limits=Limits(**meta["limits"]),
                **keys,
            )
        except BadInput as e:
            raise BadInput(str(e) if str(path) in str(e) else f"{path}: {e}") from None

    def save(self, path: str | Path) -> None:
        """Write the directory so that load gives an equal harness (same commit).

        BadInput when a skill's name is none for a folder, or when the directory holds skills that this harness has
        not: they would be loaded with it.
        """
        path = Path(path)
        names = [s.name for s in self.skills]
        for name in names:
            if not SKILL_NAME.fullmatch(name) or len(name) > 64:
                raise BadInput(f"skill name {name!r} cannot be saved: lowercase letters, digits, single - or _")
        for folder in sorted((path / "skills").glob("[!.]*")):
            if folder.name not in names:
                raise BadInput(f"{folder}: no skill of this harness; save into a new directory")
        meta = {"name": self.name, "system": self.system, "user": self.user, "skills": names}
        meta |= {"limits": asdict(self.limits), "native_tools": self.native_tools}
        meta |= {"formats": self.formats, "fallback": self.fallback}
        for name in [*self.system, self.user]:
            write_text(path / "prompt" / f"{name}.md", self.blocks[name] + "\n")
        for s in self.skills:
            front = {"name": s.name, "description": s.description, "metadata": {"id": s.id, "kind": s.kind, **s.rules}}
            head = yaml.safe_dump(front, allow_unicode=True, sort_keys=False)
            write_text(path / "skills" / s.name / "SKILL.md", f"---\n{head}---\n{s.body}\n")
        write_json(path / "tools.json", [_tool_to_json(t) for t in self.tools])
        write_json(path / "hooks.json", [asdict(h) for h in self.hooks])
        write_json(path / "harness.json", meta)  # last: a directory without it is not a harness


def _short(*values) -> list[str]:
    """The values as texts of one line and 80 characters at most, so cut that one sees where they begin to differ."""
    texts = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    texts = [text.replace("\n", "\\n") for text in texts]
    differs = next((i for i, chars in enumerate(zip_longest(*texts)) if len(set(chars)) > 1), 0)
    start = differs - 20 if differs > 60 else 0
    return ["..." * (start > 0) + text[start : start + 74] + "..." * (start + 74 < len(text)) for text in texts]


def _safe(name: str, where) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.\-]*", name) or ".." in name:
        raise BadInput(f"{where}: {name!r} is no plain file name (letters, digits, _ and -)")
    return name


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}: not UTF-8 (byte {e.start})") from None


def load_skill(path: Path) -> Skill:
    """One SKILL.md, by the Agent Skills rules. CRLF and a byte-order mark are fine; anything else wrong is refused."""
    lines = _read_text(path).split("\n")
    if lines[0].rstrip() != "---":
        raise BadInput(f"{path}:1: no front matter: the file must start with a line ---")
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        raise BadInput(f"{path}:1: front matter is not closed by a line ---")
    try:
        front = yaml.safe_load("\n".join(lines[1:end]))
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: a date such as 2024-13-45
        mark = getattr(e, "problem_mark", None)
        raise BadInput(f"{path}:{mark.line + 2 if mark else 2}: front matter is not valid YAML") from None
    if not isinstance(front, dict):
        raise BadInput(f"{path}:2: front matter must be a mapping with name and description")
    name, description, metadata = front.get("name"), front.get("description"), front.get("metadata") or {}
    if not isinstance(name, str) or not SKILL_NAME.fullmatch(name) or len(name) > 64:
        raise BadInput(f"{path}:2: name {name!r} must be 1-64 lowercase letters, digits, single - or _")
    if name != path.parent.name:
        raise BadInput(f"{path}:2: name {name!r} differs from its folder {path.parent.name!r}")
    if not isinstance(description, str) or not 1 <= len(description.strip()) <= len(description) <= 1024:
        raise BadInput(f"{path}:2: description must be a text of 1 to 1024 characters")
    if not isinstance(metadata, dict):
        raise BadInput(f"{path}:2: metadata must be a mapping")
    rules = {str(k): v for k, v in metadata.items() if k not in ("id", "kind")}
    kind = metadata.get("kind", "reply")
    return Skill(str(metadata.get("id", name)), name, description, kind, "\n".join(lines[end + 1 :]).strip(), rules)


def load_tool(data: dict, where: str = "tool") -> Tool:
    """One OpenAI function schema, wrapped in {"type": "function"} or bare, with optional "x-id" keys.

    The schema may also stand under `inputSchema` (MCP) or `input_schema` (Anthropic).
    """
    f = data.get("function", data) if isinstance(data, dict) else {}
    if not isinstance(f, dict) or not isinstance(f.get("name"), str):
        raise BadInput(f"{where}: a tool is {{'name', 'description', 'parameters'}}; there is no name")
    schema = next((f[k] for k in ("parameters", "inputSchema", "input_schema") if f.get(k)), {"type": "object"})
    parameters = copy.deepcopy(schema)
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
        properties = parameters.setdefault("properties", {})
        param_ids = {k: v.pop("x-id", k) if isinstance(v, dict) else k for k, v in properties.items()}
    except (jsonschema.SchemaError, AttributeError) as e:
        raise BadInput(f"{where}: parameters of {f['name']!r} are no JSON schema: {str(e).splitlines()[0]}") from None
    return Tool(str(f.get("x-id", f["name"])), f["name"], str(f.get("description", "")), parameters, param_ids)


def _tool_to_json(tool: Tool) -> dict:
    data = copy.deepcopy(tool.schema())
    if tool.id != tool.name:
        data["function"]["x-id"] = tool.id
    for shown, id in tool.param_ids.items():
        if id != shown:
            data["function"]["parameters"]["properties"][shown]["x-id"] = id
    return data


def _load_hook(data: dict, where: str) -> Hook:
    if not isinstance(data, dict) or not {"event", "check"} <= set(data) <= {f.name for f in fields(Hook)}:
        raise BadInput(f"{where}: a hook has event and check, and may have matcher, params, message")
    return Hook(**data)


def validate(h: Harness) -> None:
    """Refuse at load what would fail at run: double names, unknown checks, bad limits, missing blocks, lost rules."""
    for kind, things in (("skill", h.skills), ("tool", h.tools)):
        for what in ("id", "name"):
            values = [getattr(x, what) for x in things]
            twice = sorted({v for v in values if values.count(v) > 1})
            if twice:
                raise BadInput(f"two {kind}s have the {what} {twice[0]!r}")
    for s in h.skills:
        _safe(s.name, "skills")
        if s.kind not in ("reply", "strategy"):
            raise BadInput(f"skills/{s.name}: metadata.kind is {s.kind!r}; it must be reply or strategy")
        for key, value in s.rules.items():
            if not isinstance(value, str | int | float):
                raise BadInput(f"skills/{s.name}: metadata {key!r} must be a text or a number, not {value!r}")
            if key in RULES and f"{{{key}}}" not in s.body:
                raise BadInput(f"skills/{s.name}: rule {key!r} of metadata is not shown: put {{{key}}} into the body")
    for t in h.tools:
        if not re.fullmatch(r"[^\s<>\"{}]+", t.name):
            raise BadInput(f"tool name {t.name!r} cannot be called: no spaces, quotes, braces, < or >")
        if len(set(t.param_ids.values())) < len(t.param_ids):
            raise BadInput(f"tool {t.name}: two parameters have one x-id")
    for f in fields(Limits):
        value, least = getattr(h.limits, f.name), 0 if f.name in ("max_retries", "tool_timeout_s") else 1
        if isinstance(value, bool) or not isinstance(value, int | f.type) or not least <= value < 10**9:
            raise BadInput(f"limit {f.name} is {value!r}; it must be a number ({f.type.__name__}) of at least {least}")
    for hook in h.hooks:
        kinds = (hook.event, str), (hook.check, str), (hook.matcher, str), (hook.params, dict), (hook.message, str)
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise BadInput(f"hook {hook.check!r}: params must be an object, everything else a text")
        if hook.event not in EVENTS:
            raise BadInput(f"hook {hook.check!r}: event {hook.event!r} is none of {', '.join(EVENTS)}")
        try:
            inspect.signature(find_check(hook.check)).bind(None, **hook.params)
            re.compile(hook.matcher)
        except TypeError as e:
            raise BadInput(f"hook {hook.check!r}: params {hook.params} do not fit: {e}") from None
        except re.error as e:
            raise BadInput(f"hook {hook.check!r}: matcher {hook.matcher!r} is no regular expression: {e}") from None
    for key, text in h.formats.items():
        if key not in ("skill", "tool", "link", "turn") or not isinstance(text, str):
            raise BadInput(f"formats: {key!r}: {text!r}; there is a text for each of skill, tool, link, turn")
    if not isinstance(h.fallback, str) or MARKUP.search(h.fallback):
        raise BadInput(f"fallback {h.fallback!r} must be plain public text")
    for block in [*h.system, h.user]:
        if block not in h.blocks:
            raise BadInput(f"prompt block {block!r} is listed but there is no prompt/{block}.md")


# ---------------------------------------------------------------------------------------------------------------------
# checks: allow (None), Deny(detail) or Rewrite(value)


@dataclass
class Deny:
    detail: str = ""


@dataclass
class Rewrite:
    value: Any


@dataclass
class Moment:
    """What a check sees: the subject of its event (input text, Call, result text or reply) and all that came before."""

    harness: Harness
    subject: Any
    context: dict
    danmaku: str = ""
    tool: Tool | None = None  # the called tool, for tool events
    loaded: list[Skill] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)  # (tool id, canonical arguments) that were executed
    evidence: list[str] = field(default_factory=list)  # texts that ground a reply: context, request, results


Check = Callable[..., Deny | Rewrite | None]


def not_empty(m: Moment):
    return None if str(m.subject).strip() else Deny("empty")


def input_length(m: Moment):
    limit = m.harness.limits.max_input_chars
    return Rewrite(m.subject[:limit]) if len(m.subject) > limit else None


def known_tool(m: Moment):
    return None if m.tool else Deny(f"unknown tool {m.subject.name!r}")


def valid_arguments(m: Moment):
    if m.tool is None:
        return None
    error = next(m.harness.validators[m.tool.id].iter_errors(m.subject.arguments), None)
    return Deny(error.message[:120]) if error else None


def repeated_call(m: Moment, most: int = 2):
    """The same call with the same arguments may be made `most` times: once, and once more after a fault."""
    key = (m.tool.id, canonical(m.subject.arguments)) if m.tool else None
    return Deny("repeated") if key and m.calls.count(key) >= most else None


def skill_loaded(m: Moment, kind: str = "reply"):
    return None if any(s.kind == kind for s in m.loaded) else Deny(kind)


def reply_length(m: Moment):
    limit = m.harness.limits.max_reply_chars
    return Deny(f"{len(m.subject)}>{limit}") if len(m.subject) > limit else None


def reply_format(m: Moment):
    found = MARKUP.search(m.subject)
    return Deny(found.group(0)[:20]) if found else None


def forbidden_claims(m: Moment, words: tuple = ()):
    word = next((w for w in words if w in m.subject), None)
    return Deny(word) if word else None


def fact_risk(m: Moment):
    """Every number and Latin word of the reply must stand in the context, the request or a tool result."""
    known = {w.lower() for text in m.evidence for w in terms_of(text)}
    word = next((w for w in terms_of(m.subject) if w.lower() not in known), None)
    return Deny(word) if word else None


# Public text is spoken aloud: no tags, no Markdown, no JSON, no tool syntax, no special tokens, no broken bytes.
MARKUP = re.compile(
    r"</?[A-Za-z!]|<\w[^>]*>|<\||\|>|```|\*\*|^#+ |^[-*] |\]\(|[\[{]\s*[\"'{]|tool_call|[\0-\x08\x0e-\x1f\ufffd]",
    re.MULTILINE,
)
_TERM = re.compile(r"[A-Za-z][A-Za-z0-9]*|\d+(?:\.\d+)?")
CHECKS: dict[str, Check] = {
    f.__name__: f
    for f in (
        *(not_empty, input_length, known_tool, valid_arguments, repeated_call),
        *(skill_loaded, reply_length, reply_format, forbidden_claims, fact_risk),
    )
}


def find_check(name: str) -> Check:
    """A built-in check, or a user's own as "package.module:function"."""
    if name in CHECKS:
        return CHECKS[name]
    module, _, function = name.partition(":")
    if not function:
        raise BadInput(f"hook check {name!r} does not exist; built in: {', '.join(CHECKS)}; yours: module:function")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as e:  # the module is user code: whatever stops its import
        raise BadInput(f"hook check {name!r} cannot be imported: {e}") from None


def terms_of(text: str) -> list[str]:
    """The numbers and Latin words of a text, SPF50 being one word: what a reply may not make up."""
    return _TERM.findall(text)


def canonical(arguments: dict) -> str:
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False, default=str)


# ---------------------------------------------------------------------------------------------------------------------
# prompt pipeline


def assemble(h: Harness, danmaku: str, context: dict) -> list[dict]:
    """System and user message for one request; context comes from the room (links, current_link_id, history ...)."""
    line = {"skill": "- {name}: {description}", "tool": "- {signature}: {description}", "link": "{link_id}. {name}"}
    line |= {"turn": "{role}: {text}"} | h.formats
    names = {s["link_id"]: s["name"] for s in context.get("links", [])}
    current = context.get("current_link_id")
    values = {
        "skills": "\n".join(h.fill(line["skill"], {"name": s.name, "description": s.description}) for s in h.skills),
        "tools": "\n".join(
            h.fill(line["tool"], {"signature": t.signature(), "description": t.description}) for t in h.tools
        ),
        "links": "\n".join(h.fill(line["link"], x) for x in context.get("links", [])),
        "history": "\n".join(h.fill(line["turn"], x) for x in context.get("history", [])),
        "current_link_id": current,
        "current_link_name": names.get(current, ""),
        "signals": context.get("signals", ""),
        "danmaku": danmaku,
        **asdict(h.limits),
    }
    system = "\n\n".join(h.fill(h.blocks[b], values) for b in h.system)
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": h.fill(h.blocks[h.user], values).strip()},
    ]


# ---------------------------------------------------------------------------------------------------------------------
# the loop


class Rollout:
    """State of one rollout, and the hooks over it. `run` below is the control flow; this only keeps its books."""

    def __init__(self, h: Harness, room, seed: int):
        self.h, self.room, self.retries = h, room, 0
        self.trajectory = Trajectory(harness_commit=h.commit, seed=seed)
        self.moment = Moment(h, None, copy.deepcopy(room.context))

    def event(self, kind: str, **data) -> None:
        self.trajectory.events.append({"event": kind, **data})

    def hooks(self, event: str, subject, tool: Tool | None = None):
        """(subject, denial): the subject as rewritten by the hooks of this event, and the first denial's message."""
        m = self.moment
        for hook in self.h.hooks:
            if hook.event != event or (hook.matcher and not re.search(hook.matcher, tool.id if tool else "")):
                continue
            m.subject, m.tool = subject, tool
            try:
                verdict = find_check(hook.check)(m, **hook.params)
                rewritten = isinstance(verdict, Rewrite) and isinstance(verdict.value, type(subject))
                if not (verdict is None or rewritten or isinstance(verdict, Deny)):
                    raise TypeError(f"the check answered {verdict!r}"[:200])
            except Exception as e:  # a hook is user code: whatever it raises is a denial in the trace, never a crash
                verdict = Deny(f"{type(e).__name__}: {e}")
                self.event("hook_error", check=hook.check, error=verdict.detail)
            if isinstance(verdict, Rewrite):
                self.event("hook", on=event, check=hook.check, verdict="rewrite")
                subject = verdict.value
            elif verdict is not None:
                message = self.h.fill(hook.message, {"detail": verdict.detail, **asdict(self.h.limits)})
                self.event("hook", on=event, check=hook.check, verdict="deny", message=message)
                return subject, message
        return subject, None

    def call(self, call: Call) -> str:
        """Execute one call and return the text that the policy reads; every failure is a text too."""
        if call.error:
            return self.refuse(call, call.error)
        tool, id = self.tool(call.name), call.id
        call.arguments = coerce(call.arguments, tool.parameters if tool else {})
        call, denial = self.hooks("tool_call", call, tool)
        if denial is not None:
            return self.refuse(call, denial)
        tool, call.id = self.tool(call.name), id  # a hook may have sent it to another tool
        if tool is None:
            return self.refuse(call, f"unknown tool {call.name!r}")
        arguments = {tool.param_ids.get(k, k): v for k, v in call.arguments.items()}
        self.event("tool_call", tool=tool.id, arguments=arguments, call_id=call.id)
        self.moment.calls.append((tool.id, canonical(call.arguments)))
        if tool.id == LOAD_SKILL:
            name = next(iter(arguments.values()), None)
            skill = next((s for s in self.h.skills if s.name == name), None)
            if skill is None:
                return self.refuse(call, f"unknown skill {name!r}")
            text = self.load(skill)
        else:
            text = self.execute(tool, arguments)
        text, denial = self.hooks("tool_result", text, tool)
        if denial is not None:
            return self.refuse(call, denial)
        self.event("tool_result", tool=tool.id, text=text, call_id=call.id)
        if tool.id != LOAD_SKILL:
            self.moment.evidence.append(text)
        return text

    def tool(self, name: str) -> Tool | None:
        return next((t for t in self.h.tools if t.name == name), None)

    def refuse(self, call: Call, why: str) -> str:
        self.retries += 1
        self.event("tool_error", name=call.name, call_id=call.id, error=why)
        return json.dumps({"error": why}, ensure_ascii=False)

    def load(self, skill: Skill) -> str:
        if skill not in self.moment.loaded:
            self.moment.loaded.append(skill)
        self.event("skill", skill=skill.id)
        return self.h.skill_text(skill)

    def execute(self, tool: Tool, arguments: dict) -> str:
        """The room's answer, within the deadline if one is set; a crash or a hang is a counted, readable failure."""
        box: list = []
        arguments = copy.deepcopy(arguments)  # the trace keeps its own, whatever a tool does to these

        def work():
            try:
                box.append(self.clean(self.room.call(tool.id, arguments)))
            except Exception as e:  # a tool is somebody's server: its failure belongs to the trace, not to the batch
                box.append(e)

        if self.h.limits.tool_timeout_s:
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(self.h.limits.tool_timeout_s)
        else:
            work()
        result = next(iter(box), None)  # read once: a late thread may still write, and is not heard
        if isinstance(result, str):
            return result
        self.event("tool_crash", tool=tool.id, error=f"{type(result).__name__}: {result}" if result else "deadline")
        return json.dumps({"error": "tool crashed" if result else "timeout"})

    def clean(self, result) -> str:
        """Any result -> valid text: bytes decoded, objects as JSON without NaN, cut at max_result_chars with a note."""
        if isinstance(result, bytes):
            result = result.decode("utf-8", "replace")
        if not isinstance(result, str):
            result = json.dumps(_finite(result), ensure_ascii=False, default=str)
        result, limit = valid(result), self.h.limits.max_result_chars
        return result if len(result) <= limit else f"{result[:limit]}... ({len(result) - limit} more characters cut)"


def _finite(x):
    if isinstance(x, float) and not abs(x) < float("inf"):
        return None
    if isinstance(x, dict):
        return {str(k): _finite(v) for k, v in x.items()}
    return [_finite(v) for v in x] if isinstance(x, list | tuple) else x


def run(h: Harness, request, room, codec: Codec, seed: int = 0) -> Generator[Turn, Sample, Trajectory]:
    """One request through one harness. request: a bullet comment, or a list of those that came at the same time.

    room: `.context` (dict: links, current_link_id, history, signals) and `.call(tool_id, arguments) -> str`.
    Yields Turn, is sent Sample, returns the Trajectory; never raises on anything that a policy or viewer writes.
    """
    r = Rollout(h, room, seed)
    t, m, limits = r.trajectory, r.moment, h.limits

    # 1 normalise context
    m.danmaku = valid("\n".join(request) if isinstance(request, list) else str(request))
    m.danmaku, denial = r.hooks("input", m.danmaku)
    r.event("input", danmaku=m.danmaku)
    if denial is not None:
        return finish(r, "fallback")
    m.evidence = [m.danmaku, json.dumps(m.context, ensure_ascii=False)]

    # 2 assemble prompt
    messages = assemble(h, m.danmaku, m.context)
    delta = codec.prompt(messages, [x.schema() for x in h.tools] if h.native_tools else None)

    # 3 agent loop
    for state in range(limits.max_turns):
        t.append_env(delta)
        sample = yield Turn(delta, messages, limits.max_state_tokens)
        said = codec.parse(sample.ids) if sample.ids else Message()
        t.append_sample(sample, TOOL if said.calls else REPLY, codec.think_mask(sample.ids), state)
        for call in said.calls:
            call.id = f"{state}.{call.id}"
        r.event("state", state=state, **vars(said) | {"calls": [dict(vars(call)) for call in said.calls]})
        if sample.finish != "stop":
            return finish(r, "error" if sample.finish == "error" else "length")
        if said.calls:
            messages = [{"role": "tool", "content": r.call(call)} for call in said.calls]
        else:
            reply, denial = r.hooks("reply", said.content)
            if denial is None and reply.strip() and not MARKUP.search(reply):  # the last guard holds without any hook
                return finish(r, "reply", reply.strip())
            r.retries += 1
            messages = [{"role": "user", "content": denial or "reply must be plain text"}]
        if r.retries > limits.max_retries:
            return finish(r, "fallback")
        delta = codec.delta(messages)
    return finish(r, "max_turns")


def finish(r: Rollout, why: str, reply: str | None = None) -> Trajectory:
    """4 extract the reply, 5 dispatch: what the room hears is the policy's reply or the configured safe one."""
    r.trajectory.stop_reason = why
    r.trajectory.reply = r.h.fallback if reply is None else reply
    r.event("reply", text=r.trajectory.reply, stop_reason=why, retries=r.retries)
    return r.trajectory


# ---------------------------------------------------------------------------------------------------------------------
# commands. They alone reach for rooms below this one, when they run: the module itself knows none of them.


@dataclass
class Config:
    harness: str = option("data/harness", "harness directory")
    world: str = option("data/world/zh.json", "world file")
    model: str = option("data/base-small", "policy that answers in chat")
    seed: int = option(0, "which room")
    greedy: bool = option(True, "the likeliest token each time")
    count: int = option(10, "rollouts that trace shows", min=1)


def print_events(events: list[dict]) -> None:
    """One rollout for a person: reasoning, calls, results, hooks, reply, a line each."""
    for e in events:
        kind = e["event"]
        if kind == "input":
            print(f"弹幕    {e['danmaku']!r}")
        elif kind == "state":
            print(f"think   {e['reasoning']}" if e["reasoning"] else f"state {e['state']}")
        elif kind == "tool_call":
            print(f"call    {e['tool']}({', '.join(f'{k}={v!r}' for k, v in e['arguments'].items())})")
        elif kind == "tool_result":
            print("result  " + e["text"].replace("\n", " / "))
        elif kind in ("tool_error", "tool_crash", "hook_error"):
            print(f"{kind.replace('_', ' ')}  {e['error']}")
        elif kind == "hook":
            print(f"hook    {e['check']} on {e['on']}: {e['verdict']} {e.get('message', '')}")
        elif kind == "reply":
            print(f"reply   {e['text']}  [{e['stop_reason']}]")


def show(c: Config) -> None:
    import sim

    h, task = Harness.load(c.harness), sim.make_task(sim.World.load(c.world), c.seed)
    for message in assemble(h, "\n".join(task.danmaku), task.context):
        print(f"[{message['role']}]\n{message['content']}\n")
    print(f"harness {h.name}, commit {h.commit}: {len(h.skills)} skills, {len(h.tools)} tools, {len(h.hooks)} hooks")


def chat(c: Config) -> None:
    import infer
    import model
    import sim

    h, policy = Harness.load(c.harness), model.load(c.model)
    task, engine = sim.make_task(sim.World.load(c.world), c.seed), infer.Engine(policy, slots=1)
    for link in task.links:
        print(link)
    print(f"room {c.seed}, link {task.context['current_link_id']} on air. Type a bullet comment; an empty line ends.")
    history = []
    while text := _ask():
        room = task.open(sim.Faults(), c.seed + len(history))
        room.context["history"] = history[-2:]
        [t] = engine.run([run(h, text, room, policy.codec, c.seed)], [c.seed], greedy=c.greedy)
        print_events(t.events)
        history += [{"role": task.world["role"]["viewer"], "text": text}]
        history += [{"role": task.world["role"]["avatar"], "text": t.reply}]


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def trace(c: Config, path: str) -> None:
    rows = [json.loads(line) for line in _read_text(Path(path)).splitlines() if line.strip()]
    rows.sort(key=lambda row: sum(v or 0.0 for v in row["rewards"].values()))
    for row in rows[: c.count]:
        rewards = ", ".join(f"{k} {v}" for k, v in row["rewards"].items())
        print(f"\n== seed {row['seed']}  harness {row['harness_commit']}  {len(row['ids'])} tokens  {rewards}")
        print_events(row["events"])


def main(argv: list[str]) -> None:
    commands = {"show": show, "chat": chat, "trace": trace}
    if not argv or argv[0] not in (*commands, "-h", "--help"):
        raise BadInput(f"harness.py takes a command: {' | '.join(commands)}")
    command, *rest = argv
    if command == "trace":
        if not rest or rest[0].startswith("-"):
            raise BadInput("trace takes a file of trajectories: python harness.py trace runs/.../trajectories.jsonl")
        trace(parse(Config, {}, rest[1:], __doc__), rest[0])
    else:
        config = parse(Config, {}, rest if command in commands else argv, __doc__)
        commands[command](config)


if __name__ == "__main__":
    import harness  # run as a script this file is __main__, while the rooms below import `harness`: use theirs

    cli(harness.main)
