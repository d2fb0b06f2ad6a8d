"""The oracle teacher: reads the harness that it is given and the world, and acts through the same loop as any policy.

    trajectory = teach(harness, task, codec, seed)    tool calls, recoveries from faults, skills, a reply by the rules

It addresses tools and skills by their ids and says them by their names, so it is right under any renaming. Its
reasoning resolves first and names later: which link is meant, what is asked of it, which tool and skill will tell, and
only then the calls, so that each name is looked up once. How much it says beside that is a matter of `verbosity`; how
much it forgets, of `careless`.

    python oracle.py --seed 3        one task with its truth, and how the oracle handles it

Left out: other right ways to the same reply, asking back.
"""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from options import option, parse
from common import cli, seed_of
from chat import Call, Codec, Message, Sample, Trajectory, Turn, read_codec
from parts import LOAD_SKILL, Skill
from harness import Harness, print_events, run
from sim import NO_FAULTS, ROUTES, Ask, Faults, Task, World, check_harness, make_task, readable, wanted

VERBOSITY = (0.15, 0.25, 0.6)  # shares of 0, 1 and 2 among a teacher's dialogues: most models reason at length


def call_of(h: Harness, tool_id: str, arguments: dict) -> Call:
    tool = h.tool(tool_id)
    shown = {id: name for name, id in tool.param_ids.items()}
    return Call(tool.name, {shown[k]: v for k, v in arguments.items()})


def asked(w: World, ask: Ask) -> str:
    """The oracle's words for what is asked."""
    kind = "ask_compare" if ask.other else "ask" if ask.link else "ask_room" if ask.kind == "promo" else "talk"
    return w["think"][kind].format(n=ask.link, m=ask.other, topic=w["topic"][ask.kind].format(key=ask.key))


def understood(w: World, ask: Ask, links: list[dict]) -> str:
    """The same, behind which link is meant."""
    which = w["think"]["link"].get(ask.ref, "") if ask.link else ""
    return which.format(n=ask.link, name=links[ask.link - 1]["name"] if which else "") + asked(w, ask)


@dataclass
class Fact:
    """One call that the oracle owes to an ask, and what came of it."""

    ask: Ask
    tool: str
    arguments: dict
    data: dict | None = None  # the result, when it could be read
    tries: int = 0  # of this tool


class Oracle:
    """Reads the harness it is given and the world; says the right next message, with reasoning of chosen verbosity.

    verbosity 0, 1, 2: about 20, 40, 70 reasoning tokens a state. slip: probability of one mistake that a hook corrects.
    careless: probability that a reply forgets the rules of its skill, and that it leaves out an ask but for the first.
    No hook corrects these.
    """

    def __init__(
        self, h: Harness, task: Task, rng: random.Random, verbosity: int = 0, slip: float = 0.0, careless: float = 0.0
    ):
        self.h, self.task, self.rng, self.verbosity, self.careless = h, task, rng, verbosity, careless
        self.think = task.world["think"]
        self.slips = rng.random() < slip
        self.state = 0
        self.facts = [Fact(a, *call) for a in task.asks for call in a.calls(self._tool(a))]
        self.sent: list[Fact] = []  # those of the last message
        self.lost = [a for a in task.asks if ROUTES[a.kind][0] and not self._tool(a)]  # what no tool will tell
        self.strategy, self.skill = h.skill(task.strategy), h.skill(task.reply_skill)
        self.skill_loaded = self.skill is None

    def _tool(self, ask: Ask) -> str | None:
        """The first tool for this that the harness has."""
        return next((id for id in ROUTES[ask.kind][:2] if id and self.h.tool(id)), None)

    def say(self, messages: list[dict]) -> Message:
        """The next message, given what the loop appended: the prompt first, then tool results or a hook's message."""
        note = self._read(messages)
        if self.state and messages[-1]["role"] == "user":
            note = self.rng.choice(self.think["fix"])
        self.state += 1
        skills = []
        if self.state == 1 and self.strategy:
            skills = [self.strategy]
        else:
            self.sent = [f for f in self.facts if f.data is None and f.ask not in self.lost]
            if not self.sent and self.slips:  # forgot the skill: replies too early, and a hook asks for it
                self.slips = False
                return self._reply(note)
            if not self.skill_loaded and not self.slips:
                skills, self.skill_loaded = [self.skill], True
        if not self.sent and not skills:
            return self._reply(note)
        tools = [call_of(self.h, f.tool, f.arguments) for f in self.sent]
        loads = [call_of(self.h, LOAD_SKILL, {"skill": s.name}) for s in skills]
        return Message(self._plan(note, skills), "", tools + loads)

    def _read(self, messages: list[dict]) -> str:
        """Takes in the results of the calls just made; returns what reasoning has to say about failures."""
        notes = []
        results = [m for m in messages if m["role"] == "tool"]
        # not strict: the loader's answers come after those of the fact calls and are no facts; and of a message that
        # was cut on its way, fewer calls than were sent have an answer
        for fact, message in zip(self.sent, results, strict=False):
            fact.data, fact.tries = readable(message["content"]), fact.tries + 1
            if fact.data is not None:
                continue
            which = self.think["at"].format(n=fact.arguments["link_id"]) if "link_id" in fact.arguments else ""
            names, other = {"tools": which + self.h.tool(fact.tool).name}, ROUTES[fact.ask.kind][1]
            if "permission" not in message["content"] and fact.tries < 2:
                notes.append(self.think["retry"].format(**names))
            elif other and fact.tool != other and self.h.tool(other):
                fact.tool, fact.tries = other, 0
                notes.append(self.think["swap"].format(other=self.h.tool(other).name, **names))
            else:
                self.lost.append(fact.ask)
                notes.append(self.think["denied"].format(**names))
        return "".join(dict.fromkeys(notes))

    def _forgets(self) -> bool:
        return self.rng.random() < self.careless

    def _plan(self, note: str, skills: list[Skill]) -> str:
        """Reasoning of a tool-call state: what is asked, each with the tool that will tell, and the skills."""
        th, w, said = self.think, self.task.world, []
        parts = [note]
        if self.state == 1 and self.verbosity:
            parts.append(self.rng.choice(th["read"]).format(danmaku="，".join(self.task.danmaku)))
        for ask in self.task.asks:
            tools = [self.h.tool(f.tool).name for f in self.sent if f.ask is ask and not note]
            words = understood(w, ask, self.task.links) if self.state == 1 else asked(w, ask) if tools else ""
            plan = th["plan"].format(tools="、".join(dict.fromkeys(tools))) if tools else ""
            said += [words + plan] if words else []
        parts.append("，".join(said))
        parts += [th["skill" if s.kind == "reply" else "strategy"].format(skill=s.name) for s in skills]
        text = "".join(parts).strip("，。") + "。"
        more = min(2, 3 - len(said)) if self.verbosity == 2 else 0  # two asks are long enough for one state
        return text + "".join(self.rng.sample(th["verbose"], more))

    def _reply(self, note: str) -> Message:
        """A reply state: every fact that was read, an honest word for the rest, by the rules of the skill."""
        th, w = self.think, self.task.world
        rules = self.skill.rules if self.skill and not self._forgets() else {}
        clauses, facts = [], []
        for i, ask in enumerate(self.task.asks):
            if i and self._forgets():
                continue
            if ask in self.lost:
                clauses.append(w["say"]["unknown" if ask.link else "unknown_room"].format(n=ask.link))
                continue
            key, values, pieces = wanted(self.task, ask)
            clauses.append(w["say"][key].format(**values))
            if ask.kind in w["small_talk_keyword"]:
                continue
            pieces = [ask.key + x for x in pieces] if ask.kind == "attr" else pieces
            at = {n: th["at"].format(n=n) for n in ask.links}
            if ask.kind == "compare":
                facts += [at[n] + str(self.task.link(n)["price"]) for n in ask.links]
            elif ask.link and len(self.task.asks) > 1:  # which answer is whose
                pieces = [at[ask.link] + pieces[0], *pieces[1:]]
            facts += pieces
        opening, must_say = ([str(rules[k])] if k in rules else [] for k in ("opening", "must_say"))
        reply = "，".join([*opening, *clauses, *must_say]) + str(rules.get("closing", "")) + "。"
        thought = note + (th["found"].format(facts="，".join(facts)) if facts else "")
        thought += "".join(th["rules"][k].format(**rules) for k in th["rules"] if k in rules)
        if self.verbosity:
            thought = (self.rng.choice(th["verbose_reply"]) if self.verbosity == 2 else "") + thought
            thought += self.rng.choice(th["verbose_reply"])
        return Message(thought or clauses[0], reply)


