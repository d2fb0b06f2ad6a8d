"""The harness: Skills + Hooks + system-prompt pipeline + Tools, read from a directory, and the loop that obeys it.

    normalise context -> assemble prompt -> (sample -> parse -> hooks -> tools)* -> extract reply -> dispatch

`run` is the one loop of the project: training, evaluation and serving drive the same generator. It yields the delta
to append to the context, is sent a sampled message, and returns a Trajectory; the engine drives thousands at once.

On disk (the conventions its users already know; parts.py and checks.py read the single files):

    harness.json            name, limits, prompt block order, item formats, fallback reply
    skills/<name>/SKILL.md  Agent Skills: YAML front matter + Markdown body, disclosed only by load_skill
    tools.json              OpenAI function schemas
    hooks.json              [{"event", "matcher", "check", "params", "message"}]
    prompt/*.md             blocks with {placeholders}

In a SKILL.md body, a hook message or a block, {tool:ID} and {skill:ID} stand for the shown names and {key} for a
rule value of metadata, so a text and the rule that is checked cannot drift apart.

    python harness.py show [--harness DIR] [--seed 3]       the assembled prompt of one request, and the commit
    python harness.py chat [--model DIR] [--seed 3]         type bullet comments against a room, watch every step
    python harness.py trace FILE [--count 10]               browse stored rollouts (JSON lines), worst first

Left out: parallel tool execution.
"""

import copy
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jsonschema.protocols import Validator

from options import BadInput, closest
from common import cli, read_json, read_text, write_json, write_text
from chat import REPLY, TOOL, Call, Codec, Message, Sample, Trajectory, Turn, coerce, valid
from parts import LOAD_SKILL, SKILL_NAME, Limits, Skill, Tool
from parts import load_limits, load_skill, load_tool, plain_name
from checks import MARKUP, Deny, Hook, Moment, Rewrite, canonical, find_check, load_hook

# of harness.json, and what each must be
KEYS = dict(name=str, system=list, user=str, skills=list, limits=dict, native_tools=bool, formats=dict, fallback=str)
FORMATS = {  # one line for each thing that a prompt lists
    "skill": "- {name}: {description}",
    "tool": "- {signature}: {description}",
    "link": "{link_id}. {name}",
    "turn": "{role}: {text}",
    "signal": "{name}: {value}",
}


