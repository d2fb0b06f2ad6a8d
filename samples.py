"""Supervised samples: what a teacher does with a request under one of many harnesses, and which of it is trained.

    sample  = a request x a harness (the original, or with P(augmented) another state of it) x what the teacher did
    kept    = dispatched by the loop, with accuracy 1 and effectiveness 1 by the facts
    trained = the tokens that the teacher said, but for what was sent back

A teacher makes mistakes that a hook sends back. A few such samples stay whole (keep_retries): the mistake stands in the
context, and the way out of it is trained. In the others the teacher begins anew and knows what the hooks have said:
right from the first token on, in a context that went through the same loop and that a policy can meet. The mistake
itself is never trained. A reply that passes unchanged when it is said again was none: the harness wanted it confirmed.

Teachers: the oracle of the small world; a model behind an OpenAI-compatible server, asked in messages while the loop
keeps the tokens; dialogues of your own (`read_logs` has the format), replayed through the loop under any harness. These
have no ground truth: what the loop dispatches is kept, and a mistake in it stays in the context.

    case = TaskCase(i, options, world, endpoint=None)            # a request; nothing in it depends on the harness
    t = tell(i, case, options, original, codec)                  # a scored Trajectory: same arguments, same sample
    why, mask = flaw(t, context), trained(t)                     # "" if it is kept; 1 for each trained token

Left out: judges other than the facts; rewriting of logs whose replies a hook sends back.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from options import BadInput, closest, option
from common import Dist, read_text, seed_of

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from tqdm import tqdm

from chat import Call, Codec, Message, Trajectory, coerce, parse_calls
from parts import LOAD_SKILL
from checks import canonical
from harness import Harness, named, run
from reword import Rewriter, Server, mention
from envelope import ENVELOPE
from augment import augment
from sim import Faults, World, check_harness, make_task
from oracle import VERBOSITY, Oracle, Say, call_of, perform
from facts import score

CHUNK = 64  # samples between two barriers: however slow a teacher is, ranks that wait for it do not time out


Dimension = Literal["none", "skill_id", "skill_content", "tool", "prompt", "hook"]  # of augment.DIMENSIONS


@dataclass
class Options:
    """What samples are made of; a stage adds its own."""

    harness: str = option("data/harness", "harness directory")
    world: str = option("data/world/zh.json", "world file")
    seed: int = option(0, "the seed of everything")
    samples: int = option(2000, "requests that the teacher is given; with --logs see read_logs", min=1)
    held_out: int = option(64, "more of them, never trained, for the held-out loss", min=1)
    harness_mode: Literal["hsa", "fixed"] = option("hsa", "fixed = the original harness alone")
    augmented: float = option(0.75, "hsa: share of samples under an augmented harness", min=0, max=1)
    leave_out: Dimension = option("none", "hsa: a dimension in which nothing changes")
    rewriter: str = option("", "hsa: OpenAI-compatible server that rewords the harness, in place of the word pools")
    strange: float = option(0.7, "share of samples in rooms of unheard-of product words", min=0, max=1)
    faults: tuple[float, float, float] = option((0.1, 0.07, 0.1), "P(timeout, malformed, denied)", min=0, max=1)
    slip: float = option(0.1, "P(the oracle makes a mistake that a hook corrects)", min=0, max=1)
    keep_retries: float = option(0.1, "share of samples with a mistake that stay whole", min=0, max=1)
    endpoint: str = option("", "OpenAI-compatible server as teacher, e.g. http://localhost:8000/v1")
    llm: str = option("default", "model name for these servers")
    workers: int = option(8, "dialogues with these servers side by side", min=1)
    logs: str = option("", "JSON lines of your own dialogues in place of a teacher; see samples.read_logs")


# ---------------------------------------------------------------------------------------------------------------------
# teachers: say(messages that the loop appended) -> the next message, or None when the teacher has none

Row = tuple[list[int], list[int]]  # ids and mask, 1 = trained, of one sample


def message_of(data: dict) -> Message:
    """An assistant message as OpenAI-compatible servers write it. ValueError for one that cannot be read.

    Reasoning stands in `reasoning` or `reasoning_content`, or in <think> tags before the content. Calls stand in
    `tool_calls`, or as <tool_call> text in the content of a server that does not parse them.
    """
    thought, content = data.get("reasoning") or data.get("reasoning_content") or "", data.get("content") or ""
    if not isinstance(thought, str) or not isinstance(content, str):
        raise ValueError("content and reasoning must be texts")
    before, tag, after = content.partition("</think>")
    if tag:
        thought, content = thought or before.replace("<think>", "", 1), after
    content, calls = parse_calls(content)
    check(not any(call.error for call in calls), "a tool call in the content cannot be read")
    for call in data.get("tool_calls") or []:
        made = call.get("function") if isinstance(call, dict) else None
        arguments = made.get("arguments") if isinstance(made, dict) else None
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(made.get("name"), str):
            raise ValueError('a tool call is {"function": {"name": ..., "arguments": {...}}}')
        calls.append(Call(made["name"], arguments, str(call.get("id") or f"call_{len(calls)}")))
    return Message(thought.strip(), content, calls)


class Teacher(Server):
    """A language model as teacher. A sample on which its server fails is left out."""

    def speaker(self, h: Harness, lessons: list[str], seed: int) -> Say:
        """One dialogue. lessons: what hooks have said before; only the teacher reads them, the trained context not."""
        history, tools = [], [tool.schema() for tool in h.tools]

        def say(messages):
            called = history[-1].get("tool_calls", []) if history else []
            if sum(m["role"] == "tool" for m in messages) != len(called):
                return None  # the loop has read other calls than the server meant
            new = [dict(m) for m in messages]
            for m, call in zip(new, called):
                m["tool_call_id"] = call["id"]
            if not history and lessons:
                new[0]["content"] += "\n\n" + "\n".join(lessons)
            history.extend(new)
            said = self.ask(history, message_of, tools=tools or None, seed=seed >> 32)
            if said is not None:
                for call in said.calls:  # <parameter> texts get their types
                    tool = named(h.tools, call.name)
                    call.arguments = coerce(call.arguments, tool.parameters) if tool else call.arguments
                calls = [(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in said.calls]
                calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
                history.append(
                    {"role": "assistant", "content": said.content} | ({"tool_calls": calls} if calls else {})
                )
            return said

        return say


# ---------------------------------------------------------------------------------------------------------------------
# cases: a request, and who answers it


class TaskCase:
    """Request i of the small world, answered by the oracle or by an endpoint. Nothing in it depends on the harness."""

    def __init__(self, i: int, cfg: Options, world: World, endpoint: Teacher | None):
        rng, self.seed = random.Random(seed_of(cfg.seed, "sample", i)), seed_of(cfg.seed, "teacher", i)
        place = world.strange(rng) if rng.random() < cfg.strange else world
        self.task = make_task(place, seed_of(cfg.seed, "task", i))
        self.verbosity = rng.choices((0, 1, 2), VERBOSITY)[0]
        self.cfg, self.endpoint, self.request = cfg, endpoint, self.task.danmaku
        self.skills = {self.task.reply_skill, self.task.strategy} - {None}  # that it needs, by id

    def open(self) -> Any:
        """A fresh room."""
        return self.task.open(Faults(*self.cfg.faults), self.seed)

    def speaker(self, h: Harness, lessons: list[str]) -> Say:
        """The teacher under that harness, who knows what hooks have said."""
        if self.endpoint:
            return self.endpoint.speaker(h, lessons, self.seed)
        slip = 0.0 if lessons else self.cfg.slip
        return Oracle(h, self.task, random.Random(self.seed), self.verbosity, slip).say

    def score(self, h: Harness, t: Trajectory) -> dict:
        return score(h, self.task, t)


@dataclass
class Log:
    """A dialogue of the user's own: a case, and its room. Tools, parameters and skills go by their ids."""

    home: Harness  # in whose names it was written
    request: str | list[str]
    context: dict
    results: list[tuple[str, str, Any]]  # tool, canonical arguments, result
    messages: list[Message]
    skills: set[str]  # that it loads

    def open(self) -> "Log":
        return replace(self, context=copy.deepcopy(self.context), results=[*self.results])

    def call(self, tool: str, arguments: dict) -> Any:
        """The result of that call; of equal calls one after the other, and then always the last."""
        at = [i for i, made in enumerate(self.results) if made[:2] == (tool, canonical(arguments))]
        return self.results.pop(at[0])[2] if len(at) > 1 else self.results[at[0]][2] if at else {"error": "not_in_log"}

    def speaker(self, h: Harness, lessons: list[str]) -> Say:
        """Its messages in the names of that harness; after the last of them, that one again."""
        new = {name: h.names[key] for key, name in self.home.names.items() if key in h.names}
        left, pattern = iter(self.messages), mention(new)

        def say(_):
            m = next(left, self.messages[-1])  # whatever a hook wants, the reply stays
            thought = pattern.sub(lambda found: new.get(found[0], found[0]), m.reasoning)
            shown = [
                c.arguments | {k: h.skill(v).name for k, v in c.arguments.items() if c.name == LOAD_SKILL}
                for c in m.calls
            ]
            return Message(thought, m.content, [call_of(h, c.name, args) for c, args in zip(m.calls, shown)])

        return say

    def score(self, h: Harness, t: Trajectory) -> dict:
        return {}  # nobody knows the truth


