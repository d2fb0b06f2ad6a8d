"""HAT, the whole method: HSA-SFT -> General OPD -> HSA-RL -> evaluation, and the ablation of what each is worth.

    base -> hsa-sft -> hsa-opd -> hat            SFT under many harnesses, distillation from the base, RL under many
    base -> fixed-sft -> fixed-opd               the control: SFT under one harness, repaired by OPD
            hsa-opd -> fixed-rl                  RL under one harness
    base -> hsa-sft-no-tool ...                  SFT under harnesses in which one dimension stays as it is

Each name is a run directory below OUT/seed-N, made by the stage's own main: what `python sft.py`, `opd.py`, `rl.py` and
`eval.py` would do one after the other. Rows of the table share what they have in common. A finished stage (its model is
there) is never repeated, an interrupted one goes on from its last checkpoint: `--resume` after Ctrl-C, a crash, or to
add seeds, `--ablate` or `--leave-out` to what is there.

    python hat.py --config small                             # HAT and the base side by side
    python hat.py --config small --ablate --seeds 0,1,2      # every row of the ablation
    python hat.py --ablate --leave-out tool,hook             # and HSA-SFT without one dimension each: a second table
    python hat.py --sft="--lr 5e-4 --epochs 3" --rl="--steps 40"     # options of a stage, as it takes them itself
    python hat.py --out runs/hat-small --resume --ablate     # all rows, on top of what is there
    torchrun --nproc_per_node=4 hat.py                       # every stage in as many processes

A cell is the mean over the seeds, with their standard deviation from two seeds on; think/* = reasoning tokens per state
on T1. `python eval.py compare OUT/seed-0/hat OUT/seed-0/fixed-rl` has the intervals over the items. The run ends with
the tables, the report's effects that can be read off them (which appeared, which did not) and the time of each stage,
and leaves all of it in OUT/table.md.

Expect under small, a seed in 24 minutes on one thread: T1 88 -> 92, T2 50 -> 72, T4 as the base (README).
Left out: another order of the stages, a search for their options.
"""

import math
import shlex
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from options import BadInput, closest, option, parse
from common import ALONE, Dist, Run, cli, digest, dist, model_digest, peak_mb
from common import read_json, same_settings, write_json, write_text

import eval as evaluation
import opd
import rl
import sft
from augment import DIMENSIONS
from data.make_sets import Sets
from harness import Harness
from sim import World

STAGES = {"sft": sft, "opd": opd, "rl": rl, "eval": evaluation}
OURS = {"--config", "--model", "--out", "--resume", "--seed", "--device"}  # of each stage, set here
OURS |= {"--harness", "--world", "--harness-mode", "--leave-out", "--teacher"}

# ---------------------------------------------------------------------------------------------------------------------
# options


@dataclass
class Config:
    config: str = option("small", "preset, of every stage too")
    model: str = option("data/base-small", "Hugging Face directory of the base")
    harness: str = option("data/harness", 'harness directory; another one needs --eval="--manifest FILE"')
    world: str = option("data/world/zh.json", "world file")
    out: str = option("", "run directory; empty = the next free runs/hat-PRESET")
    resume: bool = option(False, "go on in --out: finished stages are not repeated")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = a GPU per process if there are any")
    seeds: tuple[int, ...] = option((0,), "all is done once for each")
    ablate: bool = option(False, "every row of the ablation")
    leave_out: tuple[str, ...] = option((), f"dimensions, each left out of an HSA-SFT: {', '.join(DIMENSIONS)}")
    sft: str = option("", "more options of sft.py, in one text")
    opd: str = option("", "more options of opd.py")
    rl: str = option("", "more options of rl.py")
    eval: str = option("", "more options of eval.py")


PRESETS = {"tiny": {}, "small": {}, "qwen3": dict(model="Qwen/Qwen3-1.7B")}

# ---------------------------------------------------------------------------------------------------------------------
# the plan


@dataclass(frozen=True)
class Step:
    """A stage, the step whose model it starts from, and the options that make it this one."""

    stage: str
    after: str
    options: tuple[str, ...] = ()


