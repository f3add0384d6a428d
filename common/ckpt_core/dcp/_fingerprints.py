"""Fingerprints: short numbers that show whether ranks hold the same values.

On the CPU a tensor's fingerprint is the CRC-32 of its bytes. On a device it is computed there, because a copy
to the host would be slow: a sum of its words, each times a different factor. Nothing waits for the device
before `encode`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from ckpt_core._torch_internals import inner_tensors, is_wrapped
from ckpt_core.devices import to_host
from ckpt_core.formats.checksums import crc32

SAMPLE_ELEMENTS: Final = 1024
_PIECE_WORDS: Final = 1 << 24
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio's fraction, as a signed integer of 64 bits; odd, so that products keep all bits."""
_PLAIN: Final = (bool, int, float, complex, str, type(None), torch.dtype)


@final
@dataclass(frozen=True, slots=True)
class Written:
    """A tensor whose CRC-32 is that of a slot, known once the data file is written."""

    slot: int


@final
class Fingerprints:
    """Fingerprints of live tensors and plain values, taken on construction.

    Concurrency: made on the main thread; `encode` may be called on another.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._numbers: list[int] = []
        pending: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        self._written: list[tuple[int, int]] = []
        devices: list[str] = []
        for at, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                devices.append(value.device.type)
                self._numbers.append(0)
                pending.setdefault(value.device, []).append((at, _of_all(value)))
                continue
            devices.append("cpu")
            self._numbers.append(_of_host(value))
            if isinstance(value, Written):
                self._written.append((at, value.slot))
        self._kinds = crc32(",".join(devices).encode())
        numbers, self._events = to_host(
            [torch.stack([one for _, one in found]) for found in pending.values()]
        )
        places = ([at for at, _ in found] for found in pending.values())
        self._pending = list(zip(places, numbers, strict=True))

    def encode(self, written: Sequence[int] = ()) -> bytes:
        """Encode four bytes for the kinds of devices, then four for each value.

        `written` is the CRC-32 of every slot of the data file.
        """
        for at, slot in self._written:
            self._numbers[at] = written[slot]
        for event in self._events:
            event.synchronize()
        for places, numbers in self._pending:
            for at, number in zip(places, numbers.tolist(), strict=True):
                self._numbers[at] = (number ^ (number >> 32)) & 0xFFFFFFFF
        self._pending = []
        return b"".join(number.to_bytes(4, "little") for number in (self._kinds, *self._numbers))


def sample(value: Any, turn: int) -> Any:
    """Select a few of a tensor's elements by its shape, different ones at every turn.

    Of a wrapped tensor, one of the tensors that it is made of.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if is_wrapped(value):
        inner = [each for _, each in inner_tensors(value)]
        return sample(inner[turn % len(inner)], turn // len(inner))
    part = value.detach()
    while part.numel() > SAMPLE_ELEMENTS:
        rows = part.shape[0]
        if part.dim() == 1:
            start = (turn * SAMPLE_ELEMENTS) % (rows - SAMPLE_ELEMENTS + 1)
            part = part[start : start + SAMPLE_ELEMENTS]
        else:
            part = part[turn % rows]
    return part


def _of_host(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return crc32(repr(value).encode()) if _is_plain(value) else 0
    running = 0
    for _, inner in inner_tensors(value):
        plain = _plain_bytes(inner)
        size = plain.numel() * plain.element_size()
        if size and plain.data_ptr():  # freed memory is reported by the copy
            # A numpy view costs ten times as much, which matters for many small tensors.
            running = crc32(memoryview((ctypes.c_char * size).from_address(plain.data_ptr())), running)
    return running


def _plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain if plain.is_contiguous() else plain.contiguous()


def _is_plain(value: Any) -> bool:
    """Return whether two such values are equal exactly if their `repr` is."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _of_all(tensor: torch.Tensor) -> torch.Tensor:
    total, *others = [_of_device(inner) for _, inner in inner_tensors(tensor)]
    for other in others:
        total = total * _FACTOR + other
    return total


def _of_device(tensor: torch.Tensor) -> torch.Tensor:
    flat = _plain_bytes(tensor).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not flat.numel():
        return total
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    tail = octets[whole:].to(torch.int64)
    words = octets[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    for piece in (*torch.split(words.view(torch.int64), _PIECE_WORDS), tail):
        factors = torch.arange(1, piece.numel() + 1, dtype=torch.int64, device=tensor.device)
        total = total * _FACTOR + (piece * (factors * _FACTOR | 1)).sum()
    return total
