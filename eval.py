"""Evaluation: a policy on T1-T4 with honest intervals, and several policies side by side.

    T1, T2, T3   score = 100 x mean of accuracy and effectiveness (facts.py)          the report's AVG
    T4-P, T4-I   percent of prompts whose instructions are all followed, and of instructions; strict (ifeval.py)
    interval     2.5% .. 97.5% of the score when the items are drawn anew, with replacement, 2,000 times (bootstrap)
    A - B        the same draws for both: what makes an item hard for both of them cancels

data/make_sets.py says what the sets are. T2 asks the questions of T1, so T1 - T2 is a paired difference. Everything is
greedy, one rollout an item, and the same twice; an interval speaks of the choice of the items, not of other seeds of a
training. One that is wider than 10 points is marked: so few items tell nothing about smaller differences.

    python eval.py --model DIR                           # small: 2,500 items, some minutes on two CPU cores
    python eval.py --model DIR --sets T1,T2 --limit 100  # the first items only; comparable with others of that limit
    python eval.py --model DIR --t4 input_data.jsonl     # IFEval's official prompts and checkers as T4
    python eval.py compare RUN RUN ...                   # side by side; differences against the first
    python eval.py plot RUN                              # all curves of RUN/metrics.jsonl -> RUN/curves.png
    torchrun --nproc_per_node=2 eval.py --model DIR      # items are sharded over ranks

A run writes MODEL/eval.json: scores with intervals, all tables, options, commit of the harness, hash of each set, code
version, and a line per item. --trajectories FILE keeps the rollouts, for `python harness.py trace FILE`. A RUN of
`compare` is a model's directory, the run directory it stands in, or such a file.

Left out: judges (facts need none), more than one rollout per item, corrections for many comparisons.
"""

import json
import math
from collections.abc import Generator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from curves import plot
from options import BadInput, closest, option, parse
from common import ALONE, Dist, cli, code_version, dist
from common import read_json, seed_of, write_text

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from chat import REPLY, SEGMENTS, Codec, Sample, StopReason, Trajectory, Turn
from data.make_sets import SETS, Sets, hash_of, lines_of, stage
from facts import REWARDS, score
from harness import Harness, run
from ifeval import BILINGUAL, INSTRUCTIONS, Prompt, Verdict, read_prompts
from ifeval import summary as ifeval_summary
from infer import Engine
from model import load
from sim import World, met_fault

COLUMNS = {"T1": "T1", "T2": "T2", "T3-tool": "T3-tool", "T3-prompt": "T3-prompt", "T4-P": "T4", "T4-I": "T4"}
RESAMPLES = 2000
WIDE = 10.0  # points from end to end of an interval


@dataclass
class Config:
    config: str = option("small", "preset")
    model: str = option("data/base-small", "Hugging Face directory of the policy")
    manifest: str = option("data/sets/small.json", "which sets, and of which harness and world (data/make_sets.py)")
    sets: tuple[str, ...] = option(SETS, "those to run")
    limit: int = option(0, "the first items of each set; 0 = all", min=0)
    t4: str = option("", "official IFEval prompts instead of the T4 of the manifest")
    out: str = option("", "result; empty = MODEL/eval.json")
    trajectories: str = option("", "file for the rollouts; rank N > 0 adds -N to its name")
    seed: int = option(0, "of sampling, where --temperature is not 0")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = a GPU per process if there are any")
    temperature: float = option(0.0, "of sampling; 0 = greedy", min=0)
    context: int = option(1536, "longest context in tokens; the manifest tells the longest prompt", min=2)
    slots: int = option(96, "rollouts that the engine runs side by side", min=1)
    reply_tokens: int = option(160, "most tokens of an answer of T4; IFEval's own prompts want 1280", min=1)


PRESETS = {
    "tiny": dict(manifest="data/sets/tiny.json", reply_tokens=16),
    "small": dict(),
    "qwen3": dict(model="Qwen/Qwen3-1.7B", context=8192, slots=64, reply_tokens=1280),  # run on a toy alone
}

# ---------------------------------------------------------------------------------------------------------------------
# rollouts


def drive(engine: Engine, loops: list, seeds: list[int], what: str, ranks: Dist, greedy: bool) -> list:
    """All loops in one batch of the engine, under a progress bar named `what`."""
    with tqdm(desc=what, total=len(loops), leave=False, disable=ranks.rank > 0) as bar:
        return engine.run(loops, seeds, greedy, bar.update)


