"""What a harness is made of, Skill, Tool and Limits, and the files that they stand in.

    skills/<name>/SKILL.md  Agent Skills: YAML front matter (name, description, metadata) + Markdown body
    tools.json              OpenAI function schemas; MCP's inputSchema and Anthropic's input_schema are read too
    harness.json            "limits": {"max_turns": 8, ...}

Every skill, tool and parameter has a stable `id` (front matter metadata.id, "x-id" in tools.json; the name where
absent) and a shown `name`. Everything but the model addresses ids, so nothing breaks when names change.

Each part reads its own file (load_*), writes it (to_*) and says what is wrong with it (validate): BadInput, one line.
The file, and line or index in it, is named by whoever knows it: load_*, or Harness.validate. What would fail at run is
refused at load.

    skill = load_skill(Path("data/harness/skills/item_qa/SKILL.md"))
    tool = load_tool({"name": "now", "description": "time of day"})       # now()

Left out: resources and scripts beside a SKILL.md.
"""

import copy
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import jsonschema
import referencing.jsonschema
import yaml

from options import BadInput
from common import read_text

LOAD_SKILL = "load_skill"  # id of the one tool that the harness itself answers
RULES = ("opening", "must_say", "must_not_say", "closing", "max_chars")  # metadata that replies are checked for
SKILL_NAME = re.compile(r"(?=.{1,64}$)[a-z0-9]+([_-][a-z0-9]+)*")  # on disk, where a skill's name is its folder's


