"""Seconds of one RL step, rollouts and update: rl.py beside TRL's GRPOTrainer with a tool environment, on one machine.

A step is the same on both sides: `--groups` x `--group-size` rollouts of a live room's requests under the harness, with
its real tools, and one AdamW step on all of them in micro-batches of `--micro` (of one group at most in rl.py): fp32,
no KL, the same weights to begin with, ratios of whole sequences there and of segments here. Lengths are equal because
both draw every token from the model, but hear the words of the teacher and draw as many of them: no stop token ends a
state, the teacher's does. What each side then holds is compared token by token, and TRL's own count of tokens with
ours.

What differs is how. rl.py keeps a rollout's cache over its turns and computes a group's prompt once, in the rollouts
and in each micro-batch of the update; GRPOTrainer generates from the whole history in each turn, padded to the longest,
all rows until the last one is done. TRL is let off hooks, scoring (its rewards are worked out before) and a second
optimizer step on the same rollouts, for which it would compute their log-probs once more. rl.py drops rollouts without
advantage; here all reasoning is penalised and a group's members reason at different length, so that all have one.
Before each step, off the clock, rl.py is given the log-probs of what it will hear: a real rollout has them at hand, and
it computes those of what it draws all the same.

The sides take turns, step by step; the first step is not timed; figures are medians, the ratio that of each pair.
Processor seconds, of all threads together, are for machines that others use too. Then rl.py alone over `--sizes`
(groups) and `--stretch` (reasoning is said so many times): is its cost a straight line? TRL is not needed otherwise:
`pip install -r bench/requirements.txt`. Without it the ratio is null.

    python bench/rl_step.py                              # the batch of `python rl.py`: minutes on two CPU cores
    python bench/rl_step.py --config tiny                # seconds; its figures say nothing

The last line is one JSON object.
"""

import inspect
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from options import BadInput, option, parse
from common import ALONE, cli, seed_of
import torch
import rl
from chat import Sample, Trajectory, Turn
from facts import score
from harness import Harness, named, run
from infer import Engine
from model import load, pad_batch, token_logps
from oracle import Oracle
from parts import LOAD_SKILL, Tool
from sim import Task, World


@dataclass
class Config:
    config: str = option("small", "preset")
    model: str = option(str(ROOT / "data/base-small"), "Hugging Face directory of the policy")
    harness: str = option(str(ROOT / "data/harness"), "harness directory")
    world: str = option(str(ROOT / "data/world/zh.json"), "world file")
    groups: int = option(12, "tasks per step", min=1)
    group_size: int = option(8, "rollouts per task", min=2)
    micro: int = option(16, "sequences per forward and backward pass at most", min=1)
    steps: int = option(6, "steps of each side, the first of which is not timed", min=2)
    sizes: tuple[int, ...] = option((2, 4, 8, 12), "groups per step of the fit over rollouts, three or more", min=1)
    stretch: tuple[int, ...] = option((1, 2, 3, 4), "times that reasoning is said, of the fit over tokens", min=1)
    repeats: int = option(3, "steps at each point of the fits", min=1)
    threads: int = option(0, "threads of PyTorch; 0 = its default", min=0)
    seed: int = option(0, "of tasks and sampling")


PRESETS = {
    "tiny": dict(groups=2, group_size=2, micro=2, steps=2, sizes=(1, 2, 3), stretch=(1, 2, 3), repeats=1),
    "small": dict(),
}

# ---------------------------------------------------------------------------------------------------------------------
# what is said


@dataclass
class Round:
    """One step's work: rollout i of the batch is tasks[i], and its dialogue with the teacher dialogues[i]."""

    step: int
    options: rl.Config
    tasks: list[Task]
    dialogues: list[Trajectory]
    said: list[list[list[int]]] = field(init=False)  # the ids of each state of each dialogue

    def __post_init__(self):
        self.said = [[[t.ids[i] for i in where] for _, where in t.states()] for t in self.dialogues]

    @property
    def sampled(self) -> int:
        return sum(sum(t.mask) for t in self.dialogues)

    @property
    def prompts(self) -> int:
        return sum(t.mask.index(1) for t in self.dialogues)


