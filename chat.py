"""Tokens <-> messages: the ChatML codec, the two tool-call formats, and the Trajectory that all else reads. No torch.

    context = prompt(system, user) + [sampled ids + delta(tool results)]*       append-only, never re-tokenised

Tokens are the truth. What the policy sampled goes into the context verbatim; only what the environment adds is
encoded, and it is encoded as *plain* text: a viewer who types `<|im_end|>` or `<tool_call>` injects nothing.
Only markup that this file writes itself may become special tokens.

Formats: "hermes" (Qwen2.5, Qwen3 and most others: JSON between <tool_call> tags) and "xml" (Qwen3.5, Qwen3.6:
<function=name><parameter=key>). The parser reads both, whatever the codec writes. Reasoning ends at the first
</think>; calls are looked for only after it.

Left out: images, parallel system messages, and templates that are not ChatML.
"""

import json
import re
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from options import BadInput

from tokenizers import Tokenizer

ENV, TOOL, REPLY = 0, 1, 2  # Trajectory.segment: environment text, tool-call state, reply state
SEGMENTS = {"tool": TOOL, "reply": REPLY}  # those that a policy says

# ---------------------------------------------------------------------------------------------------------------------
# messages and trajectories


@dataclass
class Call:
    """One tool call of an assistant message. `error` is set when its text could not be read; `name` may then be ""."""

    name: str
    arguments: dict = field(default_factory=dict)
    id: str = ""
    error: str | None = None


@dataclass
class Message:
    """One assistant message: reasoning, public text, calls. A *state* of the report is one such message."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


@dataclass
class Turn:
    """What the loop yields: the delta to append to the context, and how many tokens may be sampled after it.

    `messages` is the same delta for an endpoint that takes messages instead of token ids.
    """

    ids: list[int]
    messages: list[dict]
    max_new_tokens: int


@dataclass
class Sample:
    """What the loop is sent back: the sampled ids and their log-probs under the distribution that was sampled.

    finish: stop (ids end with an end-of-turn id), length (cut by max_new_tokens), context (cut by the context, ids
    may be empty), error (deadline or dead engine).
    """

    ids: list[int]
    logps: list[float]
    finish: Literal["stop", "length", "context", "error"]


StopReason = Literal["reply", "fallback", "max_turns", "length", "error"]


@dataclass
class Trajectory:
    """One rollout as token-aligned lists, all of one length T, plus what happened.

    mask 1 = sampled by the policy, end of turn included; logps are behaviour log-probs (0.0 where mask is 0);
    segment ENV / TOOL / REPLY; think 1 = sampled token that nobody but the policy reads: reasoning, and whatever else
    stands before the calls of a TOOL state; state = index of the assistant message, -1 for
    environment text. rewards: name -> value, None = could not be scored. reply is what was dispatched to the room.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    think: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    rewards: dict[str, float | None] = field(default_factory=dict)
    reply: str = ""
    stop_reason: StopReason = "error"
    harness_commit: str = ""
    seed: int = 0

    TOKEN_FIELDS = ("ids", "mask", "logps", "segment", "think", "state")

    def __post_init__(self):
        lengths = {name: len(getattr(self, name)) for name in self.TOKEN_FIELDS}
        assert len(set(lengths.values())) == 1, f"trajectory fields differ in length: {lengths}"

    def append_env(self, ids: list[int]) -> None:
        n = len(ids)
        self._extend(ids, [0] * n, [0.0] * n, [ENV] * n, [0] * n, [-1] * n)

    def append_sample(self, sample: Sample, segment: int, think: list[int], state: int) -> None:
        n = len(sample.ids)
        self._extend(sample.ids, [1] * n, sample.logps, [segment] * n, think, [state] * n)

    def _extend(self, *columns) -> None:
        assert len({len(column) for column in columns}) == 1, [len(column) for column in columns]
        for name, column in zip(self.TOKEN_FIELDS, columns, strict=True):
            getattr(self, name).extend(column)

    def states(self) -> list[tuple[int, list[int]]]:
        """(segment, token positions) of each assistant message, in order; empty states (nothing sampled) are absent."""
        found: dict[int, tuple[int, list[int]]] = {}
        for t, s in enumerate(self.state):
            if s >= 0:
                found.setdefault(s, (self.segment[t], []))[1].append(t)
        return list(found.values())

    def to_dict(self) -> dict:
        """The fields, ready for JSON; the lists are the trajectory's own (asdict would copy them number by number)."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict) -> "Trajectory":
        return cls(**data)


# ---------------------------------------------------------------------------------------------------------------------
# tool-call text -> calls

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_TAG = re.compile(r"<(?=/?(?:tool_call|think)>)")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
MAX_DEPTH = 32  # of the JSON in a call: deeper is no honest call, and breaks whatever walks, copies or stores it


def parse_calls(text: str) -> tuple[str, list[Call]]:
    """(text without calls, calls) of what follows the reasoning. Never raises: a bad call carries its `error`."""
    calls = []
    for i, found in enumerate(_CALL.finditer(text)):
        body, end = found.group(1), found.group(2)
        call = _read_call(body) if end else Call("", error="call is not closed by </tool_call>")
        call.id = f"call_{i}"
        calls.append(call)
    return _CALL.sub("", text).strip(), calls


def _read_call(body: str) -> Call:
    if body.lstrip().startswith("<function="):
        found = _FUNCTION.fullmatch(body)
        if not found:
            return Call("", error="function is not closed by </function>")
        name, inside = found.group(1).strip(), found.group(2)
        if _PARAMETER.sub("", inside).strip():
            return Call(name, error="a function holds nothing but <parameter=key> value </parameter>")
        return Call(name, {k.strip(): v for k, v in _PARAMETER.findall(inside)})
    try:
        data = _strict_json(body)
        if isinstance(data, dict) and isinstance(data.get("arguments"), str):
            data["arguments"] = _strict_json(data["arguments"])
    except (ValueError, RecursionError) as e:
        return Call("", error=f"call is not valid JSON: {e}"[:200])
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return Call("", error='call must be {"name": ..., "arguments": {...}}')
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(data["name"], error="arguments must be a JSON object")
    return Call(data["name"], arguments)


def _strict_json(text: str):
    """The value of a JSON text; ValueError too for NaN, 1e999, half a surrogate pair: nobody could store those."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return value


