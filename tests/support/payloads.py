"""Where the first tensor's bytes lie in a data file, by the zip that they are in."""

from __future__ import annotations

import struct

_LOCAL_HEADER = b"PK\x03\x04"


def first_payload(content: bytes) -> int:
    """Find the offset of the first entry `…/data/0`."""
    name = content.index(b"/data/0")
    header = content.rindex(_LOCAL_HEADER, 0, name)
    name_bytes, extra_bytes = struct.unpack_from("<HH", content, header + 26)
    return header + 30 + int(name_bytes) + int(extra_bytes)