def shape(required: str, **properties) -> dict:
    """JSON schema of an object."""
    return {"type": "object", "required": required.split(), "properties": properties}


def many(items: dict) -> dict:
    """JSON schema of a list."""
    return {"type": "array", "items": items}


TEXT = {"type": "string"}
CONTEXT = shape("links", links=many(shape("link_id name")), history=many(shape("role text")), signals=shape(""))
RESULT = shape("tool arguments result", tool=TEXT, arguments=shape(""))
ROW = shape(  # of a row; read_logs says it in prose
    "request room",
    request={"type": ["string", "array"], "items": TEXT, "minItems": 1},
    room=shape("context", context=CONTEXT, results=many(RESULT)),
    skills=many(TEXT),
    reply=TEXT,
    messages=many(shape("", role={"const": "assistant"}, tool_calls={"type": ["array", "null"]})) | {"minItems": 1},
)
ROW["additionalProperties"] = ROW["properties"]["room"]["additionalProperties"] = False


def read_logs(path: str, h: Harness) -> list[Log]:
    """The dialogues of a JSON-lines file; BadInput names file and line. One row (here on several lines):

        {"request": "3号链接还有货吗",                               or a list of comments that came together
         "room": {"context": {"links": [{"link_id": 3, "name": "防晒霜"}], "current_link_id": 3,
                              "history": [{"role": "观众", "text": "..."}], "signals": {"online": 99}},
                  "results": [{"tool": "get_inventory", "arguments": {"link_id": 3}, "result": {"stock": 7}}]},
         "skills": ["item_qa"], "reply": "3号链接还有7件哈。"}        makes these calls, loads the skills, replies

    or, in place of skills and reply, all that the assistant said, each call with its result among `results`:

         "messages": [{"role": "assistant", "content": "", "reasoning": "查库存。", "tool_calls":
                       [{"function": {"name": "get_inventory", "arguments": {"link_id": 3}}}]}, ...]

    Tools, parameters and skills go by their names in the harness, or by their ids. A context needs `links` only. One in
    ten is held out, --held-out at most. Under augmented harnesses the others are told in turn until there are
    --samples, so a few dialogues are told often (the log says how often); under the original alone each is told once: a
    copy would only weigh more.
    """
    logs = []
    for n, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                logs.append(log_of(json.loads(line), h))
            except (ValueError, RecursionError) as error:  # JSONDecodeError among them
                raise BadInput(f"{path}:{n}: {' '.join(str(error).split())[:300]}") from None
    if len(logs) < 2:
        raise BadInput(f"{path}: dialogues: {len(logs)}; there must be two, one of them for the held-out loss")
    return logs


