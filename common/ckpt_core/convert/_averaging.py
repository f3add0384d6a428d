"""Averages over several checkpoints of one run, window by window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from ckpt_core.convert._laid_out import Computed, Conversion, Late, OutPiece, Span, Wanted
from ckpt_core.errors import IncompatibleCheckpointError, first_of
from ckpt_core.loading import LocatedTensor

_GROUPS: Final = "param_groups"
_GRADIENTS: Final = "gradients"
_MOST_LISTED: Final = 5


def averaged(each: Sequence[Conversion], output: Conversion, decay: float | None) -> Conversion:
    """Put averages into files that were laid out for the newest checkpoint.

    Floating tensors are computed in fp32, or in their own dtype if that is wider: the sum from the oldest to
    the newest, divided by their number; or with `decay` the average that begins with the oldest and becomes
    `average * decay + tensor * (1 - decay)` with each later one. All other tensors, and the states of
    optimizers, are the newest's. What is averaged is of one format and dtype, from the oldest to the newest;
    the output has the dtypes that are written.

    Raises:
        IncompatibleCheckpointError: they hold other tensors, or other shapes.
    """
    columns = [list(_computed(one)) for one in each]
    for older in columns[:-1]:
        _compare(older, columns[-1])
    weights = _weights(each[-1].tensors)
    rows = zip(*columns, strict=True)

    def piece(target: OutPiece) -> OutPiece:
        if isinstance(target, bytes | Late):
            return target
        row = list(enumerate(next(rows)))
        name, newest = row[-1][1]
        counts = name in weights if name in each[-1].tensors else newest.dtype.is_floating_point
        several = [(number, one) for number, (_, one) in row][0 if counts else -1 :]
        return _average_of(several, target.dtype or newest.dtype, decay)

    files = [replace(file, pieces=list(map(piece, file.pieces))) for file in output.files]
    tensors = {f"{number}:{name}": one for number, of in enumerate(each) for name, one in of.tensors.items()}
    return replace(output, files=files, tensors=tensors)


def _computed(found: Conversion) -> Iterator[tuple[str, Computed]]:
    """Yield the tensors in the files, by name in the source or by computation."""
    for piece in (piece for file in found.files for piece in file.pieces):
        if isinstance(piece, Wanted):
            own = found.tensors[piece.name]
            yield piece.name, Computed.of(piece.name, own.shape, piece.dtype or own.dtype)
        elif isinstance(piece, Computed):
            yield piece.what, piece


def _compare(older: Sequence[tuple[str, Computed]], newest: Sequence[tuple[str, Computed]]) -> None:
    forms = [{(name, one.shape) for name, one in several} for several in (older, newest)]
    differing = sorted({name for name, _ in forms[0] ^ forms[1]})
    if differing or len(older) != len(newest):
        raise IncompatibleCheckpointError(
            f"the checkpoints cannot be averaged: {first_of(differing, _MOST_LISTED)} are missing in "
            "some of them, or have another shape. Nothing was written",
            mismatched=differing,
        )


def _weights(tensors: Mapping[str, LocatedTensor]) -> set[str]:
    """Return the floating tensors that are no state of an optimizer, nor gradients."""
    parts = {id(each.part): each.part for each in tensors.values()}.values()
    paths = [path for part in parts for path in part.paths.values()]
    optimizers = {tuple(path[: path.index(_GROUPS)]) for path in paths if _GROUPS in path}
    return {
        name
        for name, each in tensors.items()
        if (each.dtype.is_floating_point or each.dtype.is_complex)
        and each.path[:1] != (_GRADIENTS,)
        and not any(each.path[:end] in optimizers for end in range(len(each.path)))
    }


def _average_of(several: Sequence[tuple[int, Computed]], dtype: torch.dtype, decay: float | None) -> Computed:
    """Return the average of a tensor in checkpoints, whose numbers are in the names."""

    def spans(start: int, stop: int) -> list[Span]:
        return [
            (f"{number}:{name}", a, b) for number, one in several for name, a, b in one.spans(start, stop)
        ]

    def compute(start: int, stop: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        left, found = iter(tensors), list[torch.Tensor]()
        for _, one in several:
            found.append(one.compute(start, stop, [next(left) for _ in one.spans(start, stop)]))
        return (_average(found, decay) if len(found) > 1 else found[0]).to(dtype)

    what = f"average of {[one.what for _, one in several]} by {decay}"
    return Computed(what=what, shape=several[-1][1].shape, dtype=dtype, spans=spans, compute=compute)


def _average(tensors: Sequence[torch.Tensor], decay: float | None) -> torch.Tensor:
    first = tensors[0]
    wide = torch.float32 if first.dtype.itemsize == 1 else torch.promote_types(first.dtype, torch.float32)
    average = first.to(wide, copy=True)
    for each in tensors[1:]:
        if decay is None:
            average += each.to(wide)
        else:  # one operation after the other: a fused one would round otherwise, and not everywhere
            average *= decay
            average += each.to(wide) * (1 - decay)
    return average if decay is not None else average.div_(len(tensors))