BASE = "base"
HSA, FIXED = ("--harness-mode", "hsa"), ("--harness-mode", "fixed")
# preset -> options of RL after SFT: at the rate and the ramp that suit the small base it loses what SFT taught (LOG.md)
GENTLY = dict.fromkeys(("tiny", "small"), ("--lr", "1e-4", "--think-free", "32", "--think-full", "84"))
ROWS = {  # of the ablation table: label -> step
    "Base": BASE,
    "Fixed-SFT": "fixed-sft",
    "Fixed-SFT+OPD": "fixed-opd",
    "HSA-SFT": "hsa-sft",
    "HSA-SFT+OPD": "hsa-opd",
    "+Fixed-RL": "fixed-rl",
    "+HSA-RL (HAT)": "hat",
}
HAT = "+HSA-RL (HAT)"


def plan(cfg: Config) -> dict[str, Step]:
    """Steps of one seed by name, in an order in which each comes after what it starts from."""
    gently = GENTLY.get(cfg.config, ())
    steps = {
        "hsa-sft": Step("sft", BASE, HSA),
        "hsa-opd": Step("opd", "hsa-sft"),
        "hat": Step("rl", "hsa-opd", (*HSA, *gently)),
    }
    if cfg.ablate:
        steps |= {"fixed-sft": Step("sft", BASE, FIXED), "fixed-opd": Step("opd", "fixed-sft")}
        steps |= {"fixed-rl": Step("rl", "hsa-opd", (*FIXED, *gently))}
    for dimension in cfg.leave_out:  # of SFT, which teaches reading a harness; what RL adds is within its spread
        steps[without(dimension)] = Step("sft", BASE, (*HSA, "--leave-out", dimension))
    return steps


def without(dimension: str) -> str:
    return f"hsa-sft-no-{dimension}"


def tables(cfg: Config) -> dict[str, dict[str, str]]:
    """Heading -> the rows under it: label -> step. What a plan evaluates is what stands in a table."""
    shown = ROWS if cfg.ablate else {label: ROWS[label] for label in ("Base", HAT)}
    out = {"Ablation" if cfg.ablate else "HAT": shown}
    if cfg.leave_out:
        rest = {f"without {dimension}": without(dimension) for dimension in cfg.leave_out}
        out["One dimension of HSA left out of SFT"] = {"HSA-SFT": "hsa-sft"} | rest
    return out


def words(cfg: Config, seed: int, name: str, step: Step, place: Path) -> list[str]:
    """Command line of a step; `place` holds the run directories of this seed."""
    model = cfg.model if step.after == BASE else str(place / step.after / "model")
    out = ["--config", cfg.config, "--device", cfg.device, "--seed", str(seed)]
    out += ["--model", model, "--out", str(place / name), *step.options]
    out += ["--teacher", cfg.model] if step.stage == "opd" else ["--harness", cfg.harness, "--world", cfg.world]
    return out + shlex.split(getattr(cfg, step.stage))


def eval_words(cfg: Config, model: str, out: Path) -> list[str]:
    return ["--config", cfg.config, "--device", cfg.device, "--model", model, "--out", str(out), *shlex.split(cfg.eval)]