def collect(engine: Engine, jobs: list[tuple], what: str, ranks: Dist = ALONE, greedy=False) -> list[Trajectory]:
    """Roll out and score jobs (harness, task, room, seed)."""
    loops = [run(harness, task.danmaku, room, engine.policy.codec, seed) for harness, task, room, seed in jobs]
    results, trajectories = drive(engine, loops, [seed for *_, seed in jobs], what, ranks, greedy), []
    for (harness, task, _, seed), trajectory in zip(jobs, results, strict=True):
        # a loop that hung in a tool at its deadline has told nothing: an error, which score leaves unscored
        trajectory = trajectory or Trajectory(stop_reason="error", harness_commit=harness.commit, seed=seed)
        trajectory.rewards = score(harness, task, trajectory)
        trajectories.append(trajectory)
    return trajectories


def answer(messages: list[dict], codec: Codec, limit: int, seed: int = 0) -> Generator[Turn, Sample, Trajectory]:
    """The agent loop without a harness: one answer to a plain conversation, of at most `limit` tokens."""
    t, ids = Trajectory(seed=seed), codec.prompt(messages)
    t.append_env(ids)
    sample = yield Turn(ids, messages, limit)
    t.append_sample(sample, REPLY, codec.think_mask(sample.ids), state=0)
    said = codec.parse(sample.ids)
    t.reply, t.stop_reason = said.content, {"stop": "reply", "error": "error"}.get(sample.finish, "length")
    t.events = [
        {"event": "input", "danmaku": messages[-1]["content"]},
        {"event": "state", "state": 0, "reasoning": said.reasoning, "content": said.content, "calls": []},
        {"event": "reply", "text": t.reply, "stop_reason": t.stop_reason, "retries": 0},
    ]
    return t


def think_lengths(t: Trajectory, segment: int) -> list[int]:
    """Reasoning tokens of each state of a segment."""
    return [sum(t.think[i] for i in where) for s, where in t.states() if s == segment]


def measure(t: Trajectory, rewards: tuple[str, ...] = REWARDS) -> dict[str, float]:
    """What tables and logs need to know of one trajectory, in numbers, so that ranks can exchange it. NaN: no score."""
    got = {name: t.rewards.get(name) for name in rewards}
    row = {f"reward/{name}": math.nan if r is None else r for name, r in got.items()}
    row |= {f"stop/{reason}": t.stop_reason == reason for reason in get_args(StopReason)}
    row |= {"tokens": sum(t.mask), "fault": met_fault(t)}
    for name, segment in SEGMENTS.items():
        think = think_lengths(t, segment)
        row |= {f"states/{name}": len(think), f"think/{name}": sum(think)}
    return row


def gather(rows: list[dict], places: list[int], total: int, ranks: Dist) -> dict[str, Tensor]:
    """The rows of all ranks, each at its place in the global batch, as columns (total,) that every rank holds.

    Rows at one place add up. Each rank must have a row.
    """
    table = torch.zeros(total, len(rows[0]), dtype=torch.float64)
    table[places] = torch.tensor([list(row.values()) for row in rows], dtype=torch.float64)
    return dict(zip(rows[0], ranks.all_reduce_sum(table.to(ranks.device)).cpu().T, strict=True))


def summary(batch: dict[str, Tensor]) -> dict[str, float]:
    """Means over what was scored (NaN if nothing was), reasoning tokens per state, and how the rollouts ended."""
    out = {name: float(batch[f"reward/{name}"].nanmean()) for name in REWARDS}
    out = {"score": 50 * (out["accuracy"] + out["effectiveness"])} | out
    out |= {f"think/{s}": float(batch[f"think/{s}"].sum() / batch[f"states/{s}"].sum()) for s in SEGMENTS}
    out["fault_recovery"] = float(batch["reward/accuracy"][batch["fault"] > 0].nanmean())
    return out | {name: int(x.sum()) for name, x in batch.items() if name.startswith("stop/")}


def refuse_long(engine: Engine, prompts: list[int], mine: range, total: int, what: str, ranks: Dist) -> None:
    """BadInput, on every rank, if a prompt leaves no room to answer. prompts: the lengths of this rank's."""
    longest = int(gather([{"tokens": n} for n in prompts], list(mine), total, ranks)["tokens"].max())
    if longest >= engine.context:
        raise BadInput(f"--context {engine.context}: a prompt of {what} has {longest} tokens, and an answer needs room")


