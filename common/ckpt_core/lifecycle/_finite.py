"""Whether what is about to be committed is worth it: no NaN and no infinity in weights or loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import torch

from ckpt_core.dcp import Image
from ckpt_core.errors import SaveError

LOSS: Final = "loss"
_MOST_NAMED: Final = 5


def refuse_non_finite_loss(metrics: Mapping[str, float]) -> None:
    """Refuse a save whose metric `loss` is NaN or infinite.

    Raises:
        SaveError: it is.
    """
    loss = metrics.get(LOSS, 0.0)
    if not math.isfinite(loss):
        raise SaveError(f"the metric {LOSS!r} is {loss}, and reject_non_finite is on")


def refuse_non_finite(images: Mapping[str, Image], ignored: Collection[tuple[str, str]]) -> None:
    """Refuse a save whose staged tensors hold NaN or infinities; all copies must have been made.

    Args:
        images: part -> the staged tensors of this rank.
        ignored: (part, key) of module buffers, in which infinities are usual, as in attention masks.

    Raises:
        SaveError: some tensor does; the message names the first.
    """
    found = list(_non_finite(images, ignored))
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise SaveError(
            f"while staging: NaN or infinity in {', '.join(found[:_MOST_NAMED])}{more}, and "
            "reject_non_finite is on; go back to an earlier checkpoint"
        )


def _non_finite(images: Mapping[str, Image], ignored: Collection[tuple[str, str]]) -> Iterator[str]:
    for part, image in images.items():
        for slot, tensor in zip(image.layout.slots, image.targets, strict=True):
            if (part, slot.index.fqn) not in ignored and not _is_finite(tensor):
                yield slot.index.fqn


def _is_finite(tensor: torch.Tensor) -> bool:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.is_floating_point() or values.numel() == 0:
        return True
    if values.dtype.itemsize == 1:
        values = values.float()  # torch finds no extremes of 8-bit floats
    # Without a mask of the tensor's size: NaN goes through to both, an infinity is one of them.
    return all(map(math.isfinite, (extreme.item() for extreme in torch.aminmax(values))))
