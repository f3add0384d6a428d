"""Every function that parses bytes of a checkpoint or of a root, with honest bytes for it."""

from __future__ import annotations

import atexit
import io
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, Counters, TrainState
from ckpt_core.commit import Manifest, Marker, Owner, list_tensors, verify_stock
from ckpt_core.commit._catalog import read_marks, read_pins
from ckpt_core.commit._verify import index_failures, zip_problem
from ckpt_core.dcp import check_metadata, check_stock, entries, load_chunk, load_metadata, load_plain
from ckpt_core.formats.chunks import ChunkTable, decode_table
from ckpt_core.names import DAMAGED, METADATA, PINS, WRITER
from ckpt_core.state._items import decode_buffers, decode_items, encode_buffers
from ckpt_core.storage import LocalStorage
from tests.kit.memory import MemoryStorage

NAME: Final = "step-000000001"
DATA: Final = "__0_0.distcp"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A function that reads one kind of file.

    Attributes:
        read: gives what the bytes say, in a form whose `repr` tells it all.
        seeds: honest bytes.
        checked: whether the bytes have a checksum in them, so that noise must not give another value.
    """

    read: Callable[[bytes], Any]
    seeds: Callable[[], Sequence[bytes]]
    checked: bool = False

    def expected(self, origin: bytes) -> str:
        """What honest bytes say."""
        return _expected(self, origin)


@cache
def _expected(reader: Reader, origin: bytes) -> str:
    return repr(reader.read(origin))


@cache
def _folder() -> Path:
    """A root with a checkpoint of ours and one of stock DCP, for as long as the process lives."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    counters = Counters(seen=(1, 2), name="x", rates=[0.1, None], table={"a": {"b": torch.arange(3)}})
    with CheckpointManager(folder / "run") as manager:
        state = TrainState(model=model, optimizer=optimizer, counters=counters)
        manager.save(1, state, metrics={"loss": 0.5}, annotations={"note": "x"})
        manager.wait()
        (folder / WRITER).parent.mkdir()
        (folder / WRITER).write_bytes((folder / "run" / WRITER).read_bytes())
        manager.pin(1, "a reason")
        manager.mark(1, "a spike")
    values = {"w": torch.randn(3, 4), "n": {"steps": [1, 2.5, "x", None], "t": torch.ones(2).bool()}}
    dcp.save(values, checkpoint_id=folder / "stock", no_dist=True)
    return folder