def evaluate(
    engine: Engine, rows: list[dict], original: Harness, world: World, ranks: Dist = ALONE, seed=0, greedy=True
) -> tuple[dict[str, Tensor], list[Trajectory]]:
    """Run rows of T1, T2 or T3: what `measure` says of them all, on every rank, and this rank's trajectories."""
    mine, what, codec = range(ranks.rank, len(rows), ranks.world), rows[0]["set"], engine.policy.codec
    cases = [stage(rows[i], original, world) for i in mine]
    opened = (next(run(c.harness, c.task.danmaku, c.open(), codec), None) for c in cases)  # None: a hook denies it
    refuse_long(engine, [len(turn.ids) if turn else 0 for turn in opened], mine, len(rows), what, ranks)
    jobs = [(c.harness, c.task, c.open(), seed_of(seed, c.row["id"])) for c in cases]
    trajectories = collect(engine, jobs, what, ranks, greedy)
    return gather([measure(t) for t in trajectories], list(mine), len(rows), ranks), trajectories


def follow(
    engine: Engine, rows: list[dict], checkers: dict, limit: int, ranks: Dist = ALONE, seed=0, greedy=True
) -> tuple[dict[str, Tensor], list[Trajectory]]:
    """The same for rows of T4. The rewards are strict/0, loose/0 ...: was instruction 0 of the prompt followed?"""
    mine, codec = range(ranks.rank, len(rows), ranks.world), engine.policy.codec
    prompts = [Prompt(r["key"], r["prompt"], r["instruction_id_list"], r["kwargs"]) for r in rows]
    asked = [[{"role": "user", "content": prompts[i].text}] for i in mine]
    refuse_long(engine, [len(codec.prompt(messages)) for messages in asked], mine, len(rows), "T4", ranks)
    seeds = [seed_of(seed, rows[i]["id"]) for i in mine]
    loops = [answer(messages, codec, limit, s) for messages, s in zip(asked, seeds)]
    trajectories = drive(engine, loops, seeds, "T4", ranks, greedy)
    for i, t in zip(mine, trajectories):
        verdict = prompts[i].check(t.reply, checkers)
        modes = {"strict": verdict.strict, "loose": verdict.loose}
        t.rewards = {f"{mode}/{k}": float(x) for mode, flags in modes.items() for k, x in enumerate(flags)}
        t.rewards = t.rewards if t.stop_reason != "error" else dict.fromkeys(t.rewards)
    names = tuple(f"{mode}/{k}" for k in range(max(len(p.ids) for p in prompts)) for mode in ("strict", "loose"))
    return gather([measure(t, names) for t in trajectories], list(mine), len(rows), ranks), trajectories


# ---------------------------------------------------------------------------------------------------------------------
# scores and intervals. An item is a dict: its rewards by name, none where it was not scored, stop, tokens, think/* ...


def items_of(batch: dict[str, Tensor]) -> list[dict]:
    """The columns of a set as one item for each row."""
    columns, items = {name: x.tolist() for name, x in batch.items()}, []
    for i in range(len(batch["tokens"])):
        row = {name: column[i] for name, column in columns.items()}
        item = {k.removeprefix("reward/"): x for k, x in row.items() if k.startswith("reward/") and not math.isnan(x)}
        item["stop"] = next(k.removeprefix("stop/") for k, x in row.items() if k.startswith("stop/") and x)
        items.append(item | {k: int(x) for k, x in row.items() if not k.startswith(("reward/", "stop/"))})
    return items


def flags_of(item: dict, mode: str = "strict") -> list[bool]:
    """Which instructions of a T4 item were followed, in order; [] if it was not scored."""
    return [bool(x) for name, x in item.items() if name.startswith(f"{mode}/")]


def points(items: list[dict], column: str) -> np.ndarray:
    """(n, 2): the points of each item in a column, and the most it could have got / 100; 0, 0 if it was not scored."""
    if COLUMNS[column] == "T4":
        flags = [flags_of(item) for item in items]
        pairs = [(100 * sum(f), len(f)) if column == "T4-I" else (100 * all(f), 1) if f else (0, 0) for f in flags]
    else:
        scored = [item if "accuracy" in item else None for item in items]
        pairs = [(50 * (item["accuracy"] + item["effectiveness"]), 1) if item else (0, 0) for item in scored]
    return np.array(pairs, dtype=float).reshape(-1, 2)


@lru_cache(maxsize=16)
def draws(n: int) -> np.ndarray:
    """(1 + RESAMPLES, n): how often each of n items is drawn; in row 0 each once."""
    rng = np.random.default_rng(seed_of("bootstrap", n))
    return np.vstack([np.ones((1, n)), rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)])


