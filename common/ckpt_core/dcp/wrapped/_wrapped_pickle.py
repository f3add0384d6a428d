"""The pickle of a wrapped tensor, as `torch.save` writes it.

A load rebuilds the tensor with `weights_only`, so the pickle may name nothing but what is on torch's list of
safe globals, to which libraries add their own kinds of tensors.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from typing_extensions import override

from ckpt_core._torch_internals import inner_tensors, is_wrapped
from ckpt_core.dcp._torch_zip import TensorPickler, build_archive, rebuilding

_MOST_NAMED: Final = 3


def wrapped_pickle(tensor: torch.Tensor) -> bytes:
    """Return the `data.pkl` of a wrapped tensor; storage n is its nth inner tensor.

    Raises:
        ValueError: it holds tensors that its `__tensor_flatten__` does not name.
    """
    twin = _twin(tensor)
    buffer = io.BytesIO()
    _WrappedPickler(buffer, [inner for _, inner in inner_tensors(twin)]).dump(twin)
    return buffer.getvalue()


def problem_of(tensor: torch.Tensor) -> str | None:
    """Return why a load could not rebuild a wrapped tensor; None if it can."""
    kind = f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor made of others"
    try:
        unsafe = _unsafe_names(wrapped_pickle(tensor))
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


def _unsafe_names(record: bytes) -> Sequence[str]:
    """Return the names in a pickle that are not on torch's list of safe globals."""
    archive = build_archive(record, [], offset=0)
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(archive.frames[0])))


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
