"""The seam to accelerators: their streams and events."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import torch

_SHARES_HOST_MEMORY = "mps"
"""Its tensors are copied as the host's are: there is no bus, and torch has no `record_stream` for it."""


@final
class _Accelerator:
    """The accelerator that torch was built for or has loaded: CUDA, XPU, or another.

    `tests/streams` puts a simulation in its place.
    """

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == accelerator_type() != _SHARES_HOST_MEMORY

    def current_stream(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @functools.cache  # noqa: B019 - one object, and a stream for each device of the process
    def side_stream(self, device: torch.device) -> torch.Stream:
        # One for all saves, because the allocator separates memory by stream.
        return torch.Stream(device)


_accelerator = _Accelerator()


def accelerator_type() -> str | None:
    """Return the type of torch's accelerator, as `cuda`; None without one."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def has_streams(tensor: torch.Tensor) -> bool:
    """Return whether work on a tensor is enqueued, not done at the call."""
    return not tensor.is_cpu and _accelerator.holds(tensor)


def current_stream(device: torch.device) -> torch.Stream:
    return _accelerator.current_stream(device)


def side_stream(device: torch.device) -> torch.Stream:
    """Return the one stream of a device for copies of saves and loads."""
    return _accelerator.side_stream(device)


def to_host(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Event]]:
    """Copy tensors to new host memory, without waiting for a device.

    Returns:
        The copies, and the events after which they have the values of the moment of the call.
    """
    copies = [_to_host(each.detach()) for each in tensors]
    devices = {each.device for each in tensors if has_streams(each)}
    return copies, [current_stream(device).record_event() for device in devices]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not has_streams(tensor):
        return tensor.clone() if tensor.is_cpu else tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
