"""CUDA graphs of the engine's small steps: the launches of a forward pass recorded once, then replayed as one.

    first time   a pass of N rows with Q tokens each runs as it is: kernels are compiled, libraries allocate
    second time  it is recorded on tensors of its own, and replayed
    from then on its inputs are copied there, and it is replayed

A GPU computes a token of a few rows faster than Python can launch its kernels. A graph has fixed shapes and addresses,
so passes are recorded for each N and Q, for N up to MOST, and anew when the buffer of the rows has grown; prompts, and
steps whose rows differ in their number of tokens, run as they are. What a pass says stands until the next replay.

    graphs = Graphs(CudaGraph)
    hidden = graphs("model", partial(forward, model), step)        # as forward(model, step)

A pass in which the CPU waits for the GPU cannot be recorded: experts that are asked one by one, or in float32, or on a
GPU before Hopper (transformers' grouped product then reads its offsets). The first time tells; then all runs as it is,
and a warning says so. Weights that are sharded are gathered by streams of their own: no graphs then either.
Tested on a CPU, with a tape of tensor operations in place of CudaGraph; not yet run on a GPU.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

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
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.out = compute()
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own

    def replay(self):
        self.graph.replay()

    @staticmethod
    def waits(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, str]:
        """compute(), and in which words PyTorch warns that the CPU waited in it; "" if it did not."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                out = compute()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return out, next((str(w.message) for w in said if "synchroniz" in str(w.message)), "")


class Recording:
    """A pass on tensors of its own. held: where it leaves the states that a step holds, or None.

    These may be of other recordings too: for many rows and layers they are large, and a step is done with them before
    the next one.
    """

    def __init__(self, record: type, beside, compute: Callable, step: Step, inputs: tuple, held: list | None):
        self.inputs, self.held = [x.clone() for x in _tensors(step, inputs)], held
        ids, row, position, bias, *more = self.inputs
        step = replace(step, ids=ids, row=row, position=position, bias=bias, held=None if held is None else [])

        def pass_of_it():
            out = compute(step, *more)
            for places, states in zip(held or (), step.held or ()):
                for place, x in zip(places, states):
                    place.copy_(x)
            return out

        self.graph = record(pass_of_it, beside)
        step.held = None

    def replay(self, step: Step, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for kept, new in zip(self.inputs, _tensors(step, inputs), strict=True):
            kept.copy_(new)
        self.graph.replay()
        if step.held is not None:
            step.held += self.held
        return self.graph.out


def _tensors(step, inputs):
    return step.ids, step.row, step.position, step.bias, *inputs


class Graphs:
    """Passes over rows, those that come back replayed. record: CudaGraph, or None to run them all as they are.

    For one buffer and one set of weights, which may change in place. replayed: how many passes were, by name.
    """

    def __init__(self, record: type | None):
        self.record, self.replayed = record, Counter()
        self.grow = GROW if record else rows.GROW
        self.length, self.seen, self.kept = 0, set(), {}
        self.held = {}  # Q -> for each layer that holds states: where recordings leave them

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
            out, why = self.record.waits(lambda: compute(step, *inputs))
            if why:
                self._off(why)
            elif step.held and step.shape[1] not in self.held:  # one place for all recordings of as many tokens a row
                most = min(MOST, step.buffer.slots)
                places = [[x.new_empty(most, *x.shape[1:]) for x in states] for states in step.held]
                self.held[step.shape[1]] = places
            return out
        if key not in self.kept:
            beside = next((recording.graph for recording in self.kept.values()), None)
            held = None
            if step.held is not None:
                held = [[x[: step.shape[0]] for x in states] for states in self.held.get(step.shape[1], [])]
            try:
                self.kept[key] = Recording(self.record, beside, compute, step, inputs, held)
            except RuntimeError as error:
                self._off(str(error.__context__ or error))
                return compute(step, *inputs)
        self.replayed[name] += 1
        return self.kept[key].replay(step, inputs)

    def _off(self, why):
        self.record, self.kept = None, {}
        cause = why.partition("\n")[0]
        warnings.warn(f"no CUDA graphs: a step of this model cannot be recorded ({cause})", stacklevel=3)