def make_round(cfg: Config, harness, world, codec, step: int, groups: int, stretch: int = 1) -> Round:
    """The step's tasks, those of fewer groups among them, with a dialogue for each member of a group."""
    size = cfg.group_size
    options = dict(
        harness_mode="fixed", groups=groups, group_size=size, micro=cfg.micro, minibatches=1, warmup=0, seed=cfg.seed
    )
    options |= dict(
        think_free=0, think_full=1000, think_gate=0.0, faults=(0.0, 0.0, 0.0)
    )  # the teacher's rooms have no faults either
    options = rl.Config(**options)
    jobs = rl.training_jobs(options, world, harness, step, range(groups))
    dialogues = []
    for i, (_, task, room, seed) in enumerate(jobs):
        rng = random.Random(seed_of("teacher", seed))
        oracle = Oracle(harness, task, rng, verbosity=i % size % 3, careless=0.5)
        dialogues.append(dialogue(oracle, run(harness, task.danmaku, room, codec, seed), codec, stretch))
        dialogues[i].rewards = score(harness, task, dialogues[i])
    return Round(step, options, [task for _, task, *_ in jobs], dialogues)


def dialogue(oracle: Oracle, loop, codec, stretch: int) -> Trajectory:
    """The teacher in the real loop, its reasoning said `stretch` times."""
    turn = next(loop)
    while True:
        message = oracle.say(turn.messages)
        message.reasoning *= stretch
        ids = codec.render(message)
        try:
            turn = loop.send(Sample(ids, [0.0] * len(ids), "stop"))
        except StopIteration as end:
            return end.value


# ---------------------------------------------------------------------------------------------------------------------
# rl.py


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def spent(start: tuple[float, float]) -> dict[str, float]:
    return {name: b - a for name, a, b in zip(("seconds", "cpu_s"), start, now())}


