"""The frames of compressed data files: where the plain bytes are stored.

A data file is cut into frames, each stored as it is or compressed by itself, so that a range is read without
what is around it. In a tensor they begin with its payload, and are the blocks that have a checksum. The table
of frames lies beside the files, with the small files in which the plain checkpoint differs, its manifest
first. It is read as hostile input.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from secrets import token_hex
from typing import Any, Final, TypeAlias, final

from ckpt_core.crew import run_all
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.formats.chunks import BLOCK_BYTES, table_fields
from ckpt_core.formats.codec import MAX_COUNT, Fields, encode, file_paths
from ckpt_core.formats.nvcomp import nvcomp, zstd_on_gpu
from ckpt_core.formats.zips import ZipError
from ckpt_core.names import FORMAT_VERSION

Buffer: TypeAlias = bytes | memoryview

RAW: Final = 0
"""The codec of a frame that is stored as it is."""
ZSTD: Final = 1
"""The codec of a frame of zstd; 2, 4 and 8 first put the bytes of elements of that size in planes."""
CODECS: Final = frozenset({RAW, ZSTD, 2, 4, 8})

_LEVEL: Final = 1
_THREADS: Final = 4
_MOST_ADDED: Final = 64  # by zstd, to what does not shrink, beside one byte in 256
_COLUMNS: Final = ("codec", "plain_bytes", "stored_bytes")


def descriptors_of(codec: int) -> list[str] | None:
    """Return the descriptors of an entry for DCP; stock refuses those of planes."""
    return None if codec == RAW else ["stream.zstd/1" if codec == ZSTD else "stream.ckpt-planes/1"]


@final
@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one data file, in file order.

    Attributes:
        codec: of each; see `CODECS`.
        plain_bytes: size of each in the plain file, at most `BLOCK_BYTES`.
        stored_bytes: size of each in the file that is stored.
        plain_starts: where each begins in the plain file, and where the last ends.
        stored_starts: the same in the file that is stored.
    """

    codec: Sequence[int]
    plain_bytes: Sequence[int]
    stored_bytes: Sequence[int]
    plain_starts: Sequence[int] = field(init=False)
    stored_starts: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain_starts", tuple(accumulate(self.plain_bytes, initial=0)))
        object.__setattr__(self, "stored_starts", tuple(accumulate(self.stored_bytes, initial=0)))

    def stored_range(self, start: int, stop: int) -> tuple[int, int, int]:
        """Return where a range of the plain file is stored, and how, from begin to end.

        Raises:
            ValueError: it begins or ends inside of what is compressed.
        """
        at, end = (bisect_right(self.plain_starts, each) - 1 for each in (start, stop))
        begins = self.stored_starts[at] + start - self.plain_starts[at]
        ends = self.stored_starts[end] + stop - self.plain_starts[end]
        for place, offset in ((at, start), (end, stop)):
            if offset != self.plain_starts[place] and self.codec[place : place + 1] != [RAW]:
                raise ValueError(f"byte {offset} is inside of what is compressed")
        return begins, ends, max(self.codec[at:end], default=RAW)

    @classmethod
    def of(cls, fields: Fields) -> Frames:
        """Read untrusted fields; ValueError for what cannot be."""
        columns = [fields.get(name, list) for name in _COLUMNS]
        if len(set(map(len, columns))) != 1 or any(not {int}.issuperset(map(type, each)) for each in columns):
            raise ValueError("the frames of a file should be columns of integers, of equal length")
        found = cls(*columns)
        if not CODECS.issuperset(found.codec):
            raise ValueError("a frame is compressed in an unknown way")
        for codec, plain, stored in zip(*columns, strict=True):
            if not 0 < plain <= BLOCK_BYTES or not 0 < stored <= plain + plain // 256 + _MOST_ADDED:
                raise ValueError(f"a frame has {plain} bytes, of which {stored} are stored")
            if codec == RAW and plain != stored:
                raise ValueError("a frame that is stored as it is should have one size")
        if found.stored_starts[-1] > MAX_COUNT:
            raise ValueError("the frames of a file are larger than any file")
        return found


def encode_plain(
    manifest: bytes, small: Mapping[str, bytes], files: Mapping[str, Frames], choices: Mapping[str, str]
) -> bytes:
    """Encode what the plain checkpoint has otherwise; see `PlainFiles`."""
    text = encode(
        {
            "format_version": FORMAT_VERSION,
            "choices": dict(choices),
            "manifest": b64encode(manifest).decode(),
            "small": {path: b64encode(content).decode() for path, content in small.items()},
            "files": [
                {"path": path, **{name: list(getattr(frames, name)) for name in _COLUMNS}}
                for path, frames in files.items()
            ],
        }
    )
    return zlib.compress(text, level=1)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlainFiles:
    """How the files of the plain checkpoint come of those of a compressed one.

    Attributes:
        choices: class of tensors -> codec; what was chosen when the copy was begun.
        manifest: its `manifest.json`.
        small: path -> content of other files that are not the same.
        files: path -> frames of a data file.
    """

    choices: Mapping[str, str]
    manifest: bytes
    small: Mapping[str, bytes]
    files: Mapping[str, Frames]

    @classmethod
    def from_bytes(cls, content: bytes, *, source: str) -> PlainFiles:
        """Read it; `source` names it in errors.

        Raises:
            IncompatibleCheckpointError: it was written by a newer version.
            CorruptCheckpointError: it is malformed, or holds impossible values.
        """
        with table_fields(content, source=source) as fields:
            decode = partial(b64decode, validate=True)
            small = fields.mapping("small", str)
            files = fields.objects("files")
            paths = [each.get("path", str) for each in files]
            file_paths([*small, *paths])
            return cls(
                choices=fields.mapping("choices", str),
                manifest=decode(fields.get("manifest", str)),
                small={path: decode(text) for path, text in small.items()},
                files={path: Frames.of(each) for path, each in zip(paths, files, strict=True)},
            )


