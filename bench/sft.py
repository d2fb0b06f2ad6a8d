"""Tokens per second of supervised training: sft.py beside TRL's SFTTrainer, same model, samples, batches and optimizer.

Both train the same dialogues of the teacher from the same weights: batches of `--batch` samples in the same order,
micro-batches of `--micro`, AdamW, a gradient norm of at most 1, a loss on the teacher's tokens alone under one number
of tokens a batch. So both print nearly the same loss, which is the sign that they do the same work. What differs is
how: TRL pads a micro-batch to its longest sample as they come, and masks the padding; sft.py puts samples of like
length together and needs no mask. TRL's gradient checkpointing, which saves memory for time, is off.

The sides take turns, `--repeats` times; the first step of each run is left out; figures are medians, the ratio that of
each pair. TRL is not needed otherwise: `pip install -r bench/requirements.txt`. Without it the ratio is null.

    python bench/sft.py                                  # a few minutes on two CPU cores
    python bench/sft.py --model DIR --batch 32 --micro 8

The last line is one JSON object.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from options import BadInput, option, parse
from common import ALONE, cli
import torch
import sft
from harness import Harness
from model import load
from samples import Row, case_maker, tell, trained


@dataclass
class Config:
    model: str = option(str(ROOT / "data/base-small"), "Hugging Face directory of the policy")
    harness: str = option(str(ROOT / "data/harness"), "harness directory")
    world: str = option(str(ROOT / "data/world/zh.json"), "world file")
    steps: int = option(8, "optimizer steps of each run, the first of which is not timed", min=2)
    batch: int = option(16, "samples per step", min=1)
    micro: int = option(4, "samples per forward", min=1)
    lr: float = option(1e-3, "AdamW learning rate, constant", min=0)
    precision: Literal["float32", "bfloat16"] = option("float32", "of matrix products")
    threads: int = option(0, "threads of PyTorch; 0 = its default", min=0)
    repeats: int = option(3, "times that each side runs", min=1)
    seed: int = option(0, "of the samples")


def main(argv):
    cfg = parse(Config, {}, argv, __doc__)
    if cfg.batch % cfg.micro:
        raise BadInput(f"--batch {cfg.batch} must be a multiple of --micro {cfg.micro}: TRL accumulates whole ones")
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    rows = samples(cfg)
    sides = {"sft.py": ours}
    if find_spec("trl") and find_spec("datasets"):
        sides["TRL SFTTrainer"] = theirs
    speed = {name: [] for name in sides}
    losses = {}
    for _ in range(cfg.repeats):
        for name, train in sides.items():
            tokens_per_s, losses[name] = train(cfg, rows)
            speed[name].append(tokens_per_s)

    weights = sum(p.numel() for p in load(cfg.model).model.parameters()) / 1e6
    lengths, said = [len(ids) for ids, _ in rows], sum(sum(mask) for _, mask in rows)
    print(f"{weights:.1f} M weights, {cfg.precision}, {torch.get_num_threads()} threads")
    print(f"{cfg.steps} steps of {cfg.batch} samples in micro-batches of {cfg.micro}, constant learning rate")
    print(f"{min(lengths)} to {max(lengths)} tokens a sample, {said / sum(lengths):.0%} of them trained\n")
    print(f"{'':24}{'tokens/s':>10}{'mean loss':>12}   all runs")
    for name, runs in speed.items():
        every = ", ".join(f"{x:.0f}" for x in runs)
        print(f"{name:24}{statistics.median(runs):10.0f}{losses[name]:12.4f}   {every}")
    ratio = None
    if len(sides) == 2:
        ratio = round(statistics.median(a / b for a, b in zip(*speed.values())), 3)
        print(f"{'ratio':24}{ratio:10.2f}\n")
    else:
        print("TRL is not installed (pip install -r bench/requirements.txt): no ratio\n")
    print(
        json.dumps({"bench": "sft", "ratio_vs_trl": ratio, "tokens_per_s": round(statistics.median(speed["sft.py"]))})
    )


def samples(cfg: Config) -> list[Row]:
    """The dialogues of all steps, in order."""
    options = sft.Config(harness=cfg.harness, world=cfg.world, seed=cfg.seed, samples=cfg.steps * cfg.batch)
    harness, codec = Harness.load(cfg.harness), load(cfg.model).codec
    case_at = case_maker(options, harness)
    told = (tell(i, case_at(i), options, harness, codec) for i in range(options.samples))
    return [(t.ids, trained(t)) for t in told]


def ours(cfg: Config, rows: list[Row]) -> tuple[float, float]:
    """Tokens per second after the first step, and the mean loss of all steps."""
    policy, losses, ends = load(cfg.model), [], []
    optimizer = torch.optim.AdamW(policy.model.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=0.0)
    options = sft.Config(micro=cfg.micro, precision=cfg.precision)
    for step in range(cfg.steps):
        batch = rows[step * cfg.batch : (step + 1) * cfg.batch]
        losses.append(sft.update(policy, optimizer, batch, options, ALONE)["loss"])
        ends.append(time.perf_counter())
    return rate(cfg, rows, ends[-1] - ends[0]), statistics.mean(losses)


def theirs(cfg: Config, rows: list[Row]) -> tuple[float, float]:
    """The same of TRL."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.ends.append(time.perf_counter())

    policy, clock = load(cfg.model), Clock()
    clock.ends = []
    masked = [[token if m else -100 for token, m in zip(*row)] for row in rows]
    data = Dataset.from_dict({"input_ids": [ids for ids, _ in rows], "labels": masked})
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(
            output_dir=folder,
            max_steps=cfg.steps,
            per_device_train_batch_size=cfg.micro,
            gradient_accumulation_steps=cfg.batch // cfg.micro,
            train_sampling_strategy="sequential",
            max_length=None,
            learning_rate=cfg.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=cfg.precision == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        tokenizer = policy.tokenizer
        trainer = SFTTrainer(policy.model, options, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
        loss = trainer.train().training_loss
    return rate(cfg, rows, clock.ends[-1] - clock.ends[0]), loss


def rate(cfg: Config, rows: list[Row], seconds: float) -> float:
    """Tokens per second of all steps but the first, contexts included, padding not."""
    return sum(len(ids) for ids, _ in rows[cfg.batch :]) / seconds


if __name__ == "__main__":
    cli(main)
