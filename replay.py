"""Latency of an agent that serves live: whole requests of an evaluation set, some at once, with and without drafts.

    latency      seconds from a request's start to its final reply: prompts, samples, tools, hooks, retries
    first token  seconds to its first sampled token
    length       tokens that a forward pass with drafts yields, of drafts + 1 at most; rate = length / (drafts + 1)
    accepted     drafts that were right / drafts that were made: the other convention
    bound        tokens/s of all requests if reading weights at --bandwidth were all there is to do:

        rows x length x bandwidth / bytes,   bytes = W(rows x (drafts + 1)) + drafts x (W_head(rows) + W_lm)

W(n) is what a pass over n tokens reads: all weights but the embedding table and, of a layer's E experts of which a
token uses k, the share 1 - (1 - k / E)^n, as if they were chosen evenly. Without drafts length is 1 and bytes is
W(rows). Keys, values and recurrent states come on top, and so does every prompt; weights that fit into a cache are read
faster. A concurrency of c is c requests in flight: the next one starts when one of them ends, and its clock with it.
As in any serving, a prompt's beginning that another request had is not computed again.

    python infer.py replay --model runs/mtp-small/model --set T1 --limit 64
    python infer.py replay --model DIR --set runs/sets/T2-0123456789ab.jsonl --concurrency 1,8 --dtype bfloat16

--set is a set of the manifest, or a file of its rows: the JSON lines of data/make_sets.py, which eval.py runs. Prints a
table and leaves OUT/replay.json, with a line per request, and OUT/replay.png. A policy without an MTP head has rows
without drafts only. Expect both sides to say the same where `same` counts all requests: greedy, in float32. What comes
first is not measured: as many requests as are in flight, while memory is allocated and kernels are compiled. On a GPU
the engine's recording of CUDA graphs is in the figures: a few steps of each run.

Left out: tools that take time (those of the simulated room answer at once; add what yours take), arrivals that do not
wait for a free place, T4, which has no harness.
"""

import json
import time
from collections import Counter
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Literal

from options import BadInput, option, parse
from common import ALONE, code_version, dist, read_text, seed_of, write_json
from curves import canvas, save

import numpy as np
import torch

from chat import Trajectory
from data.make_sets import SETS, Case, Sets, stage
from eval import drive, grid, refuse_long
from harness import Harness, run
from infer import Engine
from model import Policy, load
from sim import World

LIMITS = (3.4, 8.1, 15.0)  # seconds: P50, P95 and the longest of the report's deployment
PERCENTILES = (50, 95, 99)


@dataclass
class Config:
    model: str = option(MISSING, "Hugging Face directory of the policy")
    set: str = option(MISSING, "a set of the manifest, such as T1, or a file of rows of its sets")
    manifest: str = option("data/sets/small.json", "of which harness and world the rows are (data/make_sets.py)")
    concurrency: tuple[int, ...] = option((1, 2, 4, 8), "requests in flight, one replay for each", min=1)
    limit: int = option(0, "the first requests of the set; 0 = all", min=0)
    drafts: int = option(3, "tokens that the MTP head guesses ahead", min=1)
    bandwidth: float = option(0.0, "GB/s at which the device reads memory; 0 = measured, by a copy", min=0)
    context: int = option(1536, "longest context in tokens", min=2)
    temperature: float = option(0.0, "of sampling; 0 = greedy", min=0)
    dtype: Literal["float32", "bfloat16"] = option("float32", "of weights and activations")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = a GPU if there is one")
    out: str = option("runs/replay", "directory of replay.json and replay.png")
    seed: int = option(0, "of sampling, where --temperature is not 0")


# ---------------------------------------------------------------------------------------------------------------------
# requests


def read_rows(path: str, original: Harness, world: World) -> list[Case]:
    """The requests of a file, staged; BadInput names the line that is none."""
    cases = []
    for n, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                cases.append(stage(json.loads(line), original, world))
            except BadInput as error:
                raise BadInput(f"{path}:{n}: {error}") from None
            except (ValueError, LookupError, TypeError):
                raise BadInput(f"{path}:{n}: not a row of T1, T2 or T3, as data/make_sets.py writes them") from None
    return cases