@dataclass
class Harness:
    """A state of the harness: what the policy can meet. Never changed, only copied with changes."""

    name: str
    skills: list[Skill]
    tools: list[Tool]
    hooks: list[Hook]
    blocks: dict[str, str]  # block name -> text with {placeholders}
    system: list[str]  # block names of the system prompt, in order
    user: str = "request"  # block name of the user message
    limits: Limits = field(default_factory=Limits)
    native_tools: bool = False  # True: the chat format's own JSON tool list; False: the {tools} lines of a block
    formats: dict[str, str] = field(default_factory=dict)  # in place of those of FORMATS
    fallback: str = ""

    def __post_init__(self):
        self.validate()

    def validate(self) -> None:
        """Refuse what would fail at run; the message begins with the file, and the entry in it, that is at fault."""
        for place, part in self.places():
            try:
                part.validate()
            except BadInput as e:
                raise BadInput(f"{place}: {e}") from None
            if isinstance(part, Hook) and part.check == "skill_loaded" and not self.can_load(part):
                raise BadInput(f"{place}: skill_loaded can never pass: no tool {LOAD_SKILL}, or no skill of that kind")
        taken: dict[tuple, str] = {}
        for place, part in self.places():
            for what in ("id", "name") if isinstance(part, Skill | Tool) else ():
                key = (type(part).__name__.lower(), what, getattr(part, what))
                if key in taken:
                    raise BadInput(f"{place}: two {key[0]}s have the {what} {key[2]!r}, the other is {taken[key]}")
                taken[key] = place
        for key, text in self.formats.items():
            if key not in FORMATS or not isinstance(text, str):
                known = ", ".join(FORMATS)
                raise BadInput(f"harness.json: formats: {key!r}: {text!r}; there is a text for each of {known}")
        if MARKUP.search(self.fallback):
            raise BadInput(f"harness.json: fallback {self.fallback!r} must be plain public text")
        for block in [*self.system, self.user]:
            plain_name(block, "harness.json")
            if block not in self.blocks:
                raise BadInput(f"harness.json: prompt block {block!r} is listed but there is no prompt/{block}.md")

    def places(self) -> list[tuple[str, Skill | Tool | Hook | Limits]]:
        """Each part with the file where it stands, or would stand if saved."""
        parts = [(f"skills/{s.name}/SKILL.md", s) for s in self.skills]
        for kind in ("tools", "hooks"):
            parts += [(f"{kind}.json[{i}]", part) for i, part in enumerate(getattr(self, kind))]
        return [*parts, ("harness.json", self.limits)]

    def can_load(self, hook: Hook) -> bool:
        """Whether the policy can do what a skill_loaded hook waits for."""
        kind = hook.params.get("kind", "reply")
        return self.tool(LOAD_SKILL) is not None and any(s.kind == kind for s in self.skills)

    def copy(self, **changes) -> "Harness":
        """A deep copy with some fields replaced, validated anew: how every other harness state is made."""
        return copy.deepcopy(replace(self, **changes))

    # -- names

    def skill(self, id: str | None) -> Skill | None:
        """The skill of that id."""
        return next((s for s in self.skills if s.id == id), None)

    def tool(self, id: str | None) -> Tool | None:
        """The tool of that id."""
        return next((t for t in self.tools if t.id == id), None)

    @cached_property
    def validators(self) -> dict[str, Validator]:
        """Tool id -> the validator of its arguments."""
        return {t.id: t.validator() for t in self.tools}

    @cached_property
    def names(self) -> dict[str, str]:
        """tool:ID and skill:ID -> the shown name."""
        return {f"{kind}:{x.id}": x.name for kind in ("tool", "skill") for x in getattr(self, kind + "s")}

    def fill(self, text: str, values: dict[str, Any] | None = None) -> str:
        """Replace {tool:ID}, {skill:ID} and the {keys} of values, in one pass; every other brace stays as it is."""
        known = (values or {}) | self.names
        return re.sub(r"\{([A-Za-z_][\w:.\-]*)\}", lambda found: str(known.get(found[1], found[0])), text)

    def skill_text(self, skill: Skill) -> str:
        """The body as load_skill discloses it."""
        return self.fill(skill.body, skill.rules)

    # -- identity

    @cached_property
    def commit(self) -> str:
        """Content hash: the first 12 hex digits of SHA-256 over the canonical JSON of all that the policy can meet."""
        text = json.dumps(self._content(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def diff(self, other: "Harness") -> list[str]:
        """What changed per module, a line each: '- skills/item_qa/name: item_qa -> answer'. Empty: the same commit."""
        lines = []

        def walk(path, a, b, other=False):
            if isinstance(a, dict) and isinstance(b, dict):
                for key in a | b:  # a key that is not there is shown as null, and is another thing all the same
                    walk(f"{path}/{key}" if path else str(key), a.get(key), b.get(key), (key in a) != (key in b))
            elif other or a != b or type(a) is not type(b):
                lines.append(f"- {path}: {' -> '.join(_short(a, b))}")

        walk("", self._content(), other._content())
        return lines

    def _content(self) -> dict:
        """All that the policy can meet, by id; each order that shows in a prompt is an entry of its own."""
        d, seen = asdict(self), Counter()
        for part in (*d["skills"], *d["tools"]):
            del part["extra"]
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

    # -- disk

    @classmethod
    def load(cls, path: str | Path) -> "Harness":
        """Read and validate a harness directory; BadInput names the file (and line) of the first fault."""
        path = Path(path)
        place = path / "harness.json"
        meta, tools, hooks = (read_json(path / f"{x}.json") for x in ("harness", "tools", "hooks"))
        if isinstance(tools, dict):  # the answer to MCP's tools/list
            tools = tools.get("tools")
        for name, value, kind in (("harness", meta, dict), ("tools", tools, list), ("hooks", hooks, list)):
            if not isinstance(value, kind):
                raise BadInput(f"{path / name}.json: must be a JSON {'object' if kind is dict else 'list'}")
        meta = dict(user="request", skills=[], limits={}, native_tools=False, formats={}, fallback="") | meta
        for key in meta.keys() - KEYS:
            raise BadInput(f"{place}: unknown key {key!r}{closest(key, KEYS) or '; known: ' + ', '.join(KEYS)}")
        for key, kind in KEYS.items():
            if not isinstance(meta.get(key), kind):
                raise BadInput(f"{place}: {key!r} is missing or no {kind.__name__}")
        listed = [*meta["system"], meta["user"]]
        order = [*map(str, meta["skills"]), *sorted(d.name for d in (path / "skills").glob("[!.]*") if d.is_dir())]
        content = {key: meta[key] for key in KEYS} | {
            "blocks": {b: read_text(path / "prompt" / f"{plain_name(b, place)}.md").strip() for b in listed},
            "skills": [load_skill(path / "skills" / plain_name(s, place) / "SKILL.md") for s in dict.fromkeys(order)],
            "tools": [load_tool(tool, f"{path / 'tools.json'}[{i}]") for i, tool in enumerate(tools)],
            "hooks": [load_hook(hook, f"{path / 'hooks.json'}[{i}]") for i, hook in enumerate(hooks)],
            "limits": load_limits(meta["limits"], place),
        }
        try:
            return cls(**content)
        except BadInput as e:
            raise BadInput(f"{path}/{e}") from None

    def save(self, path: str | Path) -> None:
        """Write the directory so that load gives an equal harness (same commit).

        BadInput when a skill's name is none for a folder, or when the directory holds skills that this harness has
        not: they would be loaded with it.
        """
        path = Path(path)
        names = [s.name for s in self.skills]
        for name in names:
            if not SKILL_NAME.fullmatch(name):
                raise BadInput(f"skill name {name!r} cannot be saved: lowercase letters, digits, single - or _")
        for folder in sorted((path / "skills").glob("[!.]*")):
            if folder.is_dir() and folder.name not in names:
                raise BadInput(f"{folder}: no skill of this harness; save into a new directory")
        for name in [*self.system, self.user]:
            write_text(path / "prompt" / f"{name}.md", self.blocks[name] + "\n")
        for s in self.skills:
            write_text(path / "skills" / s.name / "SKILL.md", s.to_markdown())
        write_json(path / "tools.json", [t.to_json() for t in self.tools])
        write_json(path / "hooks.json", [asdict(h) for h in self.hooks])
        meta = {key: getattr(self, key) for key in KEYS} | {"skills": names, "limits": asdict(self.limits)}
        write_json(path / "harness.json", meta)  # last: a directory without it is not a harness


def _short(*values) -> list[str]:
    """The values as texts of one line and 80 characters at most, so cut that one sees where they begin to differ."""
    texts = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    texts = [text.replace("\n", "\\n") for text in texts]
    differs = next((i for i, chars in enumerate(zip_longest(*texts)) if len(set(chars)) > 1), 0)
    start = differs - 20 if differs > 60 else 0
    return ["..." * (start > 0) + text[start : start + 74] + "..." * (start + 74 < len(text)) for text in texts]


# ---------------------------------------------------------------------------------------------------------------------
# prompt pipeline


def assemble(h: Harness, danmaku: str, context: dict) -> list[dict]:
    """System and user message for one request; context comes from the room (links, current_link_id, history ...)."""
    line, links = FORMATS | h.formats, context.get("links", [])
    current, signals = context.get("current_link_id"), context.get("signals", {})
    skills = [{"name": s.name, "description": s.description} for s in h.skills]
    tools = [{"signature": t.signature(), "description": t.description} for t in h.tools]
    values = {
        "skills": "\n".join(h.fill(line["skill"], x) for x in skills),
        "tools": "\n".join(h.fill(line["tool"], x) for x in tools),
        "links": "\n".join(h.fill(line["link"], x) for x in links),
        "history": "\n".join(h.fill(line["turn"], x) for x in context.get("history", [])),
        "current_link_id": "" if current is None else current,
        "current_link_name": next((x["name"] for x in links if x["link_id"] == current), ""),
        "signals": "\n".join(h.fill(line["signal"], {"name": k, "value": v}) for k, v in signals.items()),
        "danmaku": danmaku,
        **asdict(h.limits),
    }
    system = "\n\n".join(h.fill(h.blocks[b], values) for b in h.system)
    user = h.fill(h.blocks[h.user], values).strip()
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def named(things: list, name: str) -> Skill | Tool | None:
    """The one that the policy sees under that name."""
    return next((x for x in things if x.name == name), None)


class Rollout:
    """State of one rollout, and the hooks over it. `run` below is the control flow; this only keeps its books."""

    def __init__(self, h: Harness, room, seed: int):
        self.h, self.room = h, room
        self.retries, self.refused = 0, False  # refused: something of this state was denied
        self.trajectory = Trajectory(harness_commit=h.commit, seed=seed)
        self.moment = Moment(h, None, copy.deepcopy(room.context))

    def event(self, kind: str, **data) -> None:
        """One more line of the trace."""
        self.trajectory.events.append({"event": kind, **data})

    def hooks(self, event: str, subject, tool: Tool | None = None):
        """(subject, denial): the subject as rewritten by the hooks of this event, and the first denial's message."""
        m = self.moment
        for hook in self.h.hooks:
            if hook.event != event or not re.search(hook.matcher, tool.id if tool else ""):
                continue
            kept, m.subject, m.tool = (m.loaded, m.calls, m.evidence), copy.deepcopy(subject), tool
            m.loaded, m.calls, m.evidence = ([*x] for x in kept)  # what a check does to them stays its own
            try:
                verdict = self.settled(find_check(hook.check)(m, **hook.params), subject)
            except Exception as e:  # a hook is user code: whatever it raises is a denial in the trace, never a crash
                verdict = Deny(self.clean(f"{type(e).__name__}: {e}"))
                self.event("hook_error", check=hook.check, error=verdict.detail)
            m.loaded, m.calls, m.evidence = kept
            if isinstance(verdict, Rewrite):
                self.event("hook", on=event, check=hook.check, verdict="rewrite")
                subject = verdict.value
                tool = named(self.h.tools, subject.name) if event == "tool_call" else tool  # it may be another one now
            elif verdict is not None:
                message = self.h.fill(hook.message, {"detail": verdict.detail, **asdict(self.h.limits)})
                self.event("hook", on=event, check=hook.check, verdict="deny", message=message)
                return subject, message
        return subject, None

    def settled(self, verdict, subject) -> Deny | Rewrite | None:
        """What a check answered, in texts that can be encoded and written down; TypeError for any other answer."""
        if isinstance(verdict, Deny):
            return Deny(self.clean(verdict.detail))
        value = verdict.value if isinstance(verdict, Rewrite) else None
        if isinstance(subject, str) and isinstance(value, str):
            return Rewrite(valid(value))
        called = isinstance(subject, Call) and isinstance(value, Call)
        if called and isinstance(value.name, str) and isinstance(value.arguments, dict):
            json.dumps([value.name, value.arguments], ensure_ascii=False).encode()  # raises for what cannot be stored
            return verdict
        if verdict is not None:
            raise TypeError(f"the check answered {verdict!r}"[:200])

    def call(self, call: Call) -> str:
        """Execute one call and return the text that the policy reads; every failure is a text too."""
        if call.error:
            return self.refuse(call, call.error)
        tool, id = named(self.h.tools, call.name), call.id
        call.arguments = coerce(call.arguments, tool.parameters if tool else {})
        call, denial = self.hooks("tool_call", call, tool)
        if denial is not None:
            return self.refuse(call, denial)
        tool, call.id = named(self.h.tools, call.name), id
        if tool is None:
            return self.refuse(call, f"unknown tool {call.name!r}")
        arguments = {tool.param_ids.get(k, k): v for k, v in call.arguments.items()}
        self.event("tool_call", tool=tool.id, arguments=arguments, call_id=call.id)
        self.moment.calls.append((tool.id, canonical(call.arguments)))
        if tool.id == LOAD_SKILL:
            name = arguments.get("skill")
            if (skill := named(self.h.skills, name)) is None:
                return self.refuse(call, f"unknown skill {name!r}")
            self.event("skill", skill=skill.id)
            self.moment.loaded.append(skill)
            text = self.h.skill_text(skill)
        else:
            text = self.execute(tool, arguments)
        text, denial = self.hooks("tool_result", text, tool)
        if denial is not None:
            return self.refuse(call, denial)
        self.event("tool_result", tool=tool.id, text=text, call_id=call.id)
        if tool.id != LOAD_SKILL:
            self.moment.evidence.append(text)
        return text

    def refuse(self, call: Call, why: str) -> str:
        """The error that the policy reads in place of a result; it costs this state a retry."""
        self.refused = True
        self.event("tool_error", name=call.name, call_id=call.id, error=why)
        return json.dumps({"error": why}, ensure_ascii=False)

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
        late = result is None
        self.event("tool_crash", tool=tool.id, error="deadline" if late else f"{type(result).__name__}: {result}")
        return json.dumps({"error": "timeout" if late else "tool crashed"})

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

    # 2 assemble prompt
    messages = assemble(h, m.danmaku, m.context)
    delta = codec.prompt(messages, [x.schema() for x in h.tools] if h.native_tools else None)

    # 3 agent loop
    for state in range(limits.max_turns):
        t.append_env(delta)
        sample = yield Turn(delta, messages, limits.max_state_tokens)
        said = codec.parse(sample.ids) if sample.ids else Message()
        t.append_sample(sample, TOOL if said.calls else REPLY, codec.think_mask(sample.ids, bool(said.calls)), state)
        for call in said.calls:
            call.id = f"{state}.{call.id}"
        r.event("state", state=state, **vars(said) | {"calls": [dict(vars(call)) for call in said.calls]})
        if sample.finish != "stop":
            return finish(r, "error" if sample.finish == "error" else "length")
        r.refused = False
        if said.calls:
            messages = [{"role": "tool", "content": r.call(call)} for call in said.calls]
        else:
            reply, denial = r.hooks("reply", said.content)
            public = not MARKUP.search(reply) and not any(f"{tool.name}(" in reply for tool in h.tools)
            if denial is None and reply.strip() and public:  # the last guard holds without any hook
                return finish(r, "reply", reply.strip())
            r.refused = True
            messages = [{"role": "user", "content": denial or "reply must be plain text"}]
        r.retries += r.refused  # once a state, however many of its calls: an error must be read before it can be mended
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


if __name__ == "__main__":
    import browse  # a room below this one, with the commands

    cli(browse.main)