def _ours(*names: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [(_folder() / "run" / NAME / name).read_bytes() for name in names]


def _at_root(name: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [(_folder() / "run" / name).read_bytes()]


def _stock(name: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [(_folder() / "stock" / name).read_bytes()]


@cache
def _sizes(directory: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (_folder() / directory).iterdir()}


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _manifest(content: bytes) -> Any:
    manifest = Manifest.from_bytes(content)
    return manifest, Marker.of(manifest, content).info(NAME), manifest.to_bytes()


def _marker(content: bytes) -> Any:
    return Marker.from_bytes(content).info(NAME)


def _table(content: bytes) -> Any:
    return list(ChunkTable.from_bytes(zlib.compress(content, level=1), source="chunks-00000.json.z"))


def _tables() -> Sequence[bytes]:
    return [decode_table(content) for content in _ours("chunks-00000.json.z")()]


def _metadata(content: bytes) -> Any:
    """As a load reads it."""
    metadata = load_metadata(content, METADATA)
    stock, ours = _sizes("stock"), _sizes(f"run/{NAME}")
    sizes = {path: max(stock.get(path, 0), ours.get(path, 0)) for path in {*stock, *ours}}

    def size(path: str) -> int:
        if path not in sizes:
            raise FileNotFoundError(path)
        return sizes[path]

    check_metadata(metadata, METADATA, size)
    return entries(metadata)


def _index(content: bytes) -> Any:
    """As the commands read it, without torch."""
    folder = _folder() / "run" / NAME

    def read(path: str) -> bytes:
        return content if path == METADATA else (folder / path).read_bytes()

    return list_tensors(content, METADATA), index_failures(METADATA, _sizes(f"run/{NAME}"), read)


def _chunk(content: bytes) -> Any:
    tensor = load_chunk(content, "a chunk")
    # A tensor of one element is contiguous whatever its strides are, but cannot be viewed as bytes.
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def _zip(content: bytes) -> Any:
    return zip_problem(io.BytesIO(content), 0, len(content)) is None


def _plain(content: bytes) -> Any:
    return load_plain(content, "a small file")


def _tensors() -> list[bytes]:
    return [
        _saved(torch.arange(12.0).reshape(3, 4).t()),
        _saved(torch.nn.Parameter(torch.ones(2).bfloat16())),
    ]


def _values() -> list[bytes]:
    generators = {"python": random.Random(1).getstate(), "torch": torch.get_rng_state()[:64], "step": 3}
    scheduler = {"last_epoch": 7, "_last_lr": [0.1], "milestones": {1: 2}, "name": None, "big": 2**70}
    return [_saved(generators), _saved(scheduler), _saved([(1, "x"), {"a": {2.5}, "b": b"bytes"}])]


def _in_root(name: str, read: Callable[[MemoryStorage], Any]) -> Callable[[bytes], Any]:
    def of(content: bytes) -> Any:
        storage = MemoryStorage()
        storage.replace(name, content)
        return read(storage)

    return of


def _owner(storage: MemoryStorage) -> Any:
    owner = Owner.of(storage)
    return owner, str(owner)


def _items(content: bytes) -> Any:
    return decode_items(content, "rank-00000.json")


def _local(content: bytes) -> Any:
    return decode_buffers(content, "local-00000.json")


def _local_seeds() -> list[bytes]:
    values = {("", "bn.running_mean"): torch.randn(4), ("model", "b"): torch.arange(3)}
    return list(encode_buffers(0, values, values.keys()).values())


@cache
def _stock_copy() -> Path:
    folder = _folder() / "copy"
    shutil.copytree(_folder() / "stock", folder)
    return folder


def _stock_directory(name: str) -> Callable[[bytes], Any]:
    """As it is checked before stock DCP reads it, and as it is verified."""

    def of(content: bytes) -> Any:
        folder = _stock_copy()
        before = (folder / name).read_bytes()
        try:
            (folder / name).write_bytes(content)
            found = verify_stock(LocalStorage(folder.parent), folder.name)
            check_stock(folder)
        finally:
            (folder / name).write_bytes(before)
        return found

    return of


READERS: Final[dict[str, Reader]] = {
    "manifest": Reader(read=_manifest, seeds=_ours("manifest.json")),
    "marker": Reader(read=_marker, seeds=_ours("COMMITTED"), checked=True),
    "chunk table": Reader(read=_table, seeds=_tables),
    "metadata": Reader(read=_metadata, seeds=lambda: [*_ours(METADATA)(), *_stock(METADATA)()]),
    "metadata (cli)": Reader(read=_index, seeds=_ours(METADATA)),
    "chunk zip": Reader(read=_chunk, seeds=_tensors, checked=True),
    "host file": Reader(read=_plain, seeds=_values, checked=True),
    "zip (cli)": Reader(read=_zip, seeds=lambda: [*_tensors(), *_values()]),
    "stock metadata": Reader(read=_stock_directory(METADATA), seeds=_stock(METADATA)),
    "stock data": Reader(read=_stock_directory(DATA), seeds=_stock(DATA)),
    "rank file": Reader(read=_items, seeds=_ours("rank-00000.json", "shared.json")),
    "local file": Reader(read=_local, seeds=_local_seeds),
    "pins": Reader(read=_in_root(PINS, read_pins), seeds=_at_root(PINS)),
    "marks": Reader(read=_in_root(DAMAGED, read_marks), seeds=_at_root(DAMAGED), checked=True),
    "writer": Reader(read=_in_root(WRITER, _owner), seeds=lambda: [(_folder() / WRITER).read_bytes()]),
}
