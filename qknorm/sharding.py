"""How the operators run on ``DTensor``s: which placements may go in, and which then come out.

Imports ``torch.distributed.tensor``, so ``ops`` imports this file only where that is loaded already.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

Rules = list[tuple[list[Any], list[Any]]]  # placements of the outputs, and of the tensors among the inputs


def register() -> None:
    """Teach DTensor the four operators: rows may be split in any way, the last dimension and the weight may not."""
    ops = torch.ops.qknorm
    register_sharding([ops.rms_norm.default, ops.rms_norm_opaque.default])(_forward)
    register_sharding([ops.rms_norm_backward.default, ops.rms_norm_backward_opaque.default])(_backward)


# In both, a tensor is a DTensorSpec; a rule is the placements of the outputs and those of the tensors among the inputs,
# on one dimension of the mesh.


def _forward(x: Any, weight: Any, *options: Any) -> Rules:
    check_last_dim(x)
    weights = [] if weight is None else [Replicate()]
    return [([split, split], [split, *weights]) for split in _splits(x)]


def _backward(
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    eps: float,
    unit_offset: bool = False,
    rounding: str = "once",
    mask: int = 3,
    revision: int = 0,
) -> Rules:
    check_last_dim(x)
    weights = [] if weight is None else [Replicate()]
    rules: Rules = []
    for split in _splits(x):
        # A gradient that is not wanted is an empty tensor.
        dx = split if mask & 1 else Replicate()
        dw = Partial() if weights and mask & 2 and split != Replicate() else Replicate()
        rules.append(([dx, dw], [split, split, *weights, split]))
    return rules


def _splits(x: Any) -> list[Any]:
    """Whole, or split along any dimension but the last; x's own placements include those of DTensor's strided kind."""
    splits = [Replicate(), *(Shard(dim) for dim in range(x.ndim - 1))]
    return splits + [p for p in x.placements if not p.is_partial() and p not in splits]


def check_last_dim(x: Any, name: str = "x") -> None:
    """Raise ValueError where a DTensor, or the spec of one, is split along its last dimension."""
    placements = getattr(x, "placements", ())  # other subclasses of Tensor have none
    if any(getattr(placement, "dim", None) == x.ndim - 1 for placement in placements):
        raise ValueError(
            f"{name} is sharded along its last dimension, which the norm sums over: it is {list(x.shape)} with "
            f"placements {placements}; redistribute it before the norm, to Replicate() or Shard of another dimension"
        )


def reduced(dw: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a weight summed over the processes, with the placements of the weight; no DTensor as it is."""
    if not isinstance(dw, DTensor) or not isinstance(weight, DTensor):
        return dw
    return dw.redistribute(placements=[Replicate() if p.is_partial() else p for p in weight.placements])
