"""zstd by NVIDIA's nvCOMP, many frames at once.

It is used where its package and a GPU are. Its frames are those of zstd: whatever reads frames reads them, on
any machine. It has never run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from ckpt_core.disclosure import logger_of

_logger = logger_of(__name__)
_of_thread: Final = threading.local()
"""Its `codec`: each belongs to one thread."""
_unusable: Final = list[str]()
"""Why nvCOMP is not tried again in this process."""


def nvcomp() -> Any:
    """Return the package, as far as it can be imported and has not failed; else None."""
    if _unusable:
        return None
    try:
        return import_module("nvidia.nvcomp")
    except (ImportError, OSError) as error:  # not there, or without a library that it needs
        _unusable.append(str(error))
        return None


def zstd_on_gpu(blocks: Sequence[bytes | memoryview], most_bytes: int) -> Sequence[bytes]:
    """Compress blocks of at most `most_bytes` to frames; to none without a GPU."""
    package = nvcomp()
    if package is None or not blocks:
        return ()
    import numpy as np

    try:
        if not hasattr(_of_thread, "codec"):
            kind = package.BitstreamKind.RAW
            _of_thread.codec = package.Codec(
                algorithm="Zstd", bitstream_kind=kind, uncomp_chunk_size=most_bytes
            )
        arrays = package.as_arrays([np.frombuffer(each, np.uint8) for each in blocks])
        return [np.asarray(each).tobytes() for each in _of_thread.codec.encode(arrays.cuda()).cpu()]
    except Exception as error:  # noqa: BLE001 - no driver, no device, no room: the processor compresses as well
        _unusable.append(str(error))
        _logger.warning("nvCOMP cannot be used, so frames are compressed without a GPU: %s", error)
        return ()