def interval(of: np.ndarray, minus: np.ndarray | None = None) -> dict | None:
    """Score of the points `of` (n, 2) with its 95% interval; or of its difference to `minus`, the same items in order.

    mean, low, high, items; None when no item was scored. Unscored items are left out, of a difference in both. Where
    all items are alike no draw differs; then the ends are those of the rule of three, 3/n of what else there may be.
    """
    sides = [of] if minus is None else [of, minus]
    kept = np.all([side[:, 1] > 0 for side in sides], axis=0)
    if not kept.any():
        return None
    sums = [draws(int(kept.sum())) @ side[kept] for side in sides]  # (1 + RESAMPLES, 2) each
    values = [each[:, 0] / each[:, 1] for each in sums]
    values = values[0] - values[1] if minus is not None else values[0]
    low, high = np.quantile(values[1:], [0.025, 0.975])
    if high - low < 1e-9:
        least, missed = 0.0 if minus is None else -100.0, 300 / kept.sum()
        low, high = max(least, low - missed), min(100.0, high + missed)
    numbers = {"mean": values[0], "low": low, "high": high}
    return {k: round(float(x), 4) for k, x in numbers.items()} | {"items": int(kept.sum())}


def details(name: str, rows: list[dict], items: list[dict], batch: dict[str, Tensor]) -> dict:
    """All tables of a set: means, how rollouts ended, scores per intent and per change; for T4 per instruction type."""
    if name == "T4":
        scored = [(row["instruction_id_list"], item) for row, item in zip(rows, items) if flags_of(item)]
        verdicts = [Verdict(ids, flags_of(item), flags_of(item, "loose")) for ids, item in scored]
        ends = {f"stop/{reason}": sum(i["stop"] == reason for i in items) for reason in get_args(StopReason)}
        return (ifeval_summary(verdicts) if verdicts else {}) | ends
    whole, intents, changes = points(items, name), {}, {}
    for intent in sorted({row["intent"] for row in rows}):
        intents[intent] = interval(whole[[row["intent"] == intent for row in rows]])
    for change in sorted({change for row in rows for change in row["changes"]}):
        has = np.array([change in row["changes"] for row in rows])
        changes[change] = {"with": interval(whole[has]), "without": interval(whole[~has])}
    means = {k: None if isinstance(x, float) and math.isnan(x) else x for k, x in summary(batch).items()}
    return means | {"intents": intents, "changes": changes}


# ---------------------------------------------------------------------------------------------------------------------
# tables


def shown(x: dict | None, sign: str = "", count: bool = False) -> str:
    """51.6 [48.1, 55.0], with a * when that is wide; a difference has its sign."""
    if x is None:
        return "-"
    wide = "*" if x["high"] - x["low"] > WIDE else ""
    count = f" of {x['items']}" if count else ""
    return f"{x['mean']:{sign}.1f} [{x['low']:{sign}.1f}, {x['high']:{sign}.1f}]{wide}{count}"


