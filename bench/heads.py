"""What becomes of an MTP head while RL moves its model: trained along, left as it was, or trained while that is frozen.

    along    rl.py --mtp train                 the base's head learns from the rollouts of each step
    left     rl.py --mtp measure               the same RL, and the head stays the base's
    frozen   rl.py --mtp train --lr 0          the head learns as long, and the model stays

    python bench/heads.py                      # three runs of rl.py, half an hour on two CPU cores, and heads.png
    python bench/heads.py --out runs/heads --rl="--harness-mode fixed"     # goes on where it was; options of rl.py

Curves: D of the three drafts in nats, and tokens per forward of the model, 4 at most, expected at the temperature along
the rollouts of each step (mtp.py has both). `engine` is what speculating really yields after RL: tokens per
verification on --requests unseen requests, greedy, with three drafts. Policies of `along` and `left` are the same, for
a head that learns along is not felt by its model. The last line is one JSON object.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import split

sys.path.insert(0, str(Path(__file__).parent.parent))

from options import BadInput, option, parse
from common import ALONE, cli

import rl
from curves import canvas, rows_of, save, trend
from hat import ingredients, left, same_ingredients
from model import load

ARMS = {"along": "--mtp train", "left": "--mtp measure", "frozen": "--mtp train --lr 0"}
CURVES = {"mtp/loss": "loss of the head, nats", "mtp/length": "tokens per forward"}
DRAFTS = 3
ENDS = 5  # steps at either end of a curve whose mean stands in the table


@dataclass
class Config:
    config: str = option("small", "preset, of rl.py too")
    model: str = option("data/base-small", "Hugging Face directory of the base, with an MTP head")
    out: str = option("runs/heads", "directory of the runs; finished ones are not repeated")
    seed: int = option(0, "of the runs")
    requests: int = option(100, "unseen requests for the engine", min=1)
    rl: str = option("", "more options of rl.py, in one text")


PRESETS = {"tiny": dict(requests=2), "small": {}}


def engine_length(model: Path, cfg: Config) -> float:
    """Tokens per verification of the engine, over the requests' whole agent loops."""
    options = rl.parse(rl.Config, rl.PRESETS, ["--config", cfg.config, *split(cfg.rl)])
    world, harness = rl.World.load(options.world, "test"), rl.Harness.load(options.harness)
    engine = rl.Engine(load(model), options.slots, options.context, drafts=DRAFTS)
    tasks = [rl.evaluation_task(world, i) for i in range(cfg.requests)]
    rl.collect(engine, [(harness, task, task.open(), task.seed) for task in tasks], "drafting", ALONE, greedy=True)
    return engine.stats["accepted_length"]


def main(argv: list[str]) -> None:
    cfg = parse(Config, PRESETS, argv, __doc__)
    runs = {arm: Path(cfg.out) / arm for arm in ARMS}
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    words = ["--config", cfg.config, "--model", cfg.model, *split(cfg.rl)]
    same_ingredients(Path(cfg.out), ingredients(rl.parse(rl.Config, rl.PRESETS, words)))
    for arm, out in runs.items():
        words = ["--config", cfg.config, "--model", cfg.model, "--seed", str(cfg.seed), "--out", str(out)]
        if line := left("rl", [*words, *split(cfg.rl), *split(ARMS[arm])]):
            rl.main(line)

    figure, [panels] = canvas(1, len(CURVES), (11, 4))
    found = {arm: {} for arm in ARMS}
    for axes, (name, label) in zip(panels, CURVES.items()):
        for i, (arm, out) in enumerate(runs.items()):
            points = [(row["step"], row[name]) for row in rows_of(out) if name in row]
            if not points:
                raise BadInput(f"{out}: no step had rollouts to train, so there is nothing to draw; more --steps")
            steps, values = zip(*points)
            axes.plot(steps, values, color=f"C{i}", alpha=0.25)
            axes.plot(steps, trend(values), color=f"C{i}", label=arm)
            first, last = values[:ENDS], values[-ENDS:]
            found[arm][name] = [sum(part) / len(part) for part in (first, last)]
        axes.set(xlabel="step of RL", ylabel=label)
    panels[0].legend(frameon=False)
    picture = save(figure, Path(cfg.out) / "heads.png")

    print(f"{'':8}{'loss, first':>14}{'last':>8}{'tokens per forward, first':>28}{'last':>8}{'engine':>10}")
    for arm, row in found.items():
        row["engine"] = engine_length(runs[arm] / "model", cfg)
        (a, b), (c, d) = row["mtp/loss"], row["mtp/length"]
        print(f"{arm:8}{a:14.3f}{b:8.3f}{c:28.2f}{d:8.2f}{row['engine']:10.2f}")
    print(f"first, last: means of {ENDS} steps; engine: of {DRAFTS + 1} at most; {picture}")
    gain = found["along"]["engine"] - found["left"]["engine"]
    print(json.dumps({"bench": "heads", "accepted_length": found["along"]["engine"], "gain": gain, "arms": found}))


if __name__ == "__main__":
    cli(main)