def log_of(row: Any, h: Harness) -> Log:
    """One row of read_logs; ValueError says what is wrong with it."""
    if error := best_match(Draft202012Validator(ROW).iter_errors(row)):
        raise ValueError(f"{error.json_path.removeprefix('$.')}: {error.message}")
    check(("reply" in row) != ("messages" in row), "a row has either reply or messages")
    made, loads = row["room"].get("results", []), row.get("skills", [])
    calls = [by_id(Call(x["tool"], x["arguments"]), h) for x in made]
    results = [(call.name, canonical(call.arguments), x["result"]) for call, x in zip(calls, made)]
    if "reply" in row:
        calls += [by_id(Call(LOAD_SKILL, {"skill": name}), h) for name in loads]
        messages = [Message("", "", calls)] * bool(calls) + [Message("", row["reply"])]
    else:
        check(not loads, "skills go with a reply; messages load their own")
        messages = [message_of(m) for m in row["messages"]]
        messages = [replace(m, calls=[by_id(call, h) for call in m.calls]) for m in messages]
    calls, known = [call for m in messages for call in m.calls], {made[:2] for made in results}
    for name, arguments in ((c.name, canonical(c.arguments)) for c in calls if c.name != LOAD_SKILL):
        check((name, arguments) in known, f"room.results has no {name} {arguments}")
    last = messages[-1]
    check(bool(last.content.strip()) and not last.calls, "the last message must be a reply, without tool calls")
    skills = {call.arguments["skill"] for call in calls if call.name == LOAD_SKILL}
    return Log(h, row["request"], row["room"]["context"], results, messages, skills)