def grid(rows: list[list[str]]) -> list[str]:
    """Lines with the columns of the rows side by side."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def score_rows(results: dict[str, dict]) -> list[list[str]]:
    """Heading, and a row for each result."""
    columns = [c for c in COLUMNS if any(c in r["scores"] for r in results.values())]
    rows = [[name, *(shown(r["scores"].get(c)) for c in columns)] for name, r in results.items()]
    return [["", *columns], *rows]


def warning(text: str) -> list[str]:
    wide = f"* wide: more than {WIDE:.0f} points. So few items cannot tell smaller differences from chance."
    return [wide] if "]*" in text else []


def report(r: dict) -> str:
    """The row of scores and all tables of a result, as text."""
    lines = [*grid(score_rows({r["model"]: r})), "95% bootstrap intervals over the items, one rollout each"]
    if r["gap"]:
        lines.append(f"T1 - T2, the same questions: {shown(r['gap'], '+')}")
    agent = {name: d for name, d in r["details"].items() if name != "T4"}
    if agent:
        names = ["accuracy", "effectiveness", "tool", "skill", "fault_recovery", *(f"think/{s}" for s in SEGMENTS)]
        stops = [f"stop/{reason}" for reason in get_args(StopReason)]
        cells = [["-" if d[k] is None else f"{d[k]:.4g}" for k in (*names, *stops)] for d in agent.values()]
        lines += ["", *grid([["", *names, *stops], *([n, *row] for n, row in zip(agent, cells))])]
        intents = sorted({i for d in agent.values() for i in d["intents"]})
        table = [[i, *(shown(d["intents"].get(i), count=True) for d in agent.values())] for i in intents]
        lines += ["", *grid([["intent", *agent], *table])]
    for name, d in agent.items():
        if d["changes"]:
            table = [[c, *(shown(x[k], count=True) for k in ("with", "without"))] for c, x in d["changes"].items()]
            lines += ["", *grid([[f"changed in {name}", "with it", "without it"], *table])]
    if types := r["details"].get("T4", {}).get("types"):
        table = [[id, str(x["count"]), f"{x['strict']:.1f}", f"{x['loose']:.1f}"] for id, x in types.items()]
        lines += ["", *grid([["T4", "count", "strict", "loose"], *table])]
    if cut := r["details"].get("T4", {}).get("stop/length"):
        lines.append(f"{cut} of {r['sets']['T4']['items']} answers of T4 were cut: more --reply-tokens")
    unscored = {name: d["stop/error"] for name, d in r["details"].items() if d["stop/error"]}
    lines += [f"{n} items of {name} died and are in no score" for name, n in unscored.items()]
    return "\n".join(lines + warning("\n".join(lines)))


# ---------------------------------------------------------------------------------------------------------------------
# results


def save_result(path: Path, result: dict) -> None:
    """Indented JSON, but each item in one line."""
    lines = [f"  {json.dumps(id)}: {json.dumps(item)}" for id, item in result["items"].items()]
    head = json.dumps({k: v for k, v in result.items() if k != "items"}, ensure_ascii=False, indent=1, allow_nan=False)
    write_text(path, head.removesuffix("\n}") + ',\n "items": {\n' + ",\n".join(lines) + "\n }\n}\n")


def load_result(path: str) -> dict:
    """The result of a model's directory, of a run directory, or of a file; BadInput when there is none."""
    places = [Path(path), *(Path(path) / part for part in ("eval.json", "model/eval.json"))]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise BadInput(f"{path}: no eval.json there or in its model/; `python eval.py --model DIR` writes one")
    result = read_json(file)
    if not isinstance(result, dict) or not {"scores", "sets", "items", "config", "code_version"} <= result.keys():
        raise BadInput(f"{file}: not a result of eval.py")
    return result


def items_in(result: dict, column: str) -> list[dict]:
    """The items of a result that a column is about, in the order of their set."""
    return [item for id, item in result["items"].items() if id.startswith(COLUMNS[column] + "/")]


def compare(paths: list[str]) -> str:
    """Several results side by side, and the differences of each to the first. BadInput when sets differ."""
    results = {path: load_result(path) for path in paths}
    (base, first), *others = results.items()
    for path, r in others:
        for name in first["sets"].keys() & r["sets"].keys():
            here, there = r["sets"][name], first["sets"][name]
            if here != there:
                said = [f"{x['items']} items, {x['sha256'][:12]}" for x in (here, there)]
                raise BadInput(f"{path} and {base} have different sets {name} ({said[0]}; {said[1]}): no comparison")
        if not first["sets"].keys() & r["sets"].keys():
            raise BadInput(f"{path} and {base} have no set in common")
    head, *rows = score_rows(results)
    table = [head, *rows]
    if others:
        table.append([f"minus {base}", *([""] * (len(head) - 1))])
        for path, r in others:
            both = [c for c in head[1:] if c in r["scores"] and c in first["scores"]]
            pairs = {c: interval(*(points(items_in(x, c), c) for x in (r, first))) for c in both}
            table.append([path, *(shown(pairs.get(c), "+") for c in head[1:])])
    lines = [*grid(table), "95% bootstrap intervals over the items, one at a time; differences are paired by item"]
    for key in sorted({k for r in results.values() for k in r["config"]} - {"model", "out", "trajectories", "config"}):
        values = [r["config"].get(key) for r in results.values()]
        if any(value != values[0] for value in values):
            lines.append(f"they differ in {key}: {' | '.join(map(str, values))}")
    versions = {r["code_version"] for r in results.values()}
    lines += [f"they were run by different code: {', '.join(sorted(versions))}"] if len(versions) > 1 else []
    return "\n".join(lines + warning("\n".join(lines)))


# ---------------------------------------------------------------------------------------------------------------------
# the run


