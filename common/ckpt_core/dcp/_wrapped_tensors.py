"""Tensors made of others: stored as stock DCP does, loaded by their inner tensors.

A load rebuilds the tensor with `weights_only`, so its pickle may name nothing but what is on torch's list of
safe globals, to which libraries add their own kinds of tensors.

How inner tensors are cut where a wrapped tensor is cut, only its library knows: both the stored and the live
one are narrowed by it. An inner tensor that is not cut, such as a table of codes, must be the same in all
pieces. A cut through a block that shares a scale is refused by the library, and so by the load.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

import torch
from typing_extensions import override

from ckpt_core._torch_internals import inner_tensors, is_wrapped, same_bytes
from ckpt_core.dcp._tensor_reads import Cut
from ckpt_core.dcp._torch_zip import TensorPickler, build_archive, rebuilding

_MOST_NAMED: Final = 3
_Range: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Name of an inner tensor, and the start and shape of the part of it."""


def wrapped_pickle(tensor: torch.Tensor) -> bytes:
    """Return the `data.pkl` of a wrapped tensor; storage n is its nth inner tensor."""
    twin = _twin(tensor)
    buffer = io.BytesIO()
    _WrappedPickler(buffer, [inner for _, inner in inner_tensors(twin)]).dump(twin)
    return buffer.getvalue()


def problem_of(tensor: torch.Tensor) -> str | None:
    """Return why a load could not rebuild a wrapped tensor; None if it can."""
    kind = f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor made of others"
    try:
        archive = io.BytesIO(build_archive(wrapped_pickle(tensor), [], offset=0).frames[0])
        unsafe = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(archive))
    except Exception as error:  # noqa: BLE001 - the library's own code, which raises anything
        return f"{kind}, which its library cannot take apart or pickle ({type(error).__name__}: {error})"
    if not unsafe:
        return None
    listed = ", ".join(unsafe[:_MOST_NAMED])
    return (
        f"{kind}, and a load would need {listed}, which is not on torch's list of what may be unpickled: "
        "call torch.serialization.add_safe_globals([...]) in every run if you trust it, or save the plain "
        "tensors that it is made of"
    )


def _twin(tensor: Any) -> torch.Tensor:
    """Return a tensor of the same kind in host memory that is never touched."""
    if not is_wrapped(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _twin(getattr(tensor, name)) for name in names}
    twin: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return twin


@final
class _WrappedPickler(TensorPickler):
    def __init__(self, buffer: io.BytesIO, inner: Sequence[torch.Tensor]) -> None:
        super().__init__(buffer, protocol=2)
        self._keys = {id(each): str(key) for key, each in enumerate(inner)}

    @override
    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, torch.Tensor) or is_wrapped(obj):
            return NotImplemented
        if id(obj) not in self._keys:
            raise ValueError("it holds a tensor that its __tensor_flatten__ does not name")
        return rebuilding(obj.dtype, tuple(obj.shape), self._keys[id(obj)])


class WrapMismatchError(ValueError):
    """Stored pieces do not make up a live wrapped tensor."""


def fillings(
    live: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, Cut]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of plain tensors, target and source, that restore `live`.

    Changes nothing. Of each whole stored chunk, `pieces` tells the part and its place in the live tensor.
    """
    owners = dict(inner_tensors(live))
    found: dict[_Range, tuple[torch.Tensor, torch.Tensor]] = {}
    for stored, item in pieces:
        part = _narrowed(stored, item.storage_offsets, item.lengths)
        target = _narrowed(live, item.dest_offsets, item.lengths)
        _check_kind(target, part)
        sources = dict(inner_tensors(part))
        for name, view in inner_tensors(target):
            place, copy = _placed(name, view, owners[name], sources[name])
            if place in found and not same_bytes(found[place][1], copy[1]):
                raise WrapMismatchError(
                    f"its stored pieces have different {name}, which cannot be joined: load on as many ranks "
                    "as saved"
                )
            found[place] = copy
    for name, owner in owners.items():
        filled = sum(target.numel() for (of, _, _), (target, _) in found.items() if of == name)
        if filled != owner.numel():
            raise WrapMismatchError(
                f"its stored pieces fill {filled} of the {owner.numel()} elements of {name}: the cut goes "
                "through its blocks"
            )
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
