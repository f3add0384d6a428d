"""Where the first tensor's bytes lie in a data file, by the layout of `torch.save` that they are in."""

from __future__ import annotations

import pickle
import struct

_LOCAL_HEADER = b"PK\x03\x04"
_KEYS = pickle.dumps(["0"], protocol=2)
"""Of storages, before their number of elements, in the layout that torch wrote before zips."""


def first_payload(content: bytes) -> int:
    """Find the offset of the first entry `…/data/0`, or of the first storage that is in no zip."""
    if not content.startswith(_LOCAL_HEADER):
        return content.index(_KEYS) + len(_KEYS) + 8
    name = content.index(b"/data/0")
    header = content.rindex(_LOCAL_HEADER, 0, name)
    name_bytes, extra_bytes = struct.unpack_from("<HH", content, header + 26)
    return header + 30 + int(name_bytes) + int(extra_bytes)
