"""What each part of the HSA-RL objective is worth: rl.py with one thing changed at a time, same base, several seeds.

    default       GDPO, segments, GSPO in token form, reasoning penalty, faults, half of the groups on other harnesses
    grpo          the sum of the rewards is normalised, not each reward
    plain         a ratio for each token, as in PPO; the sequence form has the gradient of the token form (tests)
    whole         no segments: one advantage, one ratio and one vote for the whole rollout
    free, cheap   reasoning costs nothing, or a fifth: the size of the report, whose runs are longer
    mask          rollouts cut by length are left out, where they have failed otherwise
    fixed, mixed  all groups act under the original harness; half of all rollouts act under an augmented one each
    smooth        no tool ever fails in training

    python bench/study.py                                    # all of them, seed after seed; hours on two CPU cores
    python bench/study.py --variants default,grpo --seeds 0,1,2
    python bench/study.py --out runs/study --rl="--steps 20"      # goes on where it was; options of rl.py for all

Each cell is the last evaluation of rl.py on its fixed slice, mean ± standard deviation over the seeds: the score under
the original harness (T1), under held-out variants (T2) and where tools often fail (faulty), the four rewards and the
recovery in percent, reasoning tokens per state. The last line is one JSON object: variant -> column -> a value for each
seed.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import split

sys.path.insert(0, str(Path(__file__).parent.parent))

from options import BadInput, closest, option, parse
from common import cli, write_text

import rl
from curves import rows_of
from hat import cell, ingredients, left, markdown, same_ingredients

VARIANTS = {
    "default": "",
    "grpo": "--normalise grpo",
    "plain": "--ratio plain",
    "whole": "--no-segments",
    "free": "--think-penalty 0",
    "cheap": "--think-penalty 0.1",
    "mask": "--cut mask",
    "fixed": "--harness-mode fixed",
    "mixed": "--harness-mode mixed",
    "smooth": "--faults 0,0,0",
}
SHARES = (*rl.REWARDS, "fault_recovery")  # shown in percent
COLUMNS = ("score", "T2", "faulty", *SHARES, "think/tool", "think/reply")


@dataclass
class Config:
    config: str = option("small", "preset, of rl.py too")
    out: str = option("runs/study", "directory of the runs; finished ones are not repeated")
    variants: tuple[str, ...] = option(tuple(VARIANTS), "those to run")
    seeds: tuple[int, ...] = option((0, 1, 2), "each variant once for each")
    rl: str = option("", "more options of rl.py, in one text")


PRESETS = {"tiny": {}, "small": {}}


def last_evaluation(run: Path) -> dict[str, float | None]:
    """Column -> value of the last row of a run that has an evaluation; None where there was nothing to count."""
    row = [row for row in rows_of(run) if "eval/score" in row][-1]
    found = {column: row[f"eval/{column}"] for column in COLUMNS}
    return {column: 100 * x if column in SHARES and x is not None else x for column, x in found.items()}


def main(argv: list[str]) -> None:
    cfg = parse(Config, PRESETS, argv, __doc__)
    if unknown := [name for name in cfg.variants if name not in VARIANTS]:
        raise BadInput(f"--variants: '{unknown[0]}' is none of {', '.join(VARIANTS)}{closest(unknown[0], VARIANTS)}")
    runs = {(name, seed): Path(cfg.out) / name / f"seed-{seed}" for seed in cfg.seeds for name in cfg.variants}
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    same_ingredients(
        Path(cfg.out), ingredients(rl.parse(rl.Config, rl.PRESETS, ["--config", cfg.config, *split(cfg.rl)]))
    )
    for (name, seed), out in runs.items():
        words = ["--config", cfg.config, "--seed", str(seed), "--out", str(out), *split(VARIANTS[name]), *split(cfg.rl)]
        if line := left("rl", words):
            rl.main(line)

    found = {name: [last_evaluation(runs[name, seed]) for seed in cfg.seeds] for name in cfg.variants}
    found = {name: {column: [r[column] for r in rows] for column in COLUMNS} for name, rows in found.items()}
    cells = {name: [cell([x for x in v if x is not None]) for v in row.values()] for name, row in found.items()}
    text = "\n".join(markdown([["", *COLUMNS], *([name, *row] for name, row in cells.items())]))
    write_text(Path(cfg.out) / "table.md", text + "\n")
    print(text)
    print(json.dumps({"bench": "study"} | found))


if __name__ == "__main__":
    cli(main)