def check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


def by_id(call: Call, h: Harness) -> Call:
    """The call with tool, parameters and skill by their ids; ValueError for what the harness has not."""
    tool = find(h.tools, call.name, "tool")
    arguments = {tool.param_ids.get(k, k): v for k, v in coerce(call.arguments, tool.parameters).items()}
    unknown = sorted(arguments.keys() - set(tool.param_ids.values()))
    check(not unknown, f"{call.name} has no parameter {', '.join(unknown)}")
    if tool.id == LOAD_SKILL:
        arguments = {"skill": find(h.skills, arguments.get("skill"), "skill").id}
    return Call(tool.id, arguments)


def find(things: list, name: Any, what: str) -> Any:
    found = named(things, name) or next((x for x in things if x.id == name), None)
    check(found is not None, f"the harness has no {what} {name!r}{closest(str(name), [x.name for x in things])}")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# samples


def harness_for(original: Harness, cfg: Options, seed: int, keep: set[str], rewrite: Rewriter | None = None) -> Harness:
    """The original harness, or with P(augmented) another state of it, in words of the train pool or the rewriter."""
    acts = cfg.harness_mode != "fixed" and random.Random(seed_of("augmented", seed)).random() < cfg.augmented
    return another_state(original, cfg, seed, keep, rewrite) if acts else original


def another_state(
    original: Harness, cfg: Options, seed: int, keep: set[str], rewrite: Rewriter | None = None
) -> Harness:
    """What a training sees in place of the original. keep: ids of the skills that its request needs."""
    envelope = ENVELOPE if cfg.leave_out == "none" else replace(ENVELOPE, **{cfg.leave_out: 0.0})
    return augment(original, seed, envelope, "train", keep, rewrite)[0]


def tell(
    i: int, case: TaskCase | Log, cfg: Options, original: Harness, codec: Codec, rewrite: Rewriter | None = None
) -> Trajectory:
    """Sample i: the case under its harness, taught again if something was sent back and it is not to stay whole."""
    h = harness_for(original, cfg, seed_of(cfg.seed, "harness", i), case.skills, rewrite)
    seed = seed_of(cfg.seed, "run", i)

    def told(lessons):
        t = perform(run(h, case.request, case.open(), codec, seed), case.speaker(h, lessons), codec)
        t.rewards = case.score(h, t)
        return t

    t = told([])
    whole = random.Random(seed_of(cfg.seed, "whole", i)).random() < cfg.keep_retries
    return told(lessons_of(t)) if mistakes(t) and not whole else t


def mistakes(t: Trajectory) -> set[int]:
    """The states that were sent back: with a refused call, or a reply that did not pass unchanged when said again.

    A result that a hook withholds is no mistake of the call.
    """
    states, wrong, before = [e for e in t.events if e["event"] == "state"], set(), {}
    for e in t.events:
        at = e["state"] if e["event"] == "state" else before.get("at", -1)
        if e["event"] == "tool_error" and before.get("on") != "tool_result":
            wrong.add(at)
        before = e | {"at": at}
    for this, after in reversed(list(zip(states, states[1:]))):
        again = not after["calls"] and after["content"] == this["content"] and after["state"] not in wrong
        if not this["calls"] and not again:
            wrong.add(this["state"])
    return wrong


def lessons_of(t: Trajectory) -> list[str]:
    """What was said when something was sent back, each once."""
    said = [e.get("message") or e.get("error") for e in t.events if e["event"] in ("hook", "tool_error")]
    return list(dict.fromkeys(filter(None, said))) or ["reply must be plain text"]


