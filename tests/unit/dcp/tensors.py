"""Tensors of every dtype and shape that `torch.save` can hold, and their bytes."""

from __future__ import annotations

import io

import torch

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3), (2, 1, 3, 5)]


def saves(dtype: torch.dtype) -> bool:
    """Whether torch itself can save and load a tensor of this dtype."""
    try:
        buffer = io.BytesIO()
        torch.save(torch.zeros(2, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (RuntimeError, TypeError, KeyError, AttributeError, NotImplementedError):
        return False
    return True


def all_dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    plain = {dtype for dtype in found if not str(dtype).startswith(("torch.q", "torch.bits"))}
    return sorted((dtype for dtype in plain if saves(dtype)), key=str)


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose bytes are a pattern; for bool they are 0 and 1, all others take any."""
    count = torch.Size(shape).numel() * dtype.itemsize
    pattern = torch.arange(count, dtype=torch.int64).mul(37).remainder(2 if dtype == torch.bool else 251)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return pattern.to(torch.uint8).view(dtype).reshape(shape)


def content(tensor: torch.Tensor) -> bytes:
    """The raw bytes, so that NaNs and dtypes without arithmetic can be compared."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return b""
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
