"""Microseconds of the two kernels of a speculating step, verifier and gated delta rule, beside their torch paths.

All logits of a step are read once, so bytes / bandwidth is the floor; the bandwidth is measured here, by a copy. Two
launches cost something even when they do nothing: a graph of two empty kernels says how much. On a GPU each side runs
in a CUDA graph over many copies of the logits, together larger than any cache, as logits that come out of a model whose
weights have passed through the cache since. All drafts stand, which is the longest way through the second launch.
Before the clock starts both sides must have returned the same tokens. The gated delta rule (delta.py) is that of one
layer of Qwen3.6-35B-A3B over the same sequences and drafts, all of whose states are written: 2 MB for each token.

    python bench/verifier.py                                    # one sequence of 3 drafts: 4 rows of 248,320 logits
    python bench/verifier.py --sequences 16 --dtype float32

Without a GPU it prints the time of the torch paths there. The last line is one JSON object, null what was not measured.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from options import BadInput, option, parse
from common import cli
import torch
from delta import recurrent
from replay import measured_bandwidth
from verify import triton, verify

CACHE = 256 << 20  # bytes: more than the L2 of any GPU


@dataclass
class Config:
    sequences: int = option(1, "sequences in the batch", min=1)
    drafts: int = option(3, "drafts of each; it has one row of logits more", min=0)
    vocab: int = option(248_320, "logits in a row", min=2)
    padding: int = option(0, "the last ids of these are not valid", min=0)
    temperature: float = option(0.8, "of sampling", min=0.01)
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "of the logits")
    device: Literal["cpu", "cuda"] = option("cuda" if torch.cuda.is_available() else "cpu", "where both sides run")
    repeats: int = option(50, "times that each side runs; the median counts", min=1)
    seed: int = option(0, "of the logits")


def main(argv):
    cfg = parse(Config, {}, argv, __doc__)
    if cfg.padding >= cfg.vocab:
        raise BadInput(f"padding {cfg.padding}: must be less than vocab {cfg.vocab}")
    if cfg.device == "cuda" and triton is None:
        raise BadInput("device cuda: needs the package triton")
    rows = cfg.sequences * (cfg.drafts + 1)
    size = rows * cfg.vocab * getattr(torch, cfg.dtype).itemsize
    copies = max(2, -(-CACHE // size)) if cfg.device == "cuda" else 1
    cases = [case(cfg, cfg.seed + i) for i in range(copies)]
    layers = [layer(cfg, cfg.seed + i) for i in range(copies if cfg.device == "cuda" else 1)]
    states = sum(x.nbytes for x in layers[0]) + (cfg.drafts + 1) * layers[0][-1].nbytes  # read and written
    figures = dict.fromkeys(("us", "us_torch", "us_empty_graph", "us_delta", "us_delta_torch"))
    if cfg.device == "cpu":
        name = "cpu"
        figures["us_torch"] = seconds(lambda: check(cfg, cases[0], "torch"), cfg.repeats) * 1e6
        figures["us_delta_torch"] = seconds(lambda: recurrent(*layers[0], backend="torch"), cfg.repeats) * 1e6
    else:
        name = torch.cuda.get_device_name()
        for a, b in zip(check(cfg, cases[0], "torch")[:2], check(cfg, cases[0], "triton")[:2]):
            assert torch.equal(a, b), "the two sides disagree"
        for a, b in zip(recurrent(*layers[0], backend="torch"), recurrent(*layers[0], backend="triton")):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        for figure, backend in (("us", "triton"), ("us_torch", "torch")):
            calls = [lambda c=c, backend=backend: check(cfg, c, backend) for c in cases]
            figures[figure] = graph_us(calls, cfg.repeats)
            calls = [lambda x=x, backend=backend: recurrent(*x, backend=backend) for x in layers]
            figures[figure.replace("us", "us_delta")] = graph_us(calls, cfg.repeats)
        figures["us_empty_graph"] = graph_us([empty_pair] * copies, cfg.repeats)

    where = f"{name}, {torch.get_num_threads()} threads" if cfg.device == "cpu" else name
    print(f"{where}, torch {torch.__version__}, triton {triton.__version__ if triton is not None else None}")
    print(f"{rows} rows x {cfg.vocab} logits in {cfg.dtype}, {size / 1e6:.1f} MB\n")
    names = {"us": "verifier, kernel", "us_torch": "verifier, torch", "us_empty_graph": "two empty launches"}
    names |= {"us_delta": "delta rule, kernel", "us_delta_torch": "delta rule, torch"}
    for figure, value in figures.items():
        print(f"{names[figure]:24}{'not measured' if value is None else f'{value:.1f} us':>14}")
    if cfg.device == "cuda":
        speed = measured_bandwidth(torch.device("cuda"))
        for what, moved, us in (("verifier", size, "us"), ("delta rule", states, "us_delta")):
            print(f"{f'{what}, {moved / 1e6:.1f} MB':24}{moved / speed * 1e6:11.1f} us at {speed / 1e12:.2f} TB/s")
            print(f"{f'{what}, torch / kernel':24}{figures[us + '_torch'] / figures[us]:14.2f}")
    figures = {name: value if value is None else round(value, 2) for name, value in figures.items()}
    print("\n" + json.dumps({"bench": "verifier", "device": name} | figures))


def case(cfg, seed):
    """Logits, drafts that all stand, and uniforms."""
    n, k, g = cfg.sequences, cfg.drafts, torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k + 1, cfg.vocab, generator=g) * 2
    drafts = torch.randint(0, cfg.vocab - cfg.padding, (n, k), generator=g)
    logits[:, :-1].scatter_(-1, drafts[..., None], 100.0)
    uniforms = torch.rand(n, k + 1, generator=g)
    return logits.to(cfg.device, getattr(torch, cfg.dtype)), drafts.to(cfg.device), uniforms.to(cfg.device)


def layer(cfg, seed):
    """q, k, v, g, beta and state of a gated-delta layer: 16 heads of q and k, 32 of v, 128 wide."""
    n, steps, g = cfg.sequences, cfg.drafts + 1, torch.Generator().manual_seed(seed)
    shapes = [(n, steps, heads, 128) for heads in (16, 16, 32)] + [(n, steps, 32)] * 2 + [(n, 32, 128, 128)]
    q, k, v, decay, beta, state = (torch.randn(shape, generator=g).to(cfg.device) for shape in shapes)
    q, k, v = (x.to(getattr(torch, cfg.dtype)) for x in (q, k, v))
    return q, k, v, -decay.abs(), beta.sigmoid(), state


def check(cfg, inputs, backend):
    return verify(*inputs, temperature=cfg.temperature, valid_vocab=cfg.vocab - cfg.padding, backend=backend)


def seconds(call, repeats):
    """The median of `repeats` calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def graph_us(calls, repeats):
    """Microseconds per call, all calls in one CUDA graph; the median of `repeats` replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates, which a graph cannot record
        for _ in range(3):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # all kept: else each writes where the last one did, into the cache
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    del results
    return statistics.median(times)


if triton is not None:

    @triton.jit
    def nothing():
        pass


def empty_pair():
    nothing[(1,)]()
    nothing[(1,)]()


if __name__ == "__main__":
    cli(main)