def plain_name(name: str, where: str | Path) -> str:
    """The name itself, if it may become a file name that stays in its folder."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.\-]*", name) or ".." in name:
        raise BadInput(f"{where}: {name!r} is no plain file name (letters, digits, _ and -)")
    return name


# ---------------------------------------------------------------------------------------------------------------------
# skills


@dataclass
class Skill:
    """One SKILL.md. rules: its metadata; those of RULES are checked, and must stand in the body as {key}."""

    id: str
    name: str
    description: str
    kind: Literal["reply", "strategy"] = "reply"
    body: str = ""
    rules: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # further front matter (license ...), kept as it is

    def validate(self) -> None:
        """In memory a name need not be one for a folder: augmentation gives it any."""
        plain_name(self.name, "name")
        if self.kind not in ("reply", "strategy"):
            raise BadInput(f"metadata.kind is {self.kind!r}; it must be reply or strategy")
        for key, value in self.rules.items():
            if not isinstance(value, str | int | float) or (key in RULES and isinstance(value, bool)):
                raise BadInput(f"metadata {key!r} must be a text or a number, not {value!r}")
            if key == "max_chars" and not re.fullmatch(r"[1-9]\d*", str(value)):
                raise BadInput(f"metadata 'max_chars' must be a whole number of characters, not {value!r}")
            if key in RULES and f"{{{key}}}" not in self.body:
                raise BadInput(f"rule {key!r} of metadata is not shown: put {{{key}}} into the body")

    def to_markdown(self) -> str:
        """The text of its SKILL.md."""
        metadata = {"id": self.id, "kind": self.kind, **self.rules, **self.extra.get("metadata", {})}
        front = {"name": self.name, "description": self.description, **self.extra, "metadata": metadata}
        return f"---\n{yaml.safe_dump(front, allow_unicode=True, sort_keys=False)}---\n{self.body}\n"


def load_skill(path: Path) -> Skill:
    """One SKILL.md, by the Agent Skills rules. CRLF and a byte-order mark are fine; anything else wrong is refused."""
    lines = read_text(path).split("\n")
    if lines[0].rstrip() != "---":
        raise BadInput(f"{path}:1: no front matter: the file must start with a line ---")
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        raise BadInput(f"{path}:1: front matter is not closed by a line ---")
    try:
        front = yaml.safe_load("\n".join(lines[1:end]))
    except Exception as e:  # YAMLError, and what its constructors of dates, numbers and booleans let through
        mark = getattr(e, "problem_mark", None)
        raise BadInput(f"{path}:{mark.line + 2 if mark else 2}: front matter is not valid YAML") from None
    if not isinstance(front, dict):
        raise BadInput(f"{path}:2: front matter must be a mapping with name and description")
    name, description, metadata = front.get("name"), front.get("description"), front.get("metadata") or {}
    if not isinstance(name, str) or not SKILL_NAME.fullmatch(name):
        raise BadInput(f"{path}:2: name {name!r} must be 1-64 lowercase letters, digits, single - or _")
    if name != path.parent.name:
        raise BadInput(f"{path}:2: name {name!r} differs from its folder {path.parent.name!r}")
    if not isinstance(description, str) or not description.strip() or len(description) > 1024:
        raise BadInput(f"{path}:2: description must be a text of 1 to 1024 characters")
    if not isinstance(metadata, dict):
        raise BadInput(f"{path}:2: metadata must be a mapping")
    ours = (*RULES, "id", "kind")
    plain = (str, int, float)
    rules = {str(key): x for key, x in metadata.items() if isinstance(x, plain) or key in ours}
    extra = {str(key): value for key, value in front.items() if key not in ("name", "description", "metadata")}
    if more := {str(key): value for key, value in metadata.items() if key not in rules and value is not None}:
        extra["metadata"] = more  # lists and mappings, which other programs read
    id, kind = rules.pop("id", None), rules.pop("kind", "reply")
    id = name if id is None else str(id)
    description = re.sub(r"\s*\n\s*", " ", description.strip())  # it stands in a list, on one line
    return Skill(id, name, description, kind, "\n".join(lines[end + 1 :]).strip(), rules, extra)


# ---------------------------------------------------------------------------------------------------------------------
# tools


@dataclass
class Tool:
    """One function. parameters: its JSON schema over *shown* parameter names; param_ids: shown name -> id."""

    id: str
    name: str
    description: str
    parameters: dict
    param_ids: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # what else its entry has (strict, annotations), kept as it is

    def __post_init__(self):
        self.parameters.setdefault("properties", {})
        self.param_ids = {k: self.param_ids.get(k, k) for k in self.parameters.get("properties", {})}

    def validate(self) -> None:
        """What a call can name, and the tool server can tell apart."""
        if not re.fullmatch(r"[^\s<>\"{}]+", self.name):
            raise BadInput(f"tool name {self.name!r} cannot be called: no spaces, quotes, braces, < or >")
        if len(set(self.param_ids.values())) < len(self.param_ids):
            raise BadInput(f"tool {self.name!r}: two parameters have one x-id")
        if missing := dangling(self.parameters):
            raise BadInput(f"tool {self.name!r}: its schema refers to {missing!r}, which is not in it")
        if self.id == LOAD_SKILL and "skill" not in self.param_ids.values():
            raise BadInput(f"tool {self.name!r} loads skills: it must have a parameter skill, by name or x-id")

    def schema(self) -> dict:
        """As the model's chat template shows it, without ids."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def signature(self) -> str:
        """One compact line: name(key:type, optional?:type)."""
        required = self.parameters.get("required", [])
        properties = self.parameters.get("properties", {}).items()
        listed = [f"{key}{'' if key in required else '?'}:{_kind(schema)}" for key, schema in properties]
        return f"{self.name}({', '.join(listed)})"

    def validator(self) -> jsonschema.protocols.Validator:
        """Of its arguments: none but the named ones; a reference out of the schema is an error, not a download."""
        unknown = "unevaluatedProperties" if COMPOSED & self.parameters.keys() else "additionalProperties"
        schema = {unknown: False, **self.parameters}
        return jsonschema.Draft202012Validator(schema, registry=referencing.Registry())

    def to_json(self) -> dict:
        """Its entry in tools.json: the schema, with "x-id" wherever the id is not the shown name."""
        data = copy.deepcopy(self.schema())
        function = data["function"] = data["function"] | copy.deepcopy(self.extra)
        if self.id != self.name:
            function["x-id"] = self.id
        properties = function["parameters"].get("properties", {})
        for shown, id in self.param_ids.items():
            if id != shown:
                same = {True: {}, False: {"not": {}}}  # a bare true or false has no room for an id
                properties[shown] = (same[bare] if isinstance(bare := properties[shown], bool) else bare) | {"x-id": id}
        return data


