"""Rollouts per second: HAT's engine beside `model.generate` on the whole history, same model, requests and sampling.

The plain way is a loop over turns: all histories padded on the left to one length, `generate`, tools, again. It
computes every prompt of a group and every turn's history anew, copies its cache at each token, and waits for the
longest row. It is let off the log-probs that a trainer needs; the engine returns them.

Both sides draw every token from the model, but the agent loop hears the words of the teacher and draws as many of them.
So both do the same turns of the same lengths through the real harness and tools, whatever the weights are worth. The
sides take turns, `--repeats` times; the figures are medians, the ratio that of each pair.

    python bench/rollout.py                                     # about two minutes on two CPU cores
    python bench/rollout.py --model DIR --rollouts 128

Expect a ratio above 3. The last line is one JSON object.
"""

import json
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from options import option, parse
from common import cli, seed_of
from chat import Sample, Turn
from harness import Harness, run
from sim import World, make_task
from oracle import teach
import torch
from infer import Engine
from model import load


@dataclass
class Config:
    model: str = option(str(ROOT / "data/base-small"), "Hugging Face directory of the policy")
    harness: str = option(str(ROOT / "data/harness"), "harness directory")
    world: str = option(str(ROOT / "data/world/zh.json"), "world file")
    rollouts: int = option(64, "rollouts, all in one batch on both sides", min=1)
    group: int = option(8, "rollouts per task", min=1)
    temperature: float = option(1.0, "of sampling", min=0.01)
    context: int = option(1536, "longest context in tokens", min=2)
    dtype: Literal["float32", "bfloat16"] = option("float32", "of weights and activations")
    device: Literal["cpu", "cuda"] = option("cuda" if torch.cuda.is_available() else "cpu", "where both sides run")
    threads: int = option(0, "threads of PyTorch; 0 = its default", min=0)
    repeats: int = option(3, "times that each side runs", min=1)
    seed: int = option(0, "of the requests and of the sampling")


def main(argv):
    cfg = parse(Config, {}, argv, __doc__)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    policy = load(cfg.model, cfg.device, getattr(torch, cfg.dtype))
    harness, world = Harness.load(cfg.harness), World.load(cfg.world)
    tasks = [make_task(world, seed_of(cfg.seed, i // cfg.group)) for i in range(cfg.rollouts)]
    seeds = [seed_of(cfg.seed, "rollout", i) for i in range(cfg.rollouts)]
    scripts = [script(harness, task, policy.codec, seed) for task, seed in zip(tasks, seeds)]

    def loops():
        return [
            hears(run(harness, task.danmaku, task.open(), policy.codec, seed), said)
            for task, said, seed in zip(tasks, scripts, seeds)
        ]

    engine = Engine(policy, cfg.rollouts, cfg.context, cfg.temperature)
    engine.run(loops()[:4], seeds[:4])  # warm up: first calls allocate and compile
    plain(policy, loops()[:4], cfg)
    ours, theirs, loop_ms = [], [], []
    for _ in range(cfg.repeats):
        engine.run(loops(), seeds)
        ours.append(engine.stats["tokens_per_s"])
        loop_ms.append(engine.stats["loop_ms_per_turn"])
        theirs.append(plain(policy, loops(), cfg))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))

    stats = engine.stats
    weights = sum(p.numel() for p in policy.model.parameters()) / 1e6
    print(f"{weights:.1f} M weights, {cfg.dtype}, {cfg.device}, {torch.get_num_threads()} threads")
    print(
        f"{cfg.rollouts} rollouts in groups of {cfg.group}, {stats['turns']} turns, {stats['sampled']} tokens sampled;"
    )
    print(f"at the start of turns the engine computed {stats['prefilled']} tokens and reused {stats['reused']}\n")
    print(f"{'':24}{'tokens/s':>10}   all runs")
    for name, runs in (("engine", ours), ("generate, whole history", theirs)):
        print(f"{name:24}{statistics.median(runs):10.0f}   {', '.join(f'{x:.0f}' for x in runs)}")
    print(f"{'ratio':24}{ratio:10.2f}")
    print(f"{'agent loop, ms per turn':24}{statistics.median(loop_ms):10.2f}\n")
    figures = {"ratio": ratio, "loop_ms_per_turn": statistics.median(loop_ms)}
    figures |= {"tokens_per_s": statistics.median(ours), "generate_tokens_per_s": statistics.median(theirs)}
    print(json.dumps({"bench": "rollout"} | {name: round(x, 3) for name, x in figures.items()}))


def script(harness, task, codec, seed):
    """The ids of each state of the teacher's trajectory."""
    taught = teach(harness, task, codec, seed)
    return [[taught.ids[t] for t in where] for _, where in taught.states()]


def hears(loop, said):
    """`loop`, which asks for as many tokens as the teacher said in each state, and then hears the teacher's."""
    turn = next(loop)
    for ids in said:
        yield Turn(turn.ids, turn.messages, len(ids))
        try:
            turn = loop.send(Sample(ids, [0.0] * len(ids), "stop"))
        except StopIteration as end:
            return end.value


@torch.inference_mode()
def plain(policy, loops, cfg):
    """Sampled tokens per second of the plain way. Rows whose rollout is over leave the batch between turns."""
    model, codec = policy.model, policy.codec
    options = dict(do_sample=True, temperature=cfg.temperature, top_k=0, top_p=1.0, eos_token_id=codec.stop_ids)
    torch.manual_seed(cfg.seed)  # generate draws from the global generator
    start, sampled = time.perf_counter(), 0
    live = [(loop, next(loop), []) for loop in loops]
    while live:
        histories = [history + turn.ids for _, turn, history in live]
        limits = torch.tensor([turn.max_new_tokens for _, turn, _ in live], device=model.device)
        width = max(map(len, histories))
        ids = torch.tensor([[0] * (width - len(h)) + h for h in histories], device=model.device)
        mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories], device=model.device)
        out = model.generate(
            ids,
            attention_mask=mask,
            pad_token_id=codec.stop_ids[0],
            max_new_tokens=int(limits.max()),
            stopping_criteria=[lambda ids, scores, width=width, limits=limits: ids.shape[1] - width >= limits],
            **options,
        )
        before, live = live, []
        for (loop, turn, _), history, row in zip(before, histories, out[:, width:].tolist()):
            row = row[: turn.max_new_tokens]
            stops = [i for i, token in enumerate(row) if token in codec.stop_ids]
            row = row[: stops[0] + 1] if stops else row
            sampled += len(row)
            with suppress(StopIteration):
                live.append((loop, loop.send(Sample(row, [0.0] * len(row), "stop")), history + row))
    return sampled / (time.perf_counter() - start)


if __name__ == "__main__":
    cli(main)