def refuse(cfg: Config, world: int = 1) -> None:
    """BadInput for options that a stage would refuse, an hour from now; world: the processes that it would run in.

    What a stage asks of the model that it starts from shows when it starts.
    """
    for dimension in cfg.leave_out:
        if dimension not in DIMENSIONS:
            raise BadInput(
                f"--leave-out: '{dimension}' is none of {', '.join(DIMENSIONS)}{closest(dimension, DIMENSIONS)}"
            )
    if not cfg.seeds or len({*cfg.seeds}) < len(cfg.seeds) or len({*cfg.leave_out}) < len(cfg.leave_out):
        raise BadInput("--seeds and --leave-out: at least one seed, and each once")
    for stage in STAGES:
        try:
            given = shlex.split(getattr(cfg, stage))
        except ValueError as error:
            raise BadInput(f"--{stage}: {getattr(cfg, stage)!r}: {error}") from None
        own = OURS - {"--seed"} if stage == "eval" else OURS
        if ours := own & {word.partition("=")[0].replace("_", "-") for word in given}:
            raise BadInput(f"--{stage}: {', '.join(sorted(ours))} of a stage is set by hat.py")
    lines = [("eval", eval_words(cfg, cfg.model, Path("x")))]
    lines += [(step.stage, words(cfg, 0, name, step, Path("x"))) for name, step in plan(cfg).items()]
    for stage, line in lines:
        try:
            parsed = parse(STAGES[stage].Config, STAGES[stage].PRESETS, line)
            if stage != "eval":
                STAGES[stage].check(parsed, world)
        except BadInput as error:
            raise BadInput(f"{stage}.py: {error}") from None
    sets = Sets.load(parse(evaluation.Config, evaluation.PRESETS, lines[0][1]).manifest)
    same = sets.original.commit == Harness.load(cfg.harness).commit
    if not (same and sets.world.data == World.load(cfg.world, sets.world.split).data):
        raise BadInput(f'{sets.path}: not of {cfg.harness} and {cfg.world}; --eval="--manifest FILE" names another one')


def ingredients(cfg: Config | rl.Config) -> dict[str, str]:
    """What all rows of a table must share, by content: the base, the harness and the world."""
    return {
        "harness": Harness.load(cfg.harness).commit,
        "model": model_digest(cfg.model),
        "world": digest(cfg.world),
    }


def same_ingredients(place: Path, now: dict[str, str], ranks: Dist = ALONE) -> None:
    """Note them in the directory of a table; BadInput, on every rank, if the rows that are there are of other ones."""
    noted = place / "ingredients.json"
    if noted.exists() and (old := read_json(noted)) != now:
        changed = ", ".join(k for k in now if now[k] != old.get(k))
        raise BadInput(f"{place}: its rows are of another {changed}; start another --out")
    ranks.barrier()  # all have looked before one writes
    if ranks.rank == 0:
        write_json(noted, now)


# ---------------------------------------------------------------------------------------------------------------------
# running it


@contextmanager
def timed(path: Path, name: str, ranks: Dist) -> Iterator[None]:
    """Add the seconds of the block to `name` in a JSON file, however the block ends."""
    start = time.perf_counter()
    try:
        yield
    finally:
        if ranks.rank == 0:
            times = read_json(path) if path.exists() else {}
            times[name] = round(times.get(name, 0.0) + time.perf_counter() - start, 1)
            write_json(path, times)


def left(stage: str, line: list[str]) -> list[str]:
    """The command line that is left to run: none where that run is finished, with --resume where it was interrupted.

    BadInput where it was begun with other options. Which model beside it was its start, its name says.
    """
    Stage = STAGES[stage].Config
    made = parse(Stage, STAGES[stage].PRESETS, line)
    begun = (Path(made.out) / "config.json").exists()
    if begun:
        beside = ("model",) if Path(made.out).parent in Path(made.model).parents else ()
        same_settings(Path(made.out), made, beside)
    return [] if (Path(made.out) / "model").is_dir() else [*line, *(["--resume"] if begun else [])]


def perform(cfg: Config, record: Run, ranks: Dist) -> None:
    """Run every stage and evaluation of the plan that is not there yet, seed after seed."""
    clock, evaluated = record.dir / "times.json", {step for rows in tables(cfg).values() for step in rows.values()}
    same_ingredients(record.dir, ranks.share(ingredients(cfg) if ranks.rank == 0 else None), ranks)

    def rate(model: str, out: Path, name: str) -> None:
        if not out.exists():
            record.say(f"== {name}, evaluation")
            with timed(clock, f"{name}, evaluation", ranks):
                evaluation.main(eval_words(cfg, model, out))

    rate(cfg.model, record.dir / BASE / "eval.json", BASE)
    for seed in cfg.seeds:
        place = record.dir / f"seed-{seed}"
        for name, step in plan(cfg).items():
            line = left(step.stage, words(cfg, seed, name, step, place))
            ranks.barrier()  # all have looked before one begins to write
            if line:
                record.say(f"== seed {seed}, {name}: {step.stage}.py {shlex.join(line)}")
                with timed(clock, f"seed {seed}, {name}", ranks):
                    STAGES[step.stage].main(line)
                ranks.barrier()
            if name in evaluated:
                rate(str(place / name / "model"), place / name / "model" / "eval.json", f"seed {seed}, {name}")
                ranks.barrier()


