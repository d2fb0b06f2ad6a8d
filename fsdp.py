"""FSDP2: weights, gradients and optimizer state of a policy, each process holding its share of every tensor.

    shard(policy, device, "bfloat16")        once, on every rank: fully_shard of each decoder layer, and of what is left
    policy(token_logps, ids, mask)           a forward gathers a layer, runs it, lets it go; so does the backward
    with whole(policy): engine.run(...)      rollouts: all weights on every rank until the block ends
    weights(policy), optimizer_state(...)    the whole model and optimizer, for a checkpoint of any world size

Weights and optimizer stay in float32. With a dtype beside, what a layer gathers and computes is of that type, rollouts
too, and gradients are reduced in float32: FSDP2's mixed precision, which one process may use as well.

A forward or backward is a joint act of all ranks: each must run as many of them as the others, an idle rank one that
counts nothing. Inside `whole` there is nothing to gather, so each rank rolls out at its own pace; what it costs is one
copy of the weights per rank during the rollouts, beside its shares. Models that do not fit on one device need a remote
engine.

torch's own fully_shard, and not accelerate's preparation of it: that one leaves a CPU's model unsharded without a word,
so nothing of it could be tested on gloo. The gradients of unsharded training are summed in model.optimizer_step.
Left out: offloading to the CPU, tensor parallelism.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from options import BadInput
import common  # noqa: F401  before torch: it sets the OpenMP environment
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from model import Policy, layers_of, load, recompute


IDLE = ([0, 0], [0, 1])  # ids and mask of a rank that has nothing to read while others have


class Root(nn.Module):
    """The module that all weights hang on. Its forward is any function of the model: what runs in it may call parts of
    the model that are no forward of the whole, a hidden state or a chunk of the LM head."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function, *args, **kwargs):
        return function(self.model, *args, **kwargs)


def check_precision(cfg: Any) -> None:
    """BadInput for a stage whose precision is that of its shards, and which has none."""
    if cfg.precision != "float32" and not cfg.shard:
        raise BadInput(f"--precision {cfg.precision} is that of --shard, which one process may use as well")


def to_train(path: str | Path, cfg: Any, device: torch.device) -> Policy:
    """The policy at `path`, for a stage with the options shard and recompute.

    One that is to be sharded waits on the CPU: no GPU ever holds more than its share and what it computes with.
    """
    policy = load(path, "cpu" if cfg.shard else device)
    if cfg.recompute:
        recompute(policy.model)
    return policy


def shard(policy: Policy, device: torch.device, precision: str = "float32") -> None:
    """Leave this rank its share of each weight on `device`, in place; the policy may stand on the CPU before.

    precision: of forward, backward and rollouts. An MTP head is not sharded. To be called before the optimizer is made,
    which must see the shares.
    """
    dtype = None if precision == "float32" else getattr(torch, precision)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)}
    for layer in layers_of(policy.model):
        fully_shard(layer, **how)
    # the head comes last: no use to let it go
    policy.root = fully_shard(Root(policy.model), reshard_after_forward=False, **how)
    if policy.mtp:
        policy.mtp.to(device)
    policy.root(lambda model: None)  # a first forward makes it the root; the engine would begin with a layer
    policy.root.reshard()  # an optimizer must be given the shares


@contextmanager
def whole(policy: Policy) -> Iterator[None]:
    """Inside, every rank holds all weights, and no forward of the model waits for another rank."""
    parts = [m for m in policy.root.modules() if isinstance(m, FSDPModule)] if policy.root else []
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    head = [*policy.mtp.parameters()] if policy.mtp else []
    kept = [p.data for p in head]
    for p in head:  # it drafts in the precision of the policy, and stays as exact as it is
        p.data = p.data.to(policy.model.dtype)
    try:
        yield
    finally:
        for p, data in zip(head, kept):
            p.data = data
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not policy.root, recurse=False)


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def weights(policy: Policy) -> dict[str, Tensor] | None:
    """All weights by their names in the model, tied ones once; {} on ranks other than 0, None if nothing is sharded."""
    if not policy.root:
        return None
    policy.root.reshard()  # a forward without a backward leaves what is not in a layer gathered
    names = dict(policy.model.named_parameters()) | dict(policy.model.named_buffers())
    found = get_model_state_dict(policy.root, options=WHOLE)
    found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    return {name: tensor for name, tensor in found.items() if name in names}


def optimizer_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict:
    """The state of the optimizer by names of weights, the same sharded and not; {} before its first step."""
    if not optimizer.state:
        return {}
    if policy.root:
        policy.root.reshard()
    return get_optimizer_state_dict(policy.root or Root(policy.model), optimizer, options=WHOLE)


def load_optimizer_state(policy: Policy, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Give an optimizer that has not stepped yet the `optimizer_state` of another, of whatever world size.

    Each rank reads the whole and keeps its share.
    """
    if state:
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(policy.root or Root(policy.model), optimizer, state, options=options)
