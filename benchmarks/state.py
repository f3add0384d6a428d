"""The states that are saved: many tensors, large ones, or a mixture as of a transformer in training."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import final

import torch

GIB = 1 << 30
LARGE_TENSORS = 16
_MULTIPLE = 64  # as the sizes of real layers; torchsnapshot 0.1 cannot save bf16 of an odd number of elements


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """How large a state is and how it is cut; `even` tensors are all of one size."""

    gib: float
    tensors: int
    even: bool

    def __str__(self) -> str:
        sizes = "of equal size" if self.even else "of 2 KiB and up, half fp32, half bf16"
        return f"{self.gib:g} GiB in {self.tensors:,} tensors {sizes}"


def state_shape(options: argparse.Namespace) -> StateShape:
    """What the command line asks for."""
    if options.many:
        return StateShape(gib=options.gib or 0.3, tensors=options.many, even=True)
    if options.large:
        return StateShape(gib=options.gib or 2.0, tensors=LARGE_TENSORS, even=True)
    return StateShape(gib=options.gib or 1.0, tensors=options.tensors or 330, even=False)


def make_state(shape: StateShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tensors whose bytes add up to `shape.gib`, but for rounding."""
    return {
        name: torch.empty(numel, dtype=dtype, device=device).normal_()
        for name, (numel, dtype) in tensor_sizes(shape).items()
    }


def tensor_sizes(shape: StateShape) -> dict[str, tuple[int, torch.dtype]]:
    """Name -> elements and dtype."""
    weights = [1 if shape.even else 1 + (index % 7) ** 3 for index in range(shape.tensors)]
    dtypes = [torch.float32, torch.float32 if shape.even else torch.bfloat16]
    unit = shape.gib * GIB / sum(weights)
    smallest = _MULTIPLE if shape.even else 512
    return {
        f"layer{index}.weight": (
            max(smallest, int(unit * weight) // dtype.itemsize // _MULTIPLE * _MULTIPLE),
            dtype,
        )
        for index, weight in enumerate(weights)
        for dtype in (dtypes[index % 2],)
    }