def trained(t: Trajectory) -> list[int]:
    """1 for each token that is trained: all that was said, mistakes excepted."""
    wrong = mistakes(t)
    return [int(m and s not in wrong) for m, s in zip(t.mask, t.state)]


def flaw(t: Trajectory, context: int) -> str:
    """Why a sample is left out, in a word; empty for one that is kept."""
    if t.stop_reason != "reply":
        return t.stop_reason
    if any(t.rewards.get(name, 1.0) != 1.0 for name in ("accuracy", "effectiveness")):
        return "judge"
    if len(t.ids) > context:
        return "context"
    return "" if any(trained(t)) else "silent"


def make_samples(path: Path, make: Callable[[int], Trajectory], total: int, workers: int, ranks: Dist) -> list:
    """All samples: those in the file, and the rest from `make(i)`, which rank 0 appends to the file as they come."""
    done = 0
    if ranks.rank == 0 and path.exists():
        with open(path, "r+b") as file:  # bytes: a kill can tear the last line, and a character in it
            lines = file.read()
            file.truncate(lines.rfind(b"\n") + 1)
            done = lines.count(b"\n")
    done, busy = ranks.share(done), tqdm(desc="samples", total=total, leave=False, disable=ranks.rank > 0)
    with ThreadPoolExecutor(workers) as pool, busy as bar:
        bar.update(done)
        for start in range(done, total, CHUNK):
            if ranks.rank == 0:
                with open(path, "a", 1, encoding="utf-8") as file:
                    for t in pool.map(make, range(start, min(start + CHUNK, total))):
                        file.write(json.dumps(t.to_dict(), ensure_ascii=False) + "\n")
                        bar.update()
            ranks.barrier()
    return [Trajectory.from_dict(json.loads(line)) for line in read_text(path).split("\n") if line]


def replayed(cfg: Options, logs: list[Log]) -> tuple[Options, str]:
    """The options with as many samples as these dialogues are good for, and a line that says how often each is told."""
    held = held_logs(cfg, logs)
    n = min(cfg.samples, total := len(logs) - held)
    left = f"; --samples {cfg.samples} leaves {total - n} out" if n < total else ""
    if cfg.harness_mode == "fixed" or not cfg.augmented:
        return replace(cfg, samples=n, held_out=held), f"{n} dialogues, each once, and {held} held out{left}"
    often = f"each {cfg.samples / n:.3g} times, with P = {cfg.augmented:g} under another harness each time"
    return cfg, f"{n} dialogues, {often}, and {held} held out{left}"


def held_logs(cfg: Options, logs: list[Log]) -> int:
    return min(cfg.held_out, max(1, len(logs) // 10))


def case_maker(cfg: Options, harness: Harness, logs: list[Log] = ()) -> Callable[[int], TaskCase | Log]:
    """Index of a sample -> its case, of the world or of the logs; those from --samples on are the held-out ones."""
    if not logs:
        check_harness(harness)
        world, endpoint = World.load(cfg.world, "train"), Teacher(cfg.endpoint, cfg.llm) if cfg.endpoint else None
        return lambda i: TaskCase(i, cfg, world, endpoint)
    held = held_logs(cfg, logs)  # the last of them
    train, rest = logs[:-held], logs[-held:]
    return lambda i: train[i % len(train)] if i < cfg.samples else rest[(i - cfg.samples) % held]


def sort_out(told: list[Trajectory], cfg: Options, context: int) -> tuple[list[Row], list[Row], str]:
    """(rows to train, rows held out, a line about them) of all samples; BadInput when none of either is left."""
    reasons = [flaw(t, context) for t in told]
    rows = [(t.ids, trained(t)) if not why else None for t, why in zip(told, reasons)]
    train, held = ([row for row in part if row] for part in (rows[: cfg.samples], rows[cfg.samples :]))
    left_out = ", ".join(f"{why} {n}" for why, n in sorted(Counter(filter(None, reasons)).items())) or "none"
    line = f"{len(told)} samples; left out: {left_out}; with a mistake in the context: "
    line += f"{sum(bool(mistakes(t)) for t, why in zip(told, reasons) if not why)}"
    if not train or not held:
        raise BadInput(f"nothing to {'train' if not train else 'hold out'}: {line}")
    return train, held, line
