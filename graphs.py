"""CUDA graphs of the engine's small steps: the launches of a forward pass recorded once, then replayed as one.

    first time   a pass of N rows with Q tokens each runs as it is: kernels are compiled, libraries allocate
    second time  it is recorded on tensors of its own, and replayed
    from then on its inputs are copied there, and it is replayed

A GPU computes a token of a few rows faster than Python can launch its kernels. A graph has fixed shapes and addresses,
so passes are recorded for each N and Q, for N up to MOST, and anew when the buffer of the rows has grown; prompts, and
steps whose rows differ in their number of tokens, run as they are. What a pass says stands until the next replay.

    graphs = Graphs(CudaGraph)
    hidden = graphs("model", partial(forward, model), step)        # as forward(model, step)

Not everything can be recorded: experts that are asked one by one cannot, as the CPU would have to know which. Then all
runs as it is, and one warning says so. Tested on a CPU, with a tape of tensor operations in place of CudaGraph; not yet
run on a GPU.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import common  # noqa: F401  before torch: it sets the OpenMP environment
import torch

import rows
from rows import Step

MOST = 8  # rows: with more of them the sums take longer than the launches
GROW = 512  # positions by which the buffer of the rows grows: each time all is recorded anew


class CudaGraph:
    """What `compute()` launches, recorded and not run. out: its result, which `replay` fills.

    beside: another one, whose memory it may share, since no two run at once; loops in other threads launch nothing.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], beside: "CudaGraph | None"):
        self.graph, pool = torch.cuda.CUDAGraph(), beside and beside.graph.pool()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.out = compute()

    def replay(self):
        self.graph.replay()


class Recording:
    """A pass on tensors of its own."""

    def __init__(self, record: Callable, compute: Callable, step: Step, inputs: tuple[torch.Tensor, ...]):
        self.inputs = [x.clone() for x in _tensors(step, inputs)]
        ids, row, position, bias, *more = self.inputs
        held = None if step.held is None else []
        self.step = replace(step, ids=ids, row=row, position=position, bias=bias, held=held)
        self.graph = record(lambda: compute(self.step, *more))

    def replay(self, step: Step, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for kept, new in zip(self.inputs, _tensors(step, inputs), strict=True):
            kept.copy_(new)
        self.graph.replay()
        if step.held is not None:
            step.held += self.step.held
        return self.graph.out


def _tensors(step, inputs):
    return step.ids, step.row, step.position, step.bias, *inputs


class Graphs:
    """Passes over rows, those that come back replayed. record: CudaGraph, or None to run them all as they are.

    For one buffer and one set of weights, which may change in place. replayed: passes that were.
    """

    def __init__(self, record: type | None):
        self.record, self.replayed = record, 0
        self.grow = GROW if record else rows.GROW
        self.length, self.seen, self.kept = 0, set(), {}

    @torch.inference_mode()
    def __call__(self, name: str, compute: Callable, step: Step, *inputs: torch.Tensor) -> torch.Tensor:
        """compute(step, *inputs) -> (T, H), or its replay. name: tells computations apart."""
        regular = step.window is None and (step.held is not None or step.ends is None)  # all rows alike
        if self.record is None or not regular or step.shape[0] > MOST:
            return compute(step, *inputs)
        if self.length != step.buffer.length:  # its tensors are elsewhere now
            self.length, self.seen, self.kept = step.buffer.length, set(), {}
        key = (name, step.shape, step.held is not None)
        if key not in self.seen:
            self.seen.add(key)
            return compute(step, *inputs)
        if key not in self.kept:
            try:
                beside = next((recording.graph for recording in self.kept.values()), None)
                self.kept[key] = Recording(partial(self.record, beside=beside), compute, step, inputs)
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                warnings.warn(f"no CUDA graphs: this model cannot be recorded ({why})", stacklevel=2)
                self.record, self.kept = None, {}
                return compute(step, *inputs)
        self.replayed += 1
        return self.kept[key].replay(step, inputs)