# ---------------------------------------------------------------------------------------------------------------------
# tables

Means = dict[str, list[float]]  # column -> a value for each seed


def numbers(result: dict) -> dict[str, float]:
    """The cells of one result of eval.py; columns that it has not are absent."""
    cells = {column: x["mean"] for column, x in result["scores"].items() if x}
    if result.get("gap"):
        cells["T1 - T2"] = result["gap"]["mean"]
    thought = result["details"].get("T1", {})
    return cells | {
        f"think/{s}": thought[f"think/{s}"] for s in ("tool", "reply") if thought.get(f"think/{s}") is not None
    }


COLUMNS = ("T1", "T2", "T1 - T2", "T3-tool", "T3-prompt", "T4-P", "T4-I", "think/tool", "think/reply")


def gather(cfg: Config, root: Path, rows: dict[str, str]) -> dict[str, Means]:
    """Label -> column -> the values of all seeds, from the eval.json files. The base is the same for every seed."""
    found, sets = {}, None
    for label, step in rows.items():
        places = [root / BASE] if step == BASE else [root / f"seed-{seed}" / step for seed in cfg.seeds]
        results = [evaluation.load_result(str(place)) for place in places]
        sets = sets or results[0]["sets"]
        if other := [place for place, result in zip(places, results) if result["sets"] != sets]:
            raise BadInput(f"{other[0]}: evaluated on other sets than the rows before; remove its eval.json")
        each = [numbers(result) for result in results]
        found[label] = {c: [cells[c] for cells in each] for c in COLUMNS if all(c in cells for cells in each)}
    return found


def cell(values: list[float] | None) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def table(found: dict[str, Means]) -> list[list[str]]:
    """Heading and a row for each label, of the columns that any has."""
    columns = [c for c in COLUMNS if any(c in means for means in found.values())]
    return [["", *columns], *([label, *(cell(means.get(c)) for c in columns)] for label, means in found.items())]


def markdown(rows: list[list[str]]) -> list[str]:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def effects(found: dict[str, Means]) -> list[str]:
    """The report's effects, each with what was measured: a line for each whose rows and columns are there.

    The mean over the seeds decides. "close" where it is within their standard deviation of the threshold.
    The thresholds are ours; README.md has the figures of the report beside them.
    """
    t4 = ("T4-P", "T4-I")
    base, fixed, hsa, opd, hat = "Base", "Fixed-SFT", "HSA-SFT", "HSA-SFT+OPD", HAT

    def given_back(of):
        lost = of(base, *t4) - of(fixed, *t4)
        return (of("Fixed-SFT+OPD", *t4) - of(fixed, *t4)) / lost if lost > 0 else math.nan

    def shorter(of, state):
        return 1 - of(hat, state) / of(opd, state) if of(opd, state) else math.nan

    claims = [  # what, the least value, in points unless said, the value of one seed
        ("Fixed-SFT loses from T1 to T2", 3.0, lambda of: of(fixed, "T1") - of(fixed, "T2")),
        ("HSA-SFT loses less than that, by", 3.0, lambda of: of(fixed, "T1 - T2") - of(hsa, "T1 - T2")),
        ("HAT loses at most one: T2 less T1", -1.0, lambda of: of(hat, "T2") - of(hat, "T1")),
        (
            "Fixed-SFT has less T3-prompt than HSA-SFT, by",
            3.0,
            lambda of: of(hsa, "T3-prompt") - of(fixed, "T3-prompt"),
        ),
        ("Fixed-SFT loses T3-prompt, against the base", 3.0, lambda of: of(base, "T3-prompt") - of(fixed, "T3-prompt")),
        ("Fixed-SFT loses T4, against the base", 5.0, lambda of: of(base, *t4) - of(fixed, *t4)),
        ("OPD gives it back, of that loss", 0.5, given_back),
        ("HAT loses none: T4 less that of the base", 0.0, lambda of: of(hat, *t4) - of(base, *t4)),
        ("RL under one harness loses T3-prompt", 0.1, lambda of: of(opd, "T3-prompt") - of("+Fixed-RL", "T3-prompt")),
        ("HSA-RL does not: T3-prompt after less before", 0.0, lambda of: of(hat, "T3-prompt") - of(opd, "T3-prompt")),
        ("HSA-RL reasons shorter in tool-call states, share", 0.4, lambda of: shorter(of, "think/tool")),
        ("and in reply states", 0.4, lambda of: shorter(of, "think/reply")),
        ("without losing score: T1 after less before", 0.0, lambda of: of(hat, "T1") - of(opd, "T1")),
    ]
    lines, seeds = [], max((len(v) for means in found.values() for v in means.values()), default=0)
    for what, least, measure in claims:

        def of(label: str, *columns: str, seed: int) -> float:
            values = [found[label][c] for c in columns]
            return statistics.mean(v[seed if len(v) > 1 else 0] for v in values)  # the base has one for all seeds

        try:
            values = [measure(partial(of, seed=seed)) for seed in range(seeds)]
        except KeyError:  # a row or a column that this run has not
            continue
        if any(map(math.isnan, values)):
            lines.append(f"-      no share of nothing, in some seed: {what}")
            continue
        mean, spread = statistics.mean(values), statistics.stdev(values) if seeds > 1 else 0.0
        verdict = "close" if abs(mean - least) < spread else "yes" if mean >= least else "no"
        shown = f"{mean:+.1f}" + (f" ± {spread:.1f}" if seeds > 1 else "")
        lines.append(f"{verdict:5}  {shown}, expected at least {least:+.1f}: {what}")
    return lines