def _depth(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def coerce(arguments: dict, schema: dict) -> dict:
    """XML arguments arrive as text; read each by its schema type: JSON (3.6), or Python's True / False / None (3.5).

    Values that already have a type, or that do not read as the asked one, stay as they are for the schema check.
    """
    out = {}
    for key, value in arguments.items():
        kinds = _types(schema.get("properties", {}).get(key), schema)
        if isinstance(value, str) and kinds and "string" not in kinds:
            text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
            with suppress(ValueError, RecursionError):  # not of the asked type: the schema check will say so
                value = _strict_json(text)
        out[key] = value
    return out


JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
JSON_TYPES[type(None)] = "null"


def _types(schema, root: dict, depth: int = 0) -> set[str]:
    """The types that a schema allows; empty when it names none. root: where its references begin."""
    if not isinstance(schema, dict) or depth == 8:  # a reference may lead to itself, twice
        return set()
    kind = schema.get("type", [])
    own = {kind} if isinstance(kind, str) else set(kind)
    if not own:  # what its values are
        own = {JSON_TYPES[type(x)] for x in schema.get("enum", [schema["const"]] if "const" in schema else [])}
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, [])]
    parts += [_pointed_at(schema["$ref"], root)] if "$ref" in schema else []
    return own.union(*(_types(part, root, depth + 1) for part in parts))


def _pointed_at(ref: str, root: dict) -> dict | None:
    """What `#/$defs/x` stands for in a schema; None for a reference that leads elsewhere."""
    for part in ref[2:].split("/") if ref.startswith("#/") else ["of another document"]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


# ---------------------------------------------------------------------------------------------------------------------
# the codec