def batch_frames() -> int:
    """Return how many frames `compress_all` should get at once: a GPU wants many."""
    return 16 if nvcomp() is None else 256


def compressor() -> str:
    """Name what makes the same frames of the same bytes: zstd and its level here.

    With a GPU every name is another one: its frames of the same bytes could differ.

    Raises:
        IncompatibleCheckpointError: zstandard is not installed.
    """
    zstd = f"zstd {'.'.join(map(str, require_zstandard().ZSTD_VERSION))} at {_LEVEL}"
    return zstd if nvcomp() is None else f"nvCOMP {token_hex(8)}"


def compress(codec: int, content: Buffer) -> Buffer:
    """Compress one frame, by one `compressor` to the same bytes; releases the GIL.

    Raises:
        IncompatibleCheckpointError: zstandard is not installed.
    """
    return content if codec == RAW else _zstd(_in_planes(codec, content))


def _in_planes(codec: int, content: Buffer) -> Buffer:
    if codec == ZSTD or len(content) % codec:
        return content
    import numpy as np

    return np.frombuffer(content, np.uint8).reshape(-1, codec).T.tobytes()


def _zstd(content: Buffer) -> bytes:
    compressed: bytes = require_zstandard().ZstdCompressor(level=_LEVEL).compress(content)
    return compressed


def compress_all(codecs: Sequence[int], blocks: Sequence[Buffer]) -> Sequence[Buffer]:
    """Compress several frames, by nvCOMP where it is, else on threads."""
    found, compressed = list(blocks), [at for at, codec in enumerate(codecs) if codec != RAW]

    def arrange(at: int) -> None:
        found[at] = _in_planes(codecs[at], blocks[at])

    def finish(at: int) -> None:
        frame = by_gpu.get(at)
        found[at] = frame if frame is not None and _holds(frame, found[at]) else _zstd(found[at])

    run_all(arrange, compressed, _THREADS, name="ckpt-compress")
    by_gpu = dict(zip(compressed, zstd_on_gpu([found[at] for at in compressed], BLOCK_BYTES), strict=False))
    run_all(finish, compressed, _THREADS, name="ckpt-compress")
    return found


def _holds(frame: bytes, content: Buffer) -> bool:
    """Return whether readers get the content of a frame that a GPU has made."""
    again, size = bytearray(len(content)), len(content)
    with suppress(ValueError):
        decompress(ZSTD, memoryview(frame), memoryview(again))
        return again == bytes(content) and len(frame) <= size + size // 256 + _MOST_ADDED
    return False


def decompress(codec: int, stored: memoryview, into: memoryview) -> None:
    """Fill memory of the size of the frame; releases the GIL.

    Raises:
        ValueError: it is damaged, or of another size.
        IncompatibleCheckpointError: zstandard is not installed.
    """
    if codec == RAW:
        into[:] = stored
        return
    zstandard, size = require_zstandard(), len(into)
    try:
        # Before anything is allocated: the size that a frame names is believed.
        if zstandard.frame_content_size(stored) != size:
            raise ValueError("it does not hold what its frame should")
        found = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"what is compressed is damaged: {error}") from error
    if len(found) != size:
        raise ValueError("it does not hold what its frame should")
    if codec > ZSTD and not size % codec:
        import numpy as np

        elements, planes = np.frombuffer(into, np.uint8).reshape(-1, codec), np.frombuffer(found, np.uint8)
        for place, plane in enumerate(planes.reshape(codec, -1)):  # three times as fast as by one assignment
            elements[:, place] = plane
    else:
        into[:] = found


def require_zstandard() -> Any:
    """Return the package; raise IncompatibleCheckpointError if it is not installed."""
    try:
        import zstandard
    except ImportError:
        raise IncompatibleCheckpointError(
            "zstd needs a package that is not installed: pip install 'ckpt-suite[compress]'"
        ) from None
    return zstandard


_ZSTD: Final = "stream.zstd"
_MOST_AROUND_BYTES: Final = 1 << 20
"""Of an entry beside its payload."""


def plain_entry(content: bytes, descriptors: Sequence[str], most_bytes: int) -> bytes:
    """Return an entry as it was before the extensions, which DCP names in this order.

    Each has a name and a version. `most_bytes` is the most of its payload: a few bytes could make more than
    there is memory.

    Raises:
        IncompatibleCheckpointError: an extension is unknown, or what it needs is not installed.
        ZipError: it is damaged.
    """
    for descriptor in descriptors:
        name, _, version = descriptor.partition("/")
        if name != _ZSTD or version.partition(".")[0] != "1":
            raise IncompatibleCheckpointError(
                f"it was written through the DCP stream extension {descriptor!r:.80}, which is unknown here; "
                "load it with stock dcp.load"
            )
        content = _decompressed(content, most_bytes + _MOST_AROUND_BYTES)
    return content


def _decompressed(content: bytes, most_bytes: int) -> bytes:
    zstandard = require_zstandard()
    try:
        with zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True) as stream:
            found: bytes = stream.read(most_bytes + 1)
    except zstandard.ZstdError as error:
        raise ZipError(f"what is compressed is damaged: {error}") from error
    if len(found) > most_bytes:
        raise ZipError(f"it holds more than the {most_bytes} bytes that it may have")
    return found