def makers(root: Path) -> set[str]:
    """The versions of the code that made the runs of a table and their evaluations."""
    notes = [*root.glob("*/eval.json"), *root.glob("seed-*/*/config.json"), *root.glob("seed-*/*/model/eval.json")]
    return {read_json(note)["code_version"] for note in notes}


def report(cfg: Config, root: Path) -> tuple[str, str]:
    """All tables, effects and times, as text and as Markdown."""
    codes = makers(root)
    text = [f"made by different code: {', '.join(sorted(codes))}", ""] if len(codes) > 1 else []
    marked = [*text]
    for heading, rows in tables(cfg).items():
        found = gather(cfg, root, rows)
        cells, seen = table(found), effects(found)
        spread = " ± standard deviation" if len(cfg.seeds) > 1 else ""
        seeds = f"{heading}: mean{spread} of seeds {', '.join(map(str, cfg.seeds))}"
        text += [seeds, "", *evaluation.grid(cells), "", *seen, *[""] * bool(seen)]
        marked += [seeds, "", *markdown(cells), "", *(f"- {line}" for line in seen), *[""] * bool(seen)]
    times = [[name, f"{seconds / 60:.1f} min"] for name, seconds in read_json(root / "times.json").items()]
    total = sum(read_json(root / "times.json").values())
    times.append(["all of it", f"{total / 60:.1f} min"])
    return "\n".join(text + evaluation.grid(times)), "\n".join(marked + markdown([["step", "time"], *times])) + "\n"


def main(argv: list[str]) -> None:
    cfg = parse(Config, PRESETS, argv, __doc__)
    ranks = dist(None if cfg.device == "auto" else cfg.device)
    refuse(cfg, ranks.world)
    record = Run(cfg.out, cfg, cfg.resume, f"runs/hat-{cfg.config}", ranks, ("seeds", "ablate", "leave_out"))
    perform(cfg, record, ranks)
    if ranks.rank == 0:
        text, marked = report(cfg, record.dir)
        write_text(record.dir / "table.md", marked)
        record.say(f"\n{text}\n\n{marked}\n{record.dir}: table.md, seed-*/*/model, times.json")
        record.say(f"at most {peak_mb():.0f} MB of memory in this process")


if __name__ == "__main__":
    cli(main)
