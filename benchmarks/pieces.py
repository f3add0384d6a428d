"""Memory of whole pages, and work on it piece by piece: what the limits of a machine are measured with."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable

import torch

PIECE_BYTES = 16 << 20


def packed(tensors: Iterable[torch.Tensor]) -> mmap.mmap:
    """Whole pages of memory that hold the bytes of all tensors, one after the other, and then zeroes."""
    sources = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    memory = pages(sum(source.numel() for source in sources))
    target, offset = torch.frombuffer(memory, dtype=torch.uint8), 0
    for source in sources:
        target[offset : offset + source.numel()].copy_(source)
        offset += source.numel()
    return memory


def pages(size_bytes: int) -> mmap.mmap:
    """Memory of its own that begins and ends with a page; it is not there before it is touched."""
    return mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def each_piece(
    size_bytes: int, work: Callable[[slice], None], *, threads: int, piece_bytes: int = PIECE_BYTES
) -> None:
    """Do `work` for every piece, the threads in turns.

    Raises:
        OSError: the first of those that `work` raised.
    """
    failures: list[OSError] = []

    def run(index: int) -> None:
        try:
            for start in range(index * piece_bytes, size_bytes, threads * piece_bytes):
                work(slice(start, min(start + piece_bytes, size_bytes)))
        except OSError as error:
            failures.append(error)

    others = [threading.Thread(target=run, args=(index,)) for index in range(1, threads)]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