def requests(cfg: Config) -> list[Case]:
    sets = Sets.load(cfg.manifest)
    if cfg.set == "T4":
        raise BadInput("--set T4: has no harness to act in; T1, T2, T3-tool and T3-prompt have")
    if cfg.set in SETS:
        cases = [stage(row, sets.original, sets.world) for row in sets.rows(cfg.set)[: cfg.limit or None]]
    else:
        cases = read_rows(cfg.set, sets.original, sets.world)[: cfg.limit or None]
    if not cases:
        raise BadInput(f"{cfg.set}: no requests in it")
    return cases


def replay(engine: Engine, cases: list[Case], cfg: Config, what: str) -> list[Trajectory]:
    """Serve all requests, as many at once as the engine has slots. Engine.times and .stats tell how it went."""
    seeds = [seed_of(cfg.seed, case.row["id"]) for case in cases]
    loops = [run(c.harness, c.task.danmaku, c.open(), engine.policy.codec, s) for c, s in zip(cases, seeds)]
    return drive(engine, loops, seeds, what, ALONE, cfg.temperature == 0)


# ---------------------------------------------------------------------------------------------------------------------
# bounds


def bytes_read(module: torch.nn.Module, tokens: int, policy: Policy) -> float:
    """Bytes of weights that one pass of a module over so many tokens reads, if experts are chosen evenly."""
    config, table = policy.model.config.get_text_config(), policy.model.get_input_embeddings().weight
    total, tied = 0.0, table is policy.model.get_output_embeddings().weight
    for name, p in module.named_parameters():
        share = 0.0 if p is table and not tied else 1.0  # of a table that is no LM head a token reads one row
        if ".experts." in name and p.dim() == 3:  # (E, out, in)
            share = 1 - (1 - config.num_experts_per_tok / len(p)) ** tokens
        total += share * p.nbytes
    return total


def bound(policy: Policy, rows: int, drafts: int, length: float, bandwidth: float) -> dict[str, float]:
    """Bytes of weights per step and tokens/s of all rows, as in the header. bandwidth: bytes per second."""
    size = bytes_read(policy.model, rows * (drafts + 1), policy)
    if drafts:
        head = bytes_read(policy.mtp, rows, policy)
        size += drafts * (head + policy.model.get_output_embeddings().weight.nbytes)
    return {"bytes": size, "tokens_per_s": rows * length * bandwidth / size}