def dangling(schema: dict) -> str:
    """A reference of a schema that leads nowhere in it; "" if there is none, or some part has an $id of its own."""

    def inside(x):
        yield x
        for y in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
            yield from inside(y)

    parts = [part for part in inside(schema) if isinstance(part, dict)]
    refs = [part["$ref"] for part in parts if isinstance(part.get("$ref"), str)]
    if not refs or any(isinstance(part.get("$id"), str) for part in parts):
        return ""
    resource = referencing.jsonschema.DRAFT202012.create_resource(schema)
    resolver = referencing.Registry().with_resource("", resource).resolver()
    for ref in refs:
        try:
            resolver.lookup(ref)
        except referencing.exceptions.Unresolvable:
            return ref
    return ""


def _kind(schema: dict | bool) -> str:
    """The type of a parameter in one word: its enum or types joined by |, `any` where the schema names none."""
    if not isinstance(schema, dict):
        return "any"
    short = {"integer": "int", "string": "str", "boolean": "bool"}
    either = [part.get("type", "any") for part in schema.get("anyOf", []) if isinstance(part, dict)]
    kinds = schema.get("type") or [kind for kind in either if isinstance(kind, str)] or "any"
    kinds = schema.get("enum") or (kinds if isinstance(kinds, list) else [kinds])
    return "|".join(short.get(str(kind), str(kind)) for kind in kinds)


# beside these a schema says elsewhere what a call can name
COMPOSED = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
SCHEMAS = ("parameters", "inputSchema", "input_schema")


def load_tool(data: dict, where: str = "tool") -> Tool:
    """One function schema, wrapped in {"type": "function"} or bare, with optional "x-id" keys; where: for errors.

    The schema stands under `parameters` (OpenAI), `inputSchema` (MCP) or `input_schema` (Anthropic): SCHEMAS.
    """
    f = data.get("function", data) if isinstance(data, dict) else {}
    if not isinstance(f, dict) or not isinstance(f.get("name"), str):
        raise BadInput(f"{where}: a tool is {{'name', 'description', 'parameters'}}; there is no name")
    schema = next((f[k] for k in SCHEMAS if f.get(k)), {"type": "object"})
    parameters = copy.deepcopy(schema)
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
        properties = parameters.setdefault("properties", {})
        param_ids = {k: v.pop("x-id", k) if isinstance(v, dict) else k for k, v in properties.items()}
    except (jsonschema.SchemaError, AttributeError) as e:
        raise BadInput(f"{where}: parameters of {f['name']!r} are no JSON schema: {str(e).splitlines()[0]}") from None
    id, description = f.get("x-id", f["name"]), str(f.get("description") or "")
    if wrong := [x for x in (id, *param_ids.values()) if not isinstance(x, str)]:
        raise BadInput(f"{where}: an x-id of {f['name']!r} must be a text, not {wrong[0]!r}")
    extra = {k: v for k, v in f.items() if k not in ("type", "name", "description", "x-id", *SCHEMAS)}
    return Tool(id, f["name"], description, parameters, param_ids, copy.deepcopy(extra))


# ---------------------------------------------------------------------------------------------------------------------
# limits


@dataclass
class Limits:
    """What bounds one rollout. Each is also a {placeholder} in blocks and hook messages."""

    max_turns: int = 6  # assistant messages in one rollout
    max_retries: int = 2  # denials before the fallback reply
    max_reply_chars: int = 60
    max_input_chars: int = 200
    max_state_tokens: int = 512  # sampled tokens in one assistant message
    max_result_chars: int = 2000  # a longer tool result is cut, with a note
    tool_timeout_s: float = 0.0  # 0: tools run in line (the simulator's are pure functions)

    def validate(self) -> None:
        """Numbers within reason: a rollout must end."""
        for f in fields(self):
            value, least = getattr(self, f.name), 0 if f.name in ("max_retries", "tool_timeout_s") else 1
            if isinstance(value, bool) or not isinstance(value, int | f.type) or not least <= value < 10**9:
                kind = f.type.__name__
                raise BadInput(f"limit {f.name} is {value!r}; it must be a number ({kind}) of at least {least}")


def load_limits(data: dict, where: str | Path) -> Limits:
    """The limits that harness.json names, the rest by default."""
    known = [f.name for f in fields(Limits)]
    for key in data:
        if key not in known:
            raise BadInput(f"{where}: unknown limit {key!r}; known: {', '.join(known)}")
    return Limits(**data)