def valid(text: str) -> str:
    """Text that UTF-8 can carry: half a surrogate pair, which comes in through JSON escapes, becomes a `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Markup(str):
    """Text that the codec itself writes: the only text in which special tokens are recognised."""


# Wire format: what the checkpoints were trained to see around a tool list. Any other wording is another format.
_TOOLS_HERMES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
)
_TOOLS_XML = (
    "# Tools\n\nYou have access to the following functions:\n\n<tools>",
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
    "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, "
    "but NOT after\n- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n</IMPORTANT>",
)


def read_codec(model: str | Path) -> "Codec":
    """The codec over the tokenizer.json of a model's directory, without its model."""
    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        raise BadInput(f"{path}: no such file; the directory of a model with its tokenizer was expected")
    try:
        return Codec(Tokenizer.from_file(str(path)))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except Exception as error:  # the tokenizers library knows no other
        raise BadInput(f"{path}: not a readable tokenizer: {error}") from None


class Codec:
    """ChatML over one tokenizer.

    tokenizer: `tokenizers.Tokenizer` or a transformers fast tokenizer. calls: "hermes" | "xml", what is written.
    thinking=False opens each assistant turn with an empty reasoning block (xml) or leaves reasoning out (hermes).
    Raises BadInput when the tokenizer has no ChatML tokens.
    """

    def __init__(self, tokenizer, calls: Literal["hermes", "xml"] = "hermes", thinking: bool = True):
        self.tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.calls, self.thinking = calls, thinking
        self.opens = calls == "xml" and thinking  # each assistant turn is opened with <think>
        self.added = {t.content: i for i, t in self.tokenizer.get_added_tokens_decoder().items()}
        for name in ("<|im_start|>", "<|im_end|>"):
            if name not in self.added:
                raise BadInput(f"tokenizer has no {name} token: HAT speaks ChatML (Qwen, SmolLM2 and their kin)")
        # a base model may also end its turn with its end-of-text token
        self.stop_ids = [self.added[t] for t in ("<|im_end|>", "<|endoftext|>") if t in self.added]
        self._known: dict[str, list[int]] = {}
        self._encoded = lru_cache(256)(self._encode)  # the rollouts of a group meet the same prompt and results
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)

    # -- text

    @cached_property
    def _added_pattern(self):
        return re.compile("|".join(re.escape(t) for t in sorted(self.added, key=len, reverse=True)))

    def encode(self, text: str) -> list[int]:
        """Plain text -> ids. No id is that of an added token: each occurrence is cut after its first character."""
        return list(self._encoded(text))

    def _encode(self, text: str) -> list[int]:
        ids, start = [], 0
        text = valid(text)
        while found := self._added_pattern.search(text, start):
            ids += self._raw(text[start : found.start() + 1])
            start = found.start() + 1
        return ids + self._raw(text[start:])

    def _raw(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _markup(self, text: Markup) -> list[int]:
        if text not in self._known:  # a dozen strings, over and over
            self._known[text] = self._raw(text)
        return self._known[text]

    def _ids(self, pieces: list[str]) -> list[int]:
        return [i for p in pieces for i in (self._markup(p) if isinstance(p, Markup) else self.encode(p))]

    # -- environment side

    def prompt(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """A whole conversation {role, content, reasoning?, calls?} -> ids, ending where the policy begins to sample.

        tools: OpenAI function schemas for the format's own tool preamble; None when the system text lists them.
        """
        return self._ids(self._conversation(messages, tools))

    def text(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        """The same as one string, for people and goldens."""
        return "".join(self._conversation(messages, tools))

    def delta(self, messages: list[dict]) -> list[int]:
        """What follows a sampled message: the template's newline, tool results or hook messages, the next opening.

        The end-of-turn token itself was sampled: a message that was cut before it ends the rollout.
        """
        return self._ids([Markup("\n"), *self._messages(messages), *self._opening()])

    def _conversation(self, messages, tools) -> list[str]:
        pieces = []
        if tools is not None:
            head, tail = _TOOLS_XML if self.calls == "xml" else _TOOLS_HERMES
            listing = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools)
            block = [Markup(head), listing, Markup(tail)]
            system = messages[0]["content"].strip() if messages and messages[0]["role"] == "system" else ""
            messages = messages[1:] if messages and messages[0]["role"] == "system" else messages
            order = [*block, "\n\n", system] if self.calls == "xml" else [system, "\n\n", *block]
            pieces = [Markup("<|im_start|>system\n"), *(order if system else block), Markup("<|im_end|>\n")]
        return [*pieces, *self._messages(messages), *self._opening()]

    def _messages(self, messages) -> list[str]:
        pieces, i = [], 0
        while i < len(messages):
            role = messages[i]["role"]
            if role == "tool":  # consecutive results share one user turn
                pieces.append(Markup("<|im_start|>user"))
                while i < len(messages) and messages[i]["role"] == "tool":
                    pieces += [Markup("\n<tool_response>\n"), messages[i]["content"], Markup("\n</tool_response>")]
                    i += 1
                pieces.append(Markup("<|im_end|>\n"))
                continue
            if role == "assistant":
                m = messages[i]
                said = Message(m.get("reasoning", ""), m["content"], m.get("calls", []))
                opened = "<think>\n" if said.reasoning else ""
                pieces += [Markup("<|im_start|>assistant\n" + opened), *self._body(said, bool(opened)), Markup("\n")]
            else:
                pieces += [Markup(f"<|im_start|>{role}\n"), messages[i]["content"], Markup("<|im_end|>\n")]
            i += 1
        return pieces

    def _opening(self) -> list[str]:
        opened = ("<think>\n" if self.opens else "<think>\n\n</think>\n\n") if self.calls == "xml" else ""
        return [Markup("<|im_start|>assistant\n" + opened)]

    # -- policy side

    def _body(self, message: Message, opened: bool) -> list[str]:
        """What stands after the opening of an assistant turn; `opened`: <think> already stands there."""
        pieces = [message.reasoning, Markup("\n</think>\n\n")] if opened else []
        pieces.append(message.content)
        for i, call in enumerate(message.calls):
            gap = "\n\n" if self.calls == "xml" and i == 0 else "\n"
            pieces.append(Markup((gap if message.content or i else "") + "<tool_call>\n"))
            pieces += [self._call_text(call), Markup("\n</tool_call>")]
        return [*pieces, Markup("<|im_end|>")]

    def _call_text(self, call: Call) -> str:
        if self.calls == "hermes":
            text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            return _TAG.sub(r"\\u003c", text)  # a tag inside an argument must not end the call
        value = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in call.arguments.items()}
        parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in value.items())
        return f"<function={call.name}>\n{parameters}</function>"

    def render(self, message: Message) -> list[int]:
        """The ids that a policy samples for this message, end of turn included (teachers and supervised data)."""
        think = [Markup("<think>\n")] if self.thinking and message.reasoning and not self.opens else []
        return self._ids([*think, *self._body(message, self.opens or bool(think))])

    def parse(self, ids: list[int]) -> Message:
        """Sampled ids -> message. Never raises; unfinished reasoning gives an empty message with that reasoning."""
        text = self.decode([i for i in ids if i not in self.stop_ids])
        before, closed, after = text.partition("</think>")
        if not closed and not self.opens and not text.lstrip().startswith("<think>"):
            before, after = "", text
        reasoning = before.strip().removeprefix("<think>").strip()
        content, calls = parse_calls(after)
        return Message(reasoning, content, calls)

    def think_mask(self, ids: list[int], calls: bool = False) -> list[int]:
        """1 for each sampled id up to and including </think> (all of them when the reasoning never ends).

        calls: the message has calls. What stands between </think> and the first of them is thought aloud, since a
        loop discards it: it counts too, or reasoning would only move there.
        """
        n = self._until("</think>", ids)
        if n is None:
            n = len(ids) if self.opens or self.decode(ids).lstrip().startswith("<think>") else 0
        if calls:
            n += (self._until("<tool_call>", ids[n:]) or 1) - 1  # None: a stop token, which `parse` drops, is inside it
        return [1] * n + [0] * (len(ids) - n)

    def _until(self, tag: str, ids: list[int]) -> int | None:
        """How many ids spell a text up to the end of the first tag, be it a token or plain text; None: it has none."""
        if tag not in self.decode(ids):
            return None
        return bisect_left(range(len(ids)), True, key=lambda i: tag in self.decode(ids[: i + 1])) + 1
