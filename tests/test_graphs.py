"""Replayed steps against steps as they are. A tape of tensor operations stands in for a CUDA graph, on a CPU."""

import warnings

import common  # noqa: F401  before torch
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphs
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

    What stood before is not written to while it records; what the CPU would wait for cannot be recorded.
    """

    def __init__(self, compute, beside):
        assert beside is None or isinstance(beside, Tape)
        super().__init__()
        self.operations, self.made = [], set()
        with self:
            self.out = compute()
        with torch.inference_mode():
            self.out.fill_(float("nan"))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")
        if function._schema.is_mutable and args[0].untyped_storage().data_ptr() not in self.made:
            out = args[0]
        else:
            out = function(*args, **(kwargs or {}))
            known = {x.untyped_storage().data_ptr() for x in tensors(args)}
            self.made |= {x.untyped_storage().data_ptr() for x in tensors(out)} - known
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.operations:
            for place, new in zip(tensors(out), tensors(function(*args, **kwargs)), strict=True):
                place.copy_(new)


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
    engine = Engine(policy, slots=slots, context=256, drafts=drafts)
    want = engine.run(loops(slots + 1), seeds)
    assert engine.stats["replayed"] == 0
    engine.record = Tape
    got = engine.run(loops(slots + 1), seeds)
    assert tokens_of(got) == tokens_of(want)
    assert all(np.allclose(a[2], b[2], atol=1e-5) for a, b in zip(got, want, strict=True))
    assert engine.stats["replayed"] > engine.stats["steps"] / 3


def test_many_rows_run_as_they_are(policy, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    engine = Engine(policy, slots=3)
    engine.record = Tape
    engine.run([loop([1, 2, 3], 1, i, new) for i, new in enumerate((6, 6, 14))], [0, 1, 2], greedy=True)
    assert 0 < engine.stats["replayed"] <= 8  # of 14 steps: those after the other two have ended


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so():
    policy = of_family("qwen3_5_moe")
    policy.model.set_experts_implementation("eager")  # walks over the experts that were chosen
    engine = Engine(policy, slots=2, context=256)
    want = engine.run(loops(4), list(range(4)))
    engine.record = Tape
    with pytest.warns(UserWarning, match=r"no CUDA graphs: .* \(operation not permitted when stream is capturing\)$"):
        assert tokens_of(engine.run(loops(4), list(range(4)))) == tokens_of(want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an engine says it once
        assert tokens_of(engine.run(loops(4), list(range(4)))) == tokens_of(want)
    assert engine.stats["replayed"] == 0