def measured_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy far larger than any cache reads and writes, the best of five."""
    source = torch.zeros(1 << (32 if device.type == "cuda" else 28), dtype=torch.uint8, device=device)
    target, seconds = torch.zeros_like(source), []
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        target.copy_(source)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * len(source) / min(seconds)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------------------------
# figures


def percentiles(values: np.ndarray) -> dict[str, float | None]:
    """p50, p95 and p99, between neighbours in proportion; of what is not NaN."""
    values = values[~np.isnan(values)]
    found = np.percentile(values, PERCENTILES).tolist() if len(values) else [None] * len(PERCENTILES)
    return {f"p{p}": value for p, value in zip(PERCENTILES, found)}


def figures(engine: Engine, trajectories: list[Trajectory], drafts: int, bandwidth: float) -> dict:
    """What one replay says."""
    stats, (start, first, end) = engine.stats, engine.times.T
    sampled = np.array([sum(t.mask) for t in trajectories])
    answered = sampled > 0  # else a hook denied it before the policy was asked
    decoding = (end - first)[answered].sum()
    out = {"concurrency": engine.slots, "drafts": drafts, "requests": len(sampled)}
    out |= {"latency_s": percentiles(end - start), "first_token_s": percentiles(first - start)}
    out["within"] = {str(limit): float((end - start <= limit).mean()) for limit in LIMITS}
    # a request's own speed: what follows its first token, over all that happens until its end
    out["decode_tokens_per_s"] = float((sampled[answered] - 1).sum() / decoding) if decoding > 0 else None
    out["tokens_per_s"] = stats["tokens_per_s"]
    out |= {name: stats.get(name) for name in ("accepted_length", "acceptance", "draft_acceptance")}
    out["accepted"] = stats["accepted"] if drafts else None
    out["bound"] = bound(engine.policy, engine.slots, drafts, stats.get("accepted_length", 1.0), bandwidth)
    out |= {name: stats[name] for name in ("sampled", "prefilled", "reused", "turns", "steps", "seconds")}
    return out | {"ends": dict(Counter(t.stop_reason for t in trajectories))}


def table(results: list[dict]) -> str:
    """A row for each replay."""

    def number(x, digits):
        return "-" if x is None else f"{x:.{digits}f}"

    head = ["at once", "drafts", *(f"P{p}" for p in PERCENTILES), *(f"first P{p}" for p in PERCENTILES)]
    head += [*(f"<= {limit} s" for limit in LIMITS), "tok/s each", "tok/s all", "bound", "length", "rate", "accepted"]
    rows = []
    for r in results:
        row = [str(r["concurrency"]), str(r["drafts"])]
        row += [number(r[name][f"p{p}"], 3) for name in ("latency_s", "first_token_s") for p in PERCENTILES]
        row += [f"{100 * share:.0f}%" for share in r["within"].values()]
        speeds = (r["decode_tokens_per_s"], r["tokens_per_s"], r["bound"]["tokens_per_s"])
        row += [number(x, 0) for x in speeds]
        rows.append(row + [number(r[name], 2) for name in ("accepted_length", "acceptance", "draft_acceptance")])
    return "\n".join(grid([head, *rows]))


def picture(results: list[dict], seconds: dict, path: Path) -> None:
    """Latencies of each replay as a curve, speed beside its bound, and how many drafts were right at once.

    seconds: (concurrency, drafts) -> latencies.
    """
    figure, [[left, middle, right]] = canvas(1, 3, (14, 4))
    levels = sorted({r["concurrency"] for r in results})
    colours = {level: f"C{i}" for i, level in enumerate(levels)}
    for (level, drafts), values in seconds.items():
        share = np.arange(1, len(values) + 1) / len(values)
        label = f"{level} at once, {f'{drafts} drafts' if drafts else 'none'}"
        left.step(np.sort(values), share, where="post", color=colours[level], ls="-" if drafts else ":", label=label)
    left.set(xlabel="latency in seconds", ylabel="share of the requests", xlim=(0, None), ylim=(0, 1.02))
    for drafts in sorted({r["drafts"] for r in results}):
        mine = [r for r in results if r["drafts"] == drafts]
        at, name = [r["concurrency"] for r in mine], f"{drafts} drafts" if drafts else "no drafts"
        middle.plot(at, [r["tokens_per_s"] for r in mine], "o-", color=f"C{bool(drafts):d}", label=name)
        bounds = [r["bound"]["tokens_per_s"] for r in mine]
        middle.plot(at, bounds, "--", color=f"C{bool(drafts):d}", label=f"{name}, bound")
    middle.set(xlabel="requests at once", ylabel="tokens/s", xscale="log", yscale="log", xticks=levels)
    middle.set_xticklabels([str(level) for level in levels])
    middle.minorticks_off()
    drafting = [r for r in results if r["accepted"] and sum(r["accepted"])]
    for i, r in enumerate(drafting):
        counts = np.array(r["accepted"])
        places = np.arange(len(counts)) + 0.8 * (i - (len(drafting) - 1) / 2) / len(drafting)
        right.bar(places, counts / counts.sum(), 0.8 / len(drafting), color=colours[r["concurrency"]])
        right.set_xticks(range(len(counts)))
    right.set(xlabel="drafts right at once, colours as on the left", ylabel="share of the verifications")
    for axes in (left, middle):
        axes.legend(fontsize="x-small", framealpha=0.5)
    save(figure, path)


# ---------------------------------------------------------------------------------------------------------------------
# the run


def main(argv: list[str]) -> None:
    cfg = parse(Config, {}, argv, __doc__)
    if not cfg.concurrency:
        raise BadInput("--concurrency: give some numbers of requests in flight")
    cases = requests(cfg)
    if max(cfg.concurrency) > len(cases):
        raise BadInput(f"--concurrency {max(cfg.concurrency)}: there are {len(cases)} requests to have in flight")
    ranks = dist(None if cfg.device == "auto" else cfg.device)
    if ranks.world > 1:
        raise BadInput("replay measures one process; start it without torchrun")
    policy = load(cfg.model, ranks.device, getattr(torch, cfg.dtype))
    sides = [0] if policy.mtp is None else [0, cfg.drafts]

    def engine(slots: int, drafts: int) -> Engine:
        return Engine(policy, slots, cfg.context, cfg.temperature or 1.0, drafts=drafts)

    opened = (next(run(c.harness, c.task.danmaku, c.open(), policy.codec), None) for c in cases)  # None: a hook denies
    prompts = [len(turn.ids) if turn else 0 for turn in opened]
    refuse_long(engine(1, 0), prompts, range(len(cases)), len(cases), cfg.set, ALONE)
    Path(cfg.out).mkdir(parents=True, exist_ok=True)  # now, and not when all has been measured
    bandwidth = cfg.bandwidth * 1e9 or measured_bandwidth(ranks.device)
    weights = sum(p.nbytes for p in policy.model.parameters())
    read, how = bytes_read(policy.model, 1, policy), "" if cfg.bandwidth else ", measured"
    print(f"{cfg.model}: {weights / 1e6:.1f} MB in {cfg.dtype}, of which a token reads {read / 1e6:.1f} MB;", end=" ")
    print(f"{ranks.device.type} at {bandwidth / 1e9:.1f} GB/s{how}")
    print(f"{len(cases)} requests of {cfg.set}, prompts of {min(prompts)} to {max(prompts)} tokens")
    if policy.mtp is None:
        print("rows with drafts are left out: the policy has no MTP head; mtp.py trains one for it")

    results, rows, seconds = [], {case.row["id"]: [] for case in cases}, {}
    for level in cfg.concurrency:
        said = []
        for drafts in sides:
            what = f"{level} at once, {drafts} drafts"
            replay(engine(level, drafts), cases[:level], cfg, f"{what}, warming up")
            trajectories = replay(serving := engine(level, drafts), cases, cfg, what)
            results.append(figures(serving, trajectories, drafts, bandwidth))
            said.append([t.ids for t in trajectories])
            seconds[level, drafts] = serving.times[:, 2] - serving.times[:, 0]
            for case, t, times in zip(cases, trajectories, serving.times):
                start, first, end = (None if np.isnan(x) else float(x) for x in times)
                row = {"concurrency": level, "drafts": drafts, "start": start, "first": first, "end": end}
                rows[case.row["id"]].append(row | {"tokens": sum(t.mask), "stop": t.stop_reason})
        results[-1]["same"] = sum(a == b for a, b in zip(*said)) if len(said) > 1 else None

    print("\n" + table(results))
    for r in results:
        if r["accepted"]:
            print(f"{r['concurrency']} at once: 0 to {cfg.drafts} drafts right {r['accepted']}", end="; ")
            print(f"{r['same']} of {len(cases)} requests the same as without drafts")
    out = Path(cfg.out)
    result = {"model": cfg.model, "config": asdict(cfg), "code_version": code_version(), "torch": torch.__version__}
    result |= {"device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"}
    result |= {"threads": torch.get_num_threads(), "bandwidth": bandwidth, "weight_bytes": weights}
    write_json(out / "replay.json", result | {"results": results, "requests": rows})
    picture(results, seconds, out / "replay.png")
    print(f"{out}: replay.json, replay.png")