Say = Callable[[list[dict]], Message | None]


def perform(loop: Generator[Turn, Sample, Trajectory], say: Say, codec: Codec) -> Trajectory:
    """The trajectory of an agent loop whose policy is a teacher. Log-probs 0, not scored.

    say: what the loop appended -> the next message, or None when the teacher has none. A message longer than the
    harness lets a state be is cut there: no policy could say it.
    """
    sample = None  # starts the loop
    while True:
        try:
            turn = loop.send(sample)
        except StopIteration as end:
            return end.value
        said = say(turn.messages)
        ids = codec.render(said) if said else []
        finish = "error" if not ids else "stop" if len(ids) <= turn.max_new_tokens else "length"
        ids = ids[: turn.max_new_tokens]
        sample = Sample(ids, [0.0] * len(ids), finish)


def teach(h: Harness, task: Task, codec: Codec, seed: int, faults: Faults = NO_FAULTS, **style) -> Trajectory:
    """One trajectory of the oracle. style: verbosity, slip, careless."""
    oracle = Oracle(h, task, random.Random(seed_of("oracle", seed)), **style)
    return perform(run(h, task.danmaku, task.open(faults, seed), codec, seed), oracle.say, codec)


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Config:
    harness: str = option("data/harness", "harness directory")
    world: str = option("data/world/zh.json", "world file")
    model: str = option("data/base-small", "directory of the tokenizer")
    split: Literal["train", "test"] = option("train", "half of the word pools")
    seed: int = option(0, "the task")
    verbosity: int = option(1, "of the oracle's reasoning: 0, 1 or 2", min=0, max=2)
    faults: bool = option(True, "let tools fail now and then")


def demo(c: Config) -> tuple[Harness, Task, Trajectory]:
    """The oracle on one task, printed with the truth."""
    h, task = Harness.load(c.harness), make_task(World.load(c.world, c.split), c.seed)
    print(f"{task.intent}: {task.asks}\ntruth: {[wanted(task, a)[2] for a in task.asks]}")
    check_harness(h)
    t = teach(h, task, read_codec(c.model), c.seed, Faults() if c.faults else NO_FAULTS, verbosity=c.verbosity)
    print_events(t.events)
    return h, task, t


def main(argv: list[str]) -> None:
    demo(parse(Config, {}, argv, __doc__))


if __name__ == "__main__":
    cli(main)
