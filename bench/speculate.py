"""Tokens per second with drafts: the speculating engine beside the same engine without, and beside `model.generate`.

Each request is the first turn of an agent loop, its whole prompt and a greedy answer of at most --new tokens. As many
are served at once as the concurrency says; all three sides answer the same requests on the same weights, taking turns,
--repeats times. Speculation pays where a forward pass costs the same for four tokens as for one: few rows on a GPU, or
a model so small that calls cost more than sums. The figures are medians, a ratio that of each pair. On a GPU the engine
replays CUDA graphs, and what recording them costs is in its figures; a fourth side does without, and without drafts.

    python bench/speculate.py                                   # about two minutes on two CPU cores
    python bench/speculate.py --model runs/mtp-small/model --drafts 2

The model needs an MTP head of its own (`python mtp.py` trains one). Expect a ratio of about 1.25 at concurrency 1 where
the head is good (three of four drafts right), below 1 where it is not, and the same tokens whatever it is worth. The
last line is one JSON object, of concurrency 1 alone; `identical` is of all.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from options import BadInput, option, parse
from common import cli, seed_of
from chat import Turn
from harness import Harness, run
from sim import World, make_task
import torch
from infer import Engine
from model import load
from replay import bound, measured_bandwidth


@dataclass
class Config:
    model: str = option(str(ROOT / "data/base-small"), "Hugging Face directory of the policy, with MTP tensors")
    harness: str = option(str(ROOT / "data/harness"), "harness directory")
    world: str = option(str(ROOT / "data/world/zh.json"), "world file")
    most: int = option(8, "largest concurrency; measured are 1, 2, 4 .. up to it", min=1)
    requests: int = option(16, "requests at each concurrency", min=1)
    new: int = option(128, "tokens of an answer at most", min=3)
    drafts: int = option(3, "tokens that the head guesses ahead", min=1)
    context: int = option(1536, "longest context in tokens", min=2)
    dtype: Literal["float32", "bfloat16"] = option("float32", "of weights and activations")
    device: Literal["cpu", "cuda"] = option("cuda" if torch.cuda.is_available() else "cpu", "where all sides run")
    threads: int = option(0, "threads of PyTorch; 0 = its default", min=0)
    repeats: int = option(3, "times that each side runs", min=1)
    seed: int = option(0, "of the requests")


def main(argv):
    cfg = parse(Config, {}, argv, __doc__)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    policy = load(cfg.model, cfg.device, getattr(torch, cfg.dtype))
    if getattr(policy, "mtp", None) is None:
        raise BadInput(f"{cfg.model}: has no MTP head to draft with; mtp.py makes one from a model and its rollouts")
    prompts = requests(policy.codec, cfg)
    levels = [1 << i for i in range(cfg.most.bit_length())]
    first, ratios, all_same, gain = {}, {}, True, {}
    weights = sum(p.numel() for p in policy.model.parameters()) / 1e6
    print(f"{weights:.1f} M weights, {cfg.dtype}, {cfg.device}, {torch.get_num_threads()} threads, {cfg.drafts} drafts")
    print(f"{cfg.requests} requests, prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens\n")
    speed = measured_bandwidth(policy.model.device)
    print(f"bound: tokens/s if reading weights at {speed / 1e9:.1f} GB/s were all there is to do (replay.py)\n")
    print(f"{'':12}{'tokens/s':>30}{'ratio to':>20}{'bound':>20}{'accepted':>18}")
    names = ("drafts", "plain", "generate", "plain", "generate", "drafts", "plain", "length", "rate", "same")
    print("concurrency " + "".join(f"{name:>10}" for name in names))
    for level in levels:
        sides = [Engine(policy, level, cfg.context, drafts=k) for k in (cfg.drafts, 0)]
        launched = Engine(policy, level, cfg.context)
        launched.recorder = lambda: None  # where the others replay CUDA graphs
        speeds, gains, same = [[], [], []], [], True
        for repeat in range(cfg.repeats + 1):
            mine = prompts if repeat else prompts[:level]  # to warm up: first calls allocate and compile
            (a, ours), (b, plain) = (serve(side, mine, cfg.new) for side in sides)
            theirs = generate(policy, mine, level, cfg)
            c, as_launched = serve(launched, mine, cfg.new) if cfg.device == "cuda" else (b, plain)
            same &= a == b == c
            if repeat:
                gains.append(plain / as_launched)
                for side, runs in zip((ours, plain, theirs), speeds):
                    runs.append(side)
        stats, gain[level], all_same = sides[0].stats, statistics.median(gains), all_same and same
        ratios = [statistics.median(x / y for x, y in zip(speeds[0], other)) for other in speeds[1:]]
        first = first or dict(zip(("ratio_vs_plain", "ratio_vs_generate"), ratios)) | {
            "accepted_length": stats["accepted_length"]
        }
        figures = "".join(f"{statistics.median(runs):10.0f}" for runs in speeds) + "".join(f"{x:10.2f}" for x in ratios)
        read = [
            bound(policy, level, k, e.stats.get("accepted_length", 1.0), speed) for k, e in zip((cfg.drafts, 0), sides)
        ]
        accepted = f"{stats['accepted_length']:10.2f}{stats['draft_acceptance']:10.2f}"
        figures += "".join(f"{each['tokens_per_s']:10.0f}" for each in read)
        print(f"{level:<12}{figures}{accepted}{'yes' if same else 'NO':>11}")
    print(f"\ndrafts accepted at once, 0 to {cfg.drafts}: {stats['accepted']}")
    if cfg.device == "cuda":
        print("plain, beside the same without CUDA graphs:", ", ".join(f"{n}: {x:.2f} x" for n, x in gain.items()))
    print(json.dumps({"bench": "speculate"} | {k: round(x, 3) for k, x in first.items()} | {"identical": all_same}))


def requests(codec, cfg):
    """The prompts of the first turns of agent loops."""
    harness, world = Harness.load(cfg.harness), World.load(cfg.world)
    prompts = []
    for i in range(cfg.requests):
        task = make_task(world, seed_of(cfg.seed, i))
        prompts.append(next(run(harness, task.danmaku, task.open(), codec, i)).ids)
    if max(map(len, prompts)) + cfg.new > cfg.context:
        raise BadInput(
            f"--context {cfg.context} is too short for prompts of {max(map(len, prompts))} and --new {cfg.new}"
        )

    return prompts


def ask(prompt, new):
    """A loop of one turn; returns what was sampled."""
    got = yield Turn(prompt, [], new)
    return got.ids


def serve(engine, prompts, new):
    """-> the answers, and sampled tokens per second."""
    answers = engine.run([ask(p, new) for p in prompts], list(range(len(prompts))), greedy=True)
    return answers, engine.stats["tokens_per_s"]


@torch.inference_mode()
def generate(policy, prompts, level, cfg):
    """Sampled tokens per second of `generate` with its cache, `level` requests in a batch, padded on the left."""
    model, stop = policy.model, policy.codec.stop_ids
    start, sampled = time.perf_counter(), 0
    for i in range(0, len(prompts), level):
        batch = prompts[i : i + level]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=model.device)
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=cfg.new, eos_token_id=stop, pad_token_id=stop[0]
        )
        for row in out[:, width:].tolist():
            ends = [i for i, token in enumerate(row) if token in stop]
            sampled += ends[0] + 1 if ends else len(row)
    return sampled / (time.perf_counter() - start)


if __name__ == "__main__":
    cli(main)
