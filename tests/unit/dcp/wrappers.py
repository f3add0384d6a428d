"""Tensors that are made of others, as quantisation libraries make them."""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten


class Blocks(torch.Tensor):
    """Codes with a scale for every block of elements, and a table that all blocks share."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, context: Any = None):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.table, made.context = codes, scale, table, context
        return made

    @classmethod
    def filled(cls, rows: int, columns: int, block: int, *, seed: int = 0, context: Any = None):
        torch.manual_seed(seed)
        codes = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
        return cls(codes, torch.randn(rows * columns // block), torch.arange(5.0), context)

    def __tensor_flatten__(self):
        return ["codes", "scale", "table"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any):
        return cls(inner["codes"], inner["scale"], inner["table"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        one = args[0]
        if func is aten.detach.default:
            return cls(one.codes, one.scale, one.table.clone(), one.context)
        if func is aten.slice.Tensor:
            return cls._sliced(*args)
        if func is aten.view.default and tuple(args[1]) == tuple(one.shape):
            return cls(one.codes, one.scale, one.table, one.context)
        if func is aten.copy_.default:
            for name in ("codes", "scale", "table"):
                getattr(one, name).copy_(getattr(args[1], name))
            return one
        if func is aten.is_pinned.default:
            return False
        raise NotImplementedError(func)

    @classmethod
    def _sliced(cls, one: Any, dim: int, start: int, end: int):
        end = min(end, one.shape[0])
        row, block = math.prod(one.shape[1:]), one.codes.numel() // one.scale.numel()
        if dim or start * row % block or end * row % block:
            raise ValueError("that cuts a block")
        scale = one.scale[start * row // block : end * row // block]
        return cls(one.codes[start:end], scale, one.table.clone(), one.context)


class Pair(torch.Tensor):
    """A tensor made of a plain one and of one that is made of others itself."""

    outer: torch.Tensor
    inner: Blocks

    @staticmethod
    def __new__(cls, outer: torch.Tensor, inner: Blocks):
        made = torch.Tensor._make_wrapper_subclass(cls, outer.shape, dtype=outer.dtype)
        made.outer, made.inner = outer, inner
        return made

    @classmethod
    def filled(cls, seed: int = 0):
        inner = Blocks.filled(4, 4, 4, seed=seed)
        return cls(torch.randn(4, 4), inner)

    def __tensor_flatten__(self):
        return ["outer", "inner"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any):
        return cls(inner["outer"], inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func is aten.detach.default:
            return cls(args[0].outer, args[0].inner)
        raise NotImplementedError(func)


class Unknown(Blocks):
    """One that nobody has put on torch's list of what may be unpickled."""
