"""Peak memory of the distillation loss, in chunks and all at once: forward and backward, the same gradient.

The loss reads hidden states of student and teacher through two LM heads of a real vocabulary. All at once, four
buffers of tokens x vocabulary live side by side; in chunks they have the size of a chunk. Both sides run the very same
function of opd.py, which keeps no more than it must, so the ratio is that of the chunks and of nothing else.

Each side runs in a process of its own. Its figure is the growth of the peak resident memory over what the process
had before the loss: weights and inputs are not counted, gradients are. Nothing here needs a GPU.

    python bench/opd.py                                  # 4,096 tokens x 248,320: 17 GB of free memory, 1-10 min
    python bench/opd.py --tokens 1024 --chunk 128        # an eighth too, in 4 GB

Expect a ratio of chunk / tokens and a little more: 0.13 by default. The last line is one JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from options import BadInput, option, parse
from common import cli, peak_mb
import torch
import opd

GB = 1 << 30
BUFFERS = 4  # of tokens x vocabulary that live at once; see opd.CHUNK


@dataclass
class Config:
    tokens: int = option(4096, "sampled tokens", min=1)
    vocab: int = option(248320, "tokens in the vocabulary", min=2)
    hidden: int = option(64, "width of the hidden states; adds the same to both sides", min=1)
    chunk: int = option(512, "tokens that meet the vocabulary at once on the chunked side", min=1)
    threads: int = option(0, "threads of PyTorch; 0 = its default", min=0)
    seed: int = option(0, "of weights and inputs")
    side: str = option("", "for the two processes: DIR/chunked or DIR/whole, where the result goes")


def main(argv):
    cfg = parse(Config, {}, argv, __doc__)
    if cfg.side:
        return measure(cfg, Path(cfg.side))
    need, free = (BUFFERS + 0.3) * cfg.tokens * cfg.vocab * 4, available()
    if need > free:
        raise BadInput(f"--tokens {cfg.tokens}: needs {need / GB:.0f} GB, {free / GB:.0f} are free; take fewer tokens")
    print(f"{cfg.tokens} tokens x {cfg.vocab} tokens of vocabulary, hidden size {cfg.hidden}, reverse KL, float32\n")
    print(f"{'':24}{'peak GB':>10}{'seconds':>10}{'loss':>12}")
    with tempfile.TemporaryDirectory() as folder:
        found = {side: run(cfg, Path(folder, side)) for side in ("chunked", "whole")}
        grads = {side: torch.load(Path(folder, f"{side}.pt"), weights_only=True) for side in found}
    for side, name in (("chunked", f"in chunks of {cfg.chunk}"), ("whole", "all at once")):
        x = found[side]
        print(f"{name:24}{x['bytes'] / GB:10.2f}{x['seconds']:10.1f}{x['loss']:12.6f}")
    ratio = found["chunked"]["bytes"] / found["whole"]["bytes"]
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(grads["chunked"], grads["whole"], strict=True))
    print(f"{'ratio':24}{ratio:10.3f}")
    print(f"{'gradient, relative error':24}{error:10.1e}\n")
    print(json.dumps({"bench": "opd", "memory_ratio": round(ratio, 4), "grad_rel_err": float(f"{error:.3g}")}))


def available() -> float:
    """Bytes of memory that are free, as Linux counts it; elsewhere half of what there is."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def run(cfg, side):
    """Measure one side in a process of its own; BadInput if the system ends it."""
    options = [f"--{name}={value}" for name, value in (asdict(cfg) | {"side": side}).items()]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # else glibc keeps freed buffers of up to 32 MB to itself
    done = subprocess.run([sys.executable, __file__, *options], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode < 0:
        raise BadInput(
            f"{side.name}: ended by signal {-done.returncode}, likely for want of memory; take fewer --tokens"
        )
    if done.returncode:
        raise RuntimeError(f"{side.name}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(cfg, side):
    """One forward and backward pass; prints bytes, seconds and loss, leaves the gradients in `side`.pt."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    step(make(8, 4, 2, seed=0), chunk=4)  # libraries load, threads start
    inputs = make(cfg.vocab, cfg.hidden, cfg.tokens, cfg.seed)
    before, start = peak_mb(), time.perf_counter()
    value = step(inputs, cfg.chunk if side.name == "chunked" else cfg.tokens)
    found = {"bytes": (peak_mb() - before) * 2**20, "seconds": time.perf_counter() - start, "loss": value}
    (hidden, head), *_ = inputs
    torch.save([hidden.grad, head.weight.grad], side.with_suffix(".pt"))
    print(json.dumps(found))


def make(vocab, hidden, tokens, seed):
    """(hidden states, LM head) of student and of teacher, and the sampled ids; logits spread like those of a model."""
    generator, sides = torch.Generator().manual_seed(seed), []
    for _ in ("student", "teacher"):
        head = torch.nn.utils.skip_init(torch.nn.Linear, hidden, vocab, bias=False)
        head.weight.data.normal_(0, hidden**-0.5, generator=generator)  # in place: the peak before is what is there
        sides.append((torch.empty(tokens, hidden).normal_(0, 2, generator=generator).requires_grad_(), head))
    sides[1][1].requires_grad_(False)
    return *sides, torch.randint(vocab, (tokens,), generator=generator)


def step(inputs, chunk):
    """Forward and backward of the mean loss, which is returned."""
    student, teacher, sampled = inputs
    loss = opd.chunked(student, teacher, sampled, None, opd.Config(model=""), chunk)[:, 0].mean()
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    cli(main)
