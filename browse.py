"""The commands of harness.py, for a person: what the policy reads, a talk with it, and what stored rollouts did.

    python harness.py show [--harness DIR] [--seed 3]       the assembled prompt of one request, and the commit
    python harness.py chat [--model DIR] [--seed 3]         type bullet comments against a room, watch every step
    python harness.py trace FILE [--count 10]               browse stored rollouts (JSON lines), worst first

A room (--world, --seed) has its links and the one on air, and in `chat` tools that fail now and then. A rollout is
shown line by line: comment, reasoning, calls, results, what hooks said, reply. `trace` reads what rl.py leaves in its
run directory, and any JSON lines of `Trajectory.to_dict`.
"""

import json
import math
from dataclasses import dataclass

import sim
from options import BadInput, option, parse
from common import read_text
from chat import Trajectory
from harness import Harness, assemble, print_events, run


@dataclass
class Config:
    harness: str = option("data/harness", "harness directory")
    world: str = option("data/world/zh.json", "world file")
    model: str = option("data/base-small", "policy that answers in chat")
    seed: int = option(0, "which room")
    greedy: bool = option(True, "the likeliest token each time")
    count: int = option(10, "rollouts that trace shows", min=1)


def show(c: Config) -> None:
    """Print what the policy reads at the start of one request."""
    h, task = Harness.load(c.harness), sim.make_task(sim.World.load(c.world), c.seed)
    for message in assemble(h, "\n".join(task.danmaku), task.context):
        print(f"[{message['role']}]\n{message['content']}\n")
    print(f"harness {h.name}, commit {h.commit}: {len(h.skills)} skills, {len(h.tools)} tools, {len(h.hooks)} hooks")


def chat(c: Config) -> None:
    """Answer bullet comments that are typed, with tool faults."""
    import infer  # with torch, which the other commands do without
    import model

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
    """Print the first --count stored rollouts of a file, by the mean of their rewards, unscored ones last."""
    stored = []
    for n, line in enumerate(read_text(path).split("\n"), 1):
        try:
            stored += [Trajectory.from_dict(json.loads(line))] if line.strip() else []
        except (ValueError, TypeError, AssertionError) as e:
            raise BadInput(f"{path}:{n}: not a stored rollout: {str(e)[:200]}") from None
    try:
        scored = ([v for v in t.rewards.values() if v is not None] for t in stored)
        means = [sum(rewards) / len(rewards) if rewards else math.inf for rewards in scored]
        stored = [stored[i] for i in sorted(range(len(stored)), key=means.__getitem__)]
        for t in stored[: c.count]:
            rewards = ", ".join(f"{k} {v}" for k, v in t.rewards.items())
            print(f"\n== seed {t.seed}  harness {t.harness_commit}  {len(t.ids)} tokens  {rewards}")
            print_events(t.events)
    except (ValueError, TypeError, KeyError, AttributeError) as e:  # rewards, events: whatever another program wrote
        raise BadInput(f"{path}: not stored rollouts: {type(e).__name__}: {e}") from None


def main(argv: list[str]) -> None:
    command, *rest = argv or [""]
    if command in ("-h", "--help"):
        parse(Config, {}, ["--help"], __doc__)  # prints it and exits
    if command == "trace" and (not rest or rest[0].startswith("-")):
        raise BadInput("trace takes a file of trajectories: python harness.py trace runs/.../trajectories.jsonl")
    if command == "trace":
        trace(parse(Config, {}, rest[1:], __doc__), rest[0])
    elif command in ("show", "chat"):
        {"show": show, "chat": chat}[command](parse(Config, {}, rest, __doc__))
    else:
        raise BadInput("harness.py takes a command: show | chat | trace")
