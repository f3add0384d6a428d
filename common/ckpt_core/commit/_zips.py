"""Whether a torch zip is whole: every CRC32 inside it, and every field that torch's own reader believes."""

from __future__ import annotations

from typing import IO

from ckpt_core.zips import ZipError, read_directory, verify_records


def zip_problem(stream: IO[bytes], offset: int, size: int) -> str | None:
    """Read the zip at `offset` through and say what is wrong with it, or None."""

    def read_at(place: int, count: int) -> bytes:
        stream.seek(offset + place)
        return stream.read(max(0, min(count, size - place)))

    try:
        directory = read_directory(read_at, size)
        if not directory.has_checksums:
            return "written with torch's CRC32 switched off, so that nothing can be verified"
        verify_records(read_at, directory)
    except ZipError as error:
        return f"not a whole torch zip: {error}"
    return None
