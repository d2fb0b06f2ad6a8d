"""Replayed steps against steps as they are. A tape of tensor operations stands in for a CUDA graph, on a CPU."""

from collections import Counter
from types import SimpleNamespace

import common  # noqa: F401  before torch
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphs
import rows
from infer import Engine
from model import load
from test_infer import loop, loops, of_family, tokens_of
from test_speculate import Untrained

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense, aten.nonzero)  # the CPU asks for a value, or for a shape that depends on one


def tensors(x):
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """As a CUDA graph: a list of operations on fixed tensors, whose values at the time of recording do not matter.

    What stood before is not written to while it records. A replay spoils what other tapes have made: they share memory.
    """

    def __init__(self, compute, beside):
        super().__init__()
        self.operations, self.made, self.shared = [], {}, beside.shared if beside else []
        with self:
            self.out = compute()
        self.spoil()
        self.shared.append(self)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in WAITS
        if function._schema.is_mutable and args[0].untyped_storage().data_ptr() not in self.made:
            out = args[0]
        else:
            out = function(*args, **(kwargs or {}))
            known = {x.untyped_storage().data_ptr() for x in tensors(args)}
            self.made |= {p: x for x in tensors(out) if (p := x.untyped_storage().data_ptr()) not in known}
        self.operations.append((function, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def spoil(self):
        for x in self.made.values():
            if x.is_floating_point():
                x.fill_(float("nan"))

    def replay(self):
        for tape in self.shared:
            if tape is not self:
                tape.spoil()
        for function, args, kwargs, out in self.operations:
            for place, new in zip(tensors(out), tensors(function(*args, **kwargs)), strict=True):
                place.copy_(new)

    @staticmethod
    def waits(compute):
        with Watch() as seen:
            return compute(), seen.why


class Watch(TorchDispatchMode):
    why = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in WAITS:
            self.why = f"called {function}\nmore about it"
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=["qwen3", "qwen36"])
def policy(request, qwen36_dir):
    """With an MTP head."""
    if request.param == "qwen36":
        return load(qwen36_dir)
    policy = of_family(request.param)
    policy.mtp = Untrained(policy.model)
    return policy


@pytest.mark.parametrize("slots, drafts", [(1, 3), (5, 0), (5, 3)])
def test_a_replayed_run_is_the_run(policy, slots, drafts, monkeypatch):
    monkeypatch.setattr(graphs, "GROW", 64)  # the buffer grows on the way, and with it the tape is another
    seeds = list(range(slots + 1))
    counts, call = Counter(), graphs.Graphs.__call__

    def counted(self, name, compute, step, *inputs):
        before, out = self.replayed.total(), call(self, name, compute, step, *inputs)
        counts[name, step.held is not None] += self.replayed.total() - before
        return out

    monkeypatch.setattr(graphs.Graphs, "__call__", counted)
    engine = Engine(policy, slots=slots, context=256, drafts=drafts)
    want = engine.run(loops(slots + 1), seeds)
    assert engine.stats["replayed"] == 0
    engine.recorder = lambda: Tape
    got = engine.run(loops(slots + 1), seeds)
    assert tokens_of(got) == tokens_of(want)
    assert all(np.allclose(a[2], b[2], atol=1e-5) for a, b in zip(got, want, strict=True))
    assert engine.stats["replayed"] == counts.total()
    recurrent = len(rows.recurrent_layers(policy.model)) > 0
    kinds = [("model", recurrent and drafts > 0)] + [("head", False), ("own", False)] * (drafts > 0)
    assert all(counts[kind] > 3 for kind in kinds), counts


def test_many_rows_run_as_they_are(policy, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    engine = Engine(policy, slots=3)
    engine.recorder = lambda: Tape
    engine.run([loop([1, 2, 3], 1, i, new) for i, new in enumerate((6, 6, 14))], [0, 1, 2], greedy=True)
    assert 0 < engine.stats["replayed"] <= 8  # of 14 steps: those after the other two have ended


class Failing(Tape):
    def __init__(self, compute, beside):
        raise torch.OutOfMemoryError("no memory\nmore about it")


@pytest.mark.parametrize("experts, record, why", [("eager", Tape, "called aten"), ("grouped_mm", Failing, "no memory")])
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so(experts, record, why):
    policy = of_family("qwen3_5_moe")
    policy.model.set_experts_implementation(experts)  # eager: walks over the experts that were chosen
    engine = Engine(policy, slots=2, context=256)
    want = engine.run(loops(4), list(range(4)))
    engine.recorder = lambda: record
    with pytest.warns(UserWarning, match=rf"no CUDA graphs: .* \({why}[^\n]*\)$") as said:
        assert tokens_of(engine.run(loops(4), list(range(4)))) == tokens_of(want)
    assert len(said) == 1 and engine.stats["replayed"] == 0


def test_a_cuda_graph_that_fails_gives_the_stream_back(monkeypatch):
    """torch.cuda.graph sets a stream of its own, and does not take it back where the end of the capture raises."""
    stream = ["own"]

    class Capture:
        def __init__(self, graph, pool, capture_error_mode):
            pass

        def __enter__(self):
            stream[:] = ["of the capture"]

        def __exit__(self, *error):
            raise RuntimeError("capture failed")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda s: stream.__setitem__(0, s))
    with pytest.raises(RuntimeError, match="capture failed"):
        graphs.CudaGraph(lambda: None, None)
    assert stream == ["own"]


@pytest.mark.parametrize("device, root, able", [("cuda", None, True), ("cuda", object(), False), ("cpu", None, False)])
def test_graphs_are_for_whole_models_on_a_gpu(policy, device, root, able):
    there = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)), root=root)
    assert (Engine.recorder(SimpleNamespace(policy=there)) is graphs.CudaGraph) == able
