"""Copies of stored pieces of a wrapped tensor into a live one.

How inner tensors are cut where a wrapped tensor is cut, only its library knows: both the stored and the live
one are narrowed by it. An inner tensor that is not cut, such as a table of codes, must be the same in all
pieces. A cut through a block that shares a scale is refused by the library, and so by the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

from ckpt_core._torch_internals import inner_tensors, is_wrapped

_Range: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Name of an inner tensor, and the start and shape of the part of it."""


class WrapMismatchError(ValueError):
    """Stored pieces do not make up a live wrapped tensor."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
    """A part of a stored chunk, and its place in the live tensor.

    Attributes:
        stored: the whole chunk.
        offsets: of the part in the chunk.
        into: of the part in the live tensor.
        lengths: of the part.
    """

    stored: torch.Tensor
    offsets: Sequence[int]
    into: Sequence[int]
    lengths: Sequence[int]


def fillings(live: torch.Tensor, pieces: Sequence[StoredPiece]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the copies, target and source, that make `live` what was stored.

    Changes nothing. All tensors are plain.

    Raises:
        WrapMismatchError: they do not fit.
    """
    owners = dict(inner_tensors(live))
    found: dict[_Range, tuple[torch.Tensor, torch.Tensor]] = {}
    for piece in pieces:
        part = _narrowed(piece.stored, piece.offsets, piece.lengths)
        target = _narrowed(live, piece.into, piece.lengths)
        _check_kind(target, part)
        sources = dict(inner_tensors(part))
        for name, view in inner_tensors(target):
            place, copy = _placed(name, view, owners[name], sources[name])
            if place in found and not _same_bytes(found[place][1], copy[1]):
                raise WrapMismatchError(
                    f"its stored pieces have different {name}, which cannot be joined: load on as many ranks "
                    "as saved"
                )
            found[place] = copy
    _check_cover(owners, found)
    return list(found.values())


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    try:
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            if length < tensor.size(dim):
                tensor = tensor.narrow(dim, offset, length)
    except Exception as error:  # the library's own code, which raises anything
        raise WrapMismatchError(
            f"a {type(tensor).__qualname__} of shape {tuple(tensor.shape)} has no part of shape "
            f"{tuple(lengths)} at {tuple(offsets)}: {error!s:.300}. Load on ranks that divide it otherwise, "
            "such as those that saved"
        ) from error
    return tensor


def _placed(
    name: str, view: torch.Tensor, owner: torch.Tensor, source: torch.Tensor
) -> tuple[_Range, tuple[torch.Tensor, torch.Tensor]]:
    """Return the range of an inner tensor that a piece fills, and the copy."""
    if view.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr():
        start = int(view.storage_offset() - owner.storage_offset())
    elif view.shape == owner.shape:
        start, view = 0, owner  # a copy of what is not cut
    else:
        raise WrapMismatchError(f"the {name} of its parts are copies, into which nothing can be loaded")
    if (view.shape, view.dtype) != (source.shape, source.dtype):
        raise WrapMismatchError(
            f"{name} is {source.dtype} {tuple(source.shape)} in the checkpoint and {view.dtype} "
            f"{tuple(view.shape)} here"
        )
    return (name, start, tuple(view.shape)), (view, source)


def _check_kind(live: Any, stored: Any) -> None:
    if not is_wrapped(live) and not is_wrapped(stored):
        return
    if type(live) is not type(stored):
        raise WrapMismatchError(
            f"a {type(stored).__qualname__} in the checkpoint, {type(live).__qualname__} here"
        )
    (names, context), (saved_names, saved) = live.__tensor_flatten__(), stored.__tensor_flatten__()
    if list(names) != list(saved_names) or _described(live, context) != _described(stored, saved):
        raise WrapMismatchError(
            f"a {type(live).__qualname__} of another form: {saved_names}, {saved!r:.200} in the checkpoint, "
            f"{names}, {context!r:.200} here"
        )
    for name in names:
        _check_kind(getattr(live, name), getattr(stored, name))


def _described(tensor: torch.Tensor, context: Any) -> str:
    """Return the context as text, without the dtype that the tensor pretends to have."""
    if isinstance(context, dict):
        return str({key: _described(tensor, value) for key, value in context.items()})
    if isinstance(context, list | tuple):
        return str([_described(tensor, value) for value in context])
    return "" if context is tensor.dtype or context is None else repr(context)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = [each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*pair)


def _check_cover(
    owners: dict[str, torch.Tensor], found: dict[_Range, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for name, owner in owners.items():
        filled = sum(target.numel() for (of, _, _), (target, _) in found.items() if of == name)
        if filled != owner.numel():
            raise WrapMismatchError(
                f"its stored pieces fill {filled} of the {owner.numel()} elements of {name}: the cut goes "
                "through its blocks"
            )
