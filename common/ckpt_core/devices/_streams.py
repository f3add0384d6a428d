"""The seam to accelerators: streams and events, torch's or those of a simulation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, Self, cast, final

import torch

_SHARES_HOST_MEMORY = "mps"
"""Its tensors are copied as the host's are: there is no bus, and torch has no `record_stream` for it."""


class DeviceEvent(Protocol):
    """A moment in the work of a stream: a part of `torch.Event`."""

    def query(self) -> bool:
        """Return whether all work before it has ended."""
        ...

    def synchronize(self) -> None:
        """Block until all work before it has ended."""
        ...


class DeviceStream(Protocol):
    """A queue of work of a device: a part of `torch.Stream`.

    As a context manager it is the current stream of the calling thread.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def wait_stream(self, other: Any) -> None:
        """Order all work enqueued on `other` so far before the next work of this one."""
        ...

    def wait_event(self, event: Any) -> None:
        """Order all work before `event` before the next work of this one."""
        ...

    def record_event(self) -> DeviceEvent:
        """Return the moment after all work enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Block until all work enqueued so far has ended."""
        ...


class Accelerator(Protocol):
    """A kind of device whose work is enqueued on streams."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor, which is not on the CPU, is on such a device."""
        ...

    def current_stream(self, device: torch.device) -> DeviceStream:
        """Return the stream on which the calling thread enqueues its work."""
        ...

    def side_stream(self, device: torch.device) -> DeviceStream:
        """Return the one stream of a device for copies of saves and loads."""
        ...


@final
class _TorchAccelerator:
    """The accelerator that torch was built for or has loaded: CUDA, XPU, or another."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == accelerator_type() != _SHARES_HOST_MEMORY

    def current_stream(self, device: torch.device) -> DeviceStream:
        return cast("DeviceStream", torch.accelerator.current_stream(device))

    @functools.cache  # noqa: B019 - one object, and a stream for each device of the process
    def side_stream(self, device: torch.device) -> DeviceStream:
        # One for all saves, because the allocator separates memory by stream.
        return cast("DeviceStream", torch.Stream(device))


_accelerator: Accelerator = _TorchAccelerator()


def accelerator_type() -> str | None:
    """Return the type of torch's accelerator, as `cuda`; None without one."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def has_streams(tensor: torch.Tensor) -> bool:
    """Return whether work on a tensor is enqueued, not done at the call."""
    return not tensor.is_cpu and _accelerator.holds(tensor)


def current_stream(device: torch.device) -> DeviceStream:
    """Return the stream on which the calling thread enqueues its work."""
    return _accelerator.current_stream(device)


def side_stream(device: torch.device) -> DeviceStream:
    """Return the one stream of a device for copies of saves and loads."""
    return _accelerator.side_stream(device)


def to_host(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[DeviceEvent]]:
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
