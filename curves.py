"""Curves of a run: metrics.jsonl -> pictures.

    python eval.py plot RUN        all of them, in RUN/curves.png; a stage draws those that matter to it when it ends

Left out: several runs in one picture.
"""

import json
import os
from pathlib import Path
from typing import Any

from options import BadInput
from common import read_text


SPAN = 10  # steps of a trend: the tasks of a step differ more than the policy does from one step to the next


def rows_of(run_dir: str | Path) -> list[dict]:
    """The rows of metrics.jsonl. A line without an end is still being written."""
    source, rows = Path(run_dir) / "metrics.jsonl", []
    for n, line in enumerate(read_text(source).split("\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["step"]
        except (ValueError, LookupError, TypeError):
            raise BadInput(f"{source}:{n}: not a row of metrics, a JSON object with a step") from None
    return rows


def canvas(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its array of axes, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: Any, path: Path) -> Path:
    """Write a figure under a temporary name, rename it, and forget it."""
    from matplotlib import pyplot

    figure.savefig(temp := path.with_name(f".{path.name}.tmp"), format="png", dpi=120)
    os.replace(temp, path)
    pyplot.close(figure)
    return path


def trend(values: list[float]) -> list[float]:
    """The mean of each value and the up to SPAN - 1 before it."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - SPAN) : i + 1] for i in range(len(values)))]


def draw(run_dir: Path, picture: str, label: str, names: list[str]) -> Path:
    """One picture of some metrics of a run: each step thin, its trend strong, evaluations as dots."""
    rows, (figure, [[axes]]) = rows_of(run_dir), canvas(1, 1, (7, 4))
    for i, name in enumerate(names):
        for metric in (name, f"eval/{name}"):
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            if not points:
                continue
            steps, values = zip(*points)
            if metric == name:
                axes.plot(steps, values, color=f"C{i}", alpha=0.25)
                axes.plot(steps, trend(values), color=f"C{i}", label=name.rpartition("/")[2])
            else:
                axes.plot(steps, values, "o", color=f"C{i}")
    axes.set(xlabel=f"step (thin: each; strong: mean of {SPAN}; dots: evaluation)", ylabel=label)
    if len(names) > 1:
        figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
    return save(figure, run_dir / picture)


def plot(run_dir: str | Path, rewards: tuple[str, ...]) -> Path:
    """All curves of a run -> curves.png: a panel for the rewards, one for each prefix/, one for what is left.

    An evaluation is drawn with dots, in the panel and the colour of what it evaluates.
    """
    panels: dict[str, dict[str, list]] = {}
    for row in rows_of(run_dir):
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                bare = name.removeprefix("eval/")
                panel = "reward" if bare in rewards else bare.partition("/")[0]
                panels.setdefault(panel, {}).setdefault(name, []).append((row["step"], value))
    if not panels:
        raise BadInput(f"{run_dir}: no row of metrics in its metrics.jsonl")
    rows = -(-len(panels) // 3)
    figure, axes = canvas(rows, 3, (14, 3 * rows))
    for place, (panel, curves) in zip(axes.flat, panels.items()):
        colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(n.removeprefix("eval/") for n in curves))}
        for name, curve in curves.items():
            style = "o--" if name.startswith("eval/") or len(curve) == 1 else "-"
            place.plot(*zip(*curve), style, label=name, color=colours[name.removeprefix("eval/")])
        place.set(title=panel, xlabel="step")
        if len(curves) > 1:
            place.legend(fontsize="x-small", framealpha=0.5)
    for place in axes.flat[len(panels) :]:
        place.remove()
    return save(figure, Path(run_dir) / "curves.png")
