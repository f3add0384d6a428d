"""Streams of accelerators by torch's generic names, and pinned buffers of loads."""

from ckpt_core.devices._fetching import DeviceFetch, fetch_to
from ckpt_core.devices._streams import accelerator_type, current_stream, has_streams, side_stream, to_host

__all__ = [
    "DeviceFetch",
    "accelerator_type",
    "current_stream",
    "fetch_to",
    "has_streams",
    "side_stream",
    "to_host",
]