def rows_of(name: str, sets: Sets, cfg: Config, ranks: Dist) -> list[dict]:
    """The rows of a set that this run evaluates, over all ranks."""
    if name == "T4" and cfg.t4:
        rows = [
            {"id": f"T4/{p.key}", "key": p.key, "prompt": p.text, "instruction_id_list": p.ids, "kwargs": p.kwargs}
            for p in read_prompts(cfg.t4)
        ]
    else:
        rows = sets.rows(name)
    rows = rows[: cfg.limit or None]
    if len(rows) < ranks.world:
        raise BadInput(f"{name}: {len(rows)} items for {ranks.world} processes; each needs one")
    return rows


def evaluate_sets(cfg: Config, ranks: Dist) -> tuple[dict, list[Trajectory]]:
    """The result, and this rank's trajectories. All randomness is seeded by (seed, item): the same in any batch."""
    sets, greedy = Sets.load(cfg.manifest), cfg.temperature == 0
    names = [name for name in SETS if name in cfg.sets]
    rows = {name: rows_of(name, sets, cfg, ranks) for name in names}
    engine = Engine(load(cfg.model, ranks.device), cfg.slots, cfg.context, cfg.temperature or 1.0)
    result = {"model": cfg.model, "harness_commit": sets.original.commit, "seed": cfg.seed}
    result |= {"code_version": code_version(), "config": asdict(cfg), "sets": {}, "scores": {}, "gap": None}
    result |= {"details": {}, "items": {}}
    kept = []
    for name in names:
        if name == "T4":
            checkers = INSTRUCTIONS if cfg.t4 else BILINGUAL
            batch, trajectories = follow(engine, rows[name], checkers, cfg.reply_tokens, ranks, cfg.seed, greedy)
        else:
            batch, trajectories = evaluate(engine, rows[name], sets.original, sets.world, ranks, cfg.seed, greedy)
        items = items_of(batch)
        result["sets"][name] = {"items": len(items), "sha256": hash_of(lines_of(rows[name]))}
        result["scores"] |= {c: interval(points(items, c)) for c, about in COLUMNS.items() if about == name}
        result["details"][name] = details(name, rows[name], items, batch)
        result["items"] |= {row["id"]: item for row, item in zip(rows[name], items)}
        for row, t in zip(rows[name][ranks.rank :: ranks.world], trajectories):
            t.events.insert(0, {"event": "item", "id": row["id"]})
        kept += trajectories if cfg.trajectories else []
    if {"T1", "T2"} <= set(names):
        result["gap"] = interval(*(points(items_in(result, name), name) for name in ("T1", "T2")))
    return result, kept


def main(argv: list[str]) -> None:
    command, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    if command in ("plot", "compare") and {"-h", "--help"} & set(rest):
        print(__doc__)
        return
    if command == "plot" and len(rest) != 1 or command == "compare" and not rest:
        raise BadInput(f"{command} takes {'a run' if command == 'plot' else 'runs'}: python eval.py {command} RUN")
    if command in ("plot", "compare"):
        print(plot(rest[0], REWARDS) if command == "plot" else compare(rest))
        return
    if command:
        raise BadInput(f"eval.py takes options, or compare, or plot, but no '{command}'")
    cfg = parse(Config, PRESETS, argv, __doc__)
    for name in cfg.sets:
        if name not in SETS:
            raise BadInput(f"--sets: '{name}' is not one of {', '.join(SETS)}{closest(name, SETS)}")
    if not cfg.sets:
        raise BadInput(f"--sets: give some of {', '.join(SETS)}")
    ranks, out = dist(None if cfg.device == "auto" else cfg.device), Path(cfg.out or f"{cfg.model}/eval.json")
    if not cfg.out and not out.parent.is_dir():
        raise BadInput(f"{cfg.model}: no such directory to write eval.json into; --out FILE puts it elsewhere")
    for name, path in (("out", out), ("trajectories", Path(cfg.trajectories))):
        if getattr(cfg, name) and path.is_dir():
            raise BadInput(f"--{name} {path}: is a directory; give the file to write")
    result, trajectories = evaluate_sets(cfg, ranks)
    if ranks.rank == 0:
        save_result(out, result)
    if cfg.trajectories:
        path = Path(cfg.trajectories)
        path = path.with_name(f"{path.stem}-{ranks.rank}{path.suffix}") if ranks.rank else path
        write_text(path, "".join(json.dumps(t.to_dict(), ensure_ascii=False) + "\n" for t in trajectories))
    if ranks.rank == 0:
        print(report(result))
        print(f"{out}: harness {result['harness_commit']}, code {result['code_version']}")
    ranks.barrier()  # nobody leaves while another still writes


if __name__ == "__main__":
    cli(main)