class Ours:
    """Called with a round, does `rl.train_step` on it; its log, with `seconds` and `cpu_s` of it."""

    def __init__(self, cfg: Config, harness: Harness, world: World):
        self.harness, self.world, self.policy = harness, world, load(cfg.model)
        self.optimizer = torch.optim.AdamW(self.policy.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def __call__(self, work: Round) -> dict:
        engine = Hearing(self.policy, len(work.tasks), max(len(t.ids) for t in work.dialogues))
        engine.expect(work, self.policy.model)
        start = now()
        actors = rl.Actors(self.policy, self.optimizer)
        jobs = partial(rl.training_jobs, work.options, self.world, self.harness)
        log, _ = rl.train_step(work.step, engine, actors, jobs, work.options, ALONE)
        log |= spent(start)
        if engine.held != [t.ids for t in work.dialogues]:
            raise RuntimeError("rl.py holds other tokens than the teacher's dialogues")
        return log


class Hearing(Engine):
    """The engine, whose loops hear the teacher's words in place of those that it draws, as many of them."""

    def expect(self, work: Round, model):
        """Of the next run: what is said, and with which log-probs under the weights of now."""
        self.stop_ids, self.said = frozenset(), []
        for start in range(0, len(work.tasks), work.options.micro):
            part = slice(start, start + work.options.micro)
            ids, mask = pad_batch([t.ids for t in work.dialogues[part]], [t.mask for t in work.dialogues[part]])
            with torch.no_grad():
                logps = token_logps(model, ids, mask).tolist()
            for t, row in zip(work.dialogues[part], logps):
                self.said.append([([t.ids[i] for i in where], [row[i] for i in where]) for _, where in t.states()])

    def run(self, rollouts, seeds, greedy=False, progress=None):
        loops = [hears(loop, said) for loop, said in zip(rollouts, self.said, strict=True)]
        results = super().run(loops, seeds, greedy, progress)
        self.held = [t.ids for t in results]
        return results


def hears(loop, said):
    """`loop`, which asks for as many tokens as were said in each state, and then hears those, with their log-probs."""
    turn = next(loop)
    for ids, logps in said:
        yield Turn(turn.ids, turn.messages, len(ids))
        try:
            turn = loop.send(Sample(ids, logps, "stop"))
        except StopIteration as end:
            return end.value
    raise RuntimeError("the loop asks for more than the teacher said")


# ---------------------------------------------------------------------------------------------------------------------
# TRL


class Generate:
    """Stands for `model.generate`: draws as many tokens as are said in this turn, and returns those that are said.

    begin(round) before its first turn. Then `held` are the sequences of the batch, `seconds` those spent in here.
    """

    def __init__(self, model, pad: int):
        self.draw, self.pad = model.generate, pad

    def begin(self, work: Round):
        self.said, self.turn, self.held, self.seconds = work.said, 0, [[]] * len(work.said), 0.0

    def __call__(self, input_ids, attention_mask, **how):
        start = time.perf_counter()
        places = [i for i, said in enumerate(self.said) if len(said) > self.turn]
        if len(places) != len(input_ids):
            raise RuntimeError(f"turn {self.turn}: TRL continues {len(input_ids)} rollouts, the teacher {len(places)}")
        said = [torch.tensor(self.said[i][self.turn]) for i in places]
        limits, width = torch.tensor([len(ids) for ids in said]), input_ids.shape[1]
        full = [lambda ids, scores, **_: ids.shape[1] - width >= limits]  # (B,)
        self.draw(input_ids=input_ids, attention_mask=attention_mask, stopping_criteria=full, **how)
        for i, ids, mask, answer in zip(places, input_ids, attention_mask, said):
            self.held[i] = ids[mask.bool()].tolist() + answer.tolist()
        self.turn += 1
        answers = torch.nn.utils.rnn.pad_sequence(said, batch_first=True, padding_value=self.pad)
        self.seconds += time.perf_counter() - start
        return torch.cat([input_ids, answers], dim=1)


def environment(harness: Harness, tasks: list[Task]) -> type:
    """The class of a rollout's room as GRPOTrainer wants it: a method for each tool, with annotations and docstring."""

    class Room:
        def reset(self, task: int, **row):
            self.room = tasks[task].open()

    for tool in harness.tools:
        setattr(Room, tool.name, method(harness, tool))
    return Room


def method(harness: Harness, tool: Tool):
    def call(self, **arguments):
        arguments = {tool.param_ids.get(name, name): value for name, value in arguments.items()}
        if tool.id == LOAD_SKILL:
            return harness.skill_text(named(harness.skills, arguments["skill"]))
        return self.room.call(tool.id, arguments)

    kinds = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
    asked = {name: (kinds[p["type"]], p.get("description", name)) for name, p in tool.parameters["properties"].items()}
    make = partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [make(name, annotation=kind) for name, (kind, _) in asked.items()]
    call.__name__ = call.__qualname__ = tool.name
    call.__signature__ = inspect.Signature([make("self"), *parameters])
    call.__annotations__ = {name: kind for name, (kind, _) in asked.items()}
    lines = [
        tool.description,
        *(["", "Args:"] if asked else []),
        *(f"    {name}: {x}" for name, (_, x) in asked.items()),
    ]
    call.__doc__ = "\n".join(lines)
    return call


def side_by_side(cfg: Config, harness: Harness, rounds: list[Round], ours: Ours) -> tuple[list[dict], list[dict]]:
    """All rounds on both sides in turn: the log of each step of rl.py, and of TRL."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # environments are said to be experimental, at each start
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    policy, logs = load(cfg.model), ([], [])
    tokenizer, model = policy.tokenizer, policy.model
    tokenizer.response_template = qwen3_template  # how TRL reads reasoning and calls: the Hermes format, as ours
    tokenizer.chat_template = "{%- set tools = none %}" + tokenizer.chat_template  # the harness lists them, in short
    generate = model.generate = Generate(model, tokenizer.pad_token_id)

    class Turns(TrainerCallback):
        def begin(self, work: Round, state):
            generate.begin(work)
            self.work, self.seen, self.start = work, state.num_input_tokens_seen, now()

        def on_train_begin(self, args, state, control, **_):
            self.begin(rounds[0], state)

        def on_step_end(self, args, state, control, **_):
            log = spent(self.start) | {"tokens": state.num_input_tokens_seen - self.seen}
            log |= {"rollout_s": generate.seconds, "update_s": log["seconds"] - generate.seconds}
            log |= {"same": sum(a == t.ids for a, t in zip(generate.held, self.work.dialogues, strict=True))}
            logs[1].append(log)
            logs[0].append(ours(self.work))
            if state.global_step < len(rounds):
                self.begin(rounds[state.global_step], state)

    turns = Turns()

    def reward(completions, **_):
        """What rl.py's four rewards add up to."""
        return [sum(t.rewards.values()) for t in turns.work.dialogues]

    size, batch = cfg.group_size, cfg.groups * cfg.group_size
    tasks = [task for work in rounds for task in work.tasks[::size]]
    prompts = [next(run(harness, task.danmaku, task.open(), policy.codec)).messages for task in tasks]
    spoken = max(len(t.ids) - t.mask.index(1) for work in rounds for t in work.dialogues)
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            max_steps=len(rounds),
            per_device_train_batch_size=cfg.micro,
            gradient_accumulation_steps=batch // cfg.micro,
            num_generations=size,
            max_completion_length=spoken,
            generation_kwargs={"eos_token_id": None},
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            loss_type="grpo",
            importance_sampling_level="sequence",
            shuffle_dataset=False,
            learning_rate=rounds[0].options.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=rounds[0].options.grad_clip,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model,
            reward,
            options,
            train_dataset=Dataset.from_dict({"prompt": prompts, "task": list(range(len(tasks)))}),
            processing_class=tokenizer,
            callbacks=[turns],
            environment_factory=environment(harness, tasks),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return logs


# ---------------------------------------------------------------------------------------------------------------------
# the bench


def middle(logs: list[dict]) -> float:
    return statistics.median(log["seconds"] for log in logs[1:])


def tell(cfg: Config, rounds: list[Round], own: list[dict], other: list[dict], weights: int):
    """What both sides did: sizes, token counts of each, and what was not the same."""
    n, batch = len(rounds), cfg.groups * cfg.group_size
    prompts, sampled = (sum(getattr(work, name) for work in rounds) for name in ("prompts", "sampled"))
    states = sum(len(said) - 1 for work in rounds for said in work.said)
    print(f"{weights / 1e6:.1f} M weights, float32, {torch.get_num_threads()} threads")
    print(f"{cfg.groups} groups of {cfg.group_size} rollouts a step, micro-batches of {cfg.micro}, one optimizer step")
    each = [x / n / batch for x in (prompts, sampled, states)]
    print(f"a rollout: {each[0]:.0f} tokens of prompt, {each[1]:.0f} sampled, {each[2]:.1f} states that call tools")
    if other:
        same, counted = (sum(log[name] for log in other) for name in ("same", "tokens"))
        print(f"sequences that are equal token by token on both sides: {same} of {batch * n}")
        print(f"prompt and sampled tokens: rl.py {prompts + sampled}, TRL by its own count {counted}")
        print("not the same: rl.py runs hooks and scores; it is given the log-probs of what it hears off the clock")
    print(f"dropped by rl.py for want of an advantage: {sum(log['dropped'] for log in own)} of {batch * n}\n")


def fit(cfg: Config, works: list[Round], xs: list[int], ours: Ours, what: str) -> dict[str, float]:
    """The straight line through each round's median seconds over its x, and through its processor seconds."""
    runs, found = [[ours(work) for work in works] for _ in range(cfg.repeats)], {}  # the rounds take turns
    for key, name in (("seconds", ""), ("cpu_s", "cpu_")):
        ys = [statistics.median(log[key] for log in column) for column in zip(*runs)]
        b, a = statistics.linear_regression(xs, ys)
        r2 = statistics.correlation(xs, ys) ** 2
        points = ", ".join(f"{y:.2f} at {x}" for x, y in zip(xs, ys))
        print(f"{what:9} {name}seconds = {a:.3f} + {b:.3g} x, R^2 = {r2:.4f}: {points}")
        found |= {f"{name}a": round(a, 4), f"{name}b": float(f"{b:.4g}"), f"{name}r2": round(r2, 4)}
    return found


def main(argv):
    cfg = parse(Config, PRESETS, argv, __doc__)
    if cfg.groups * cfg.group_size % cfg.micro:
        raise BadInput(f"--groups x --group-size must be a multiple of --micro {cfg.micro}: TRL accumulates whole ones")
    if min(len(set(cfg.sizes)), len(set(cfg.stretch))) < 3:
        raise BadInput("--sizes and --stretch: a line through fewer than three points says nothing")
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    harness, world = Harness.load(cfg.harness), World.load(cfg.world, "train")
    ours = Ours(cfg, harness, world)
    make = partial(make_round, cfg, harness, world, ours.policy.codec)
    rounds = [make(step, cfg.groups) for step in range(1, cfg.steps + 1)]

    peer = bool(find_spec("trl") and find_spec("datasets"))
    own, other = side_by_side(cfg, harness, rounds, ours) if peer else ([ours(work) for work in rounds], [])
    tell(cfg, rounds, own, other, sum(p.numel() for p in ours.policy.model.parameters()))
    timed = {"rl.py": own[1:], "TRL GRPOTrainer": other[1:]}
    print(f"{'':24}{'s/step':>8}{'rollouts':>10}{'update':>8}{'CPU s':>8}   all steps")
    for name, logs in timed.items():
        if logs:
            columns = [[log[key] for log in logs] for key in ("seconds", "rollout_s", "update_s", "cpu_s")]
            s, r, u, c = map(statistics.median, columns)
            print(f"{name:24}{s:8.2f}{r:10.2f}{u:8.2f}{c:8.2f}   {', '.join(f'{x:.2f}' for x in columns[0])}")
    figures = {"ratio_vs_trl": None, "cpu_ratio": None, "seconds": middle(own), "trl_seconds": None}
    if peer:
        pairs = list(zip(*timed.values()))
        ratio, cpu = (statistics.median(b[key] / a[key] for a, b in pairs) for key in ("seconds", "cpu_s"))
        figures |= {"ratio_vs_trl": ratio, "cpu_ratio": cpu, "trl_seconds": middle(other)}
        print(f"{'ratio':24}{ratio:8.2f}{cpu:26.2f}\n")
    else:
        print("TRL is not installed (pip install -r bench/requirements.txt): no ratio\n")

    print("cost of a step of rl.py")
    sizes = [make(1, groups) for groups in cfg.sizes]
    by_rollouts = fit(cfg, sizes, [len(work.tasks) for work in sizes], ours, "rollouts")
    longer = [make(1, max(1, cfg.groups // 2), stretch) for stretch in cfg.stretch]
    by_tokens = fit(cfg, longer, [work.sampled for work in longer], ours, "tokens")
    figures = {name: x if x is None else round(x, 3) for name, x in figures.items()}
    print(json.dumps({"bench": "rl_step"} | figures | {"rollouts_fit": by_rollouts, "tokens_fit": by_tokens}))


if __name__ == "__main__":
    cli(main)
