"""The engine of conversions: bytes, bounds, and what a kill, a full disk or an occupied place leaves."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.convert import Computed, Late, OutFile, Wanted, _fill, write
from ckpt_core.coordination import JobCoordinator
from ckpt_core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NoRoomError,
    RootBusyError,
)
from ckpt_core.formats.checksums import crc32
from ckpt_core.loading import CommittedFiles, LocatedTensor, located, open_parts
from ckpt_core.loading._checkpoint import _foreign
from ckpt_core.sources import Layout, StoredChunk, StoredTensor
from ckpt_core.storage import LocalStorage, Space, Storage, object_storage
from tests.kit.memory import MemoryStorage
from tests.kit.ranks import run_ranks


def saved(root: Path, state: Mapping[str, torch.Tensor]) -> dict[str, LocatedTensor]:
    with CheckpointManager(root) as manager:
        manager.save(1, {"model": dict(state)})
    return located(open_parts(LocalStorage(root), "step-000000001")[2])


def content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tree(storage: Storage, key: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in storage.list(key):
        path = f"{key}/{entry.name}" if key else entry.name
        found |= tree(storage, path) if entry.is_directory else {path: storage.read_bytes(path)}
    return found


def bucket() -> Storage:
    return object_storage(f"memory://bucket-{uuid.uuid4().hex}/run")


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(_fill, "WINDOW_BYTES", 4096)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randint(-9, 9, (13,), dtype=torch.int8),
        "wide": torch.randn(65, 130),
        "half": torch.randn(3001).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


@pytest.fixture
def tensors(tmp_path, state) -> dict[str, LocatedTensor]:
    return saved(tmp_path / "run", state)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kind", ["local", "bucket", "memory"])
def test_files_hold_their_pieces_in_order_whatever_the_windows_cut(tmp_path, state, tensors, kind):
    storage = {"local": LocalStorage(tmp_path), "bucket": bucket(), "memory": MemoryStorage()}[kind]

    def late(count: int) -> Late:
        return Late(4 * count, lambda crcs: b"".join(crc.to_bytes(4, "big") for crc in crcs[:count]))

    pieces = [b"head", Wanted("model.odd"), Wanted("model.wide"), late(2), Wanted("model.none"), b""]
    pieces += [Wanted("model.half"), Wanted("model.scalar"), Wanted("model.wide", torch.float16), late(6)]
    told: list[int] = []
    files = [OutFile(path="a/one.bin", pieces=pieces), OutFile(path="two.bin", pieces=[b"2" * 5000])]
    write(tensors, files, storage, "out", progress=told.append)

    parts = [content(state[name]) for name in ("odd", "wide", "none", "half", "scalar")]
    parts.append(content(state["wide"].to(torch.float16)))
    crcs = [crc32(part).to_bytes(4, "big") for part in parts]
    expected = b"".join((b"head", *parts[:2], *crcs[:2], *parts[2:], *crcs))
    assert tree(storage, "out") == {"out/a/one.bin": expected, "out/two.bin": b"2" * 5000}
    assert sum(told) == len(expected) + 5000


@pytest.mark.usefixtures("small_windows")
def test_tensors_in_boxes_of_any_division_are_put_together(tmp_path):
    """Chunks as of tensor-parallel ranks, column by column, some of them strided."""
    random.seed(1)
    for number in range(12):
        shape = tuple(random.choice([1, 5, 16, 33]) for _ in range(random.choice([1, 2, 3])))
        tensor = torch.randn(shape)
        cuts = [sorted({0, size, random.randrange(size + 1)}) for size in shape]
        chunks, data = [], b""
        for box in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
            part = tensor[tuple(slice(low, high) for low, high in box)]
            strides = None
            if part.ndim == 2 and number % 2:
                part, strides = part.t(), (1, part.shape[0])
            sizes = tuple(high - low for low, high in box)
            raw = content(part)
            chunks.append(
                StoredChunk(
                    path="data.bin",
                    offset=len(data),
                    offsets=tuple(low for low, _ in box),
                    sizes=sizes,
                    strides=strides,
                    crc32=None if strides else crc32(raw),
                )
            )
            data += raw
        storage = MemoryStorage()
        storage.write_bytes("in/data.bin", data)
        layout = Layout(
            kind="boxes",
            tensors={("w",): StoredTensor(dtype=tensor.dtype, shape=shape, chunks=chunks)},
        )
        found = located({"": _foreign(storage, CommittedFiles(storage, "in", None), layout)})
        files = [OutFile(path="x", pieces=[b"!", Wanted("w"), Wanted("w", torch.float64)])]
        write(found, files, storage, "out")
        assert storage.read_bytes("out/x") == b"!" + content(tensor) + content(tensor.double())


@pytest.mark.usefixtures("small_windows")
def test_what_is_computed_gets_the_elements_it_asks_for(tmp_path, state, tensors):
    wide = state["wide"]
    double = Computed(
        what="transposed sum",
        shape=(65, 130),
        dtype=torch.float32,
        spans=lambda start, stop: [("model.wide", start, stop), ("model.scalar", 0, 1)],
        compute=lambda start, stop, of: of[0] * of[1].float() + torch.arange(start, stop),
    )
    write(tensors, [OutFile(path="x", pieces=[b"odd", double])], LocalStorage(tmp_path), "out")
    expected = wide.reshape(-1) * 2.5 + torch.arange(65 * 130)
    assert (tmp_path / "out/x").read_bytes() == b"odd" + content(expected)


def test_a_place_that_is_one_file_is_written_as_one(tmp_path, state, tensors):
    for storage in (LocalStorage(tmp_path), bucket()):
        write(tensors, [OutFile(path="", pieces=[Wanted("model.wide")])], storage, "deep/w.bin")
        assert storage.read_bytes("deep/w.bin") == content(state["wide"])
        assert [entry.name for entry in storage.list("deep")] == ["w.bin"]
        with pytest.raises(CheckpointExistsError, match=r"w\.bin is a file; nothing was written"):
            write(tensors, [OutFile(path="", pieces=[b"x"])], storage, "deep/w.bin")


def test_an_occupied_place_is_refused_and_an_empty_directory_is_filled(tmp_path, tensors):
    files = [OutFile(path="x", pieces=[Wanted("model.odd")])]
    storage = LocalStorage(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("mine", "link"):
        with pytest.raises(CheckpointExistsError, match="nothing was written"):
            write(tensors, files, storage, name)
    (tmp_path / "empty").mkdir()
    write(tensors, files, storage, "empty")
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "mine", "run"]
    there = bucket()
    there.write_bytes("mine/notes.txt", b"keep")
    with pytest.raises(CheckpointExistsError, match=r"not empty \(notes.txt"):
        write(tensors, files, there, "mine")
    assert tree(there) == {"mine/notes.txt": b"keep"}


class KilledError(BaseException):
    pass


class _Counting:
    """Storage whose process dies at the n-th change; whose writes are cut in the middle."""

    def __init__(self, inner: Storage, most: int, *, renames: bool) -> None:
        self._inner, self._left, self.supports_rename = inner, most, renames
        self.written: list[str] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name not in {"write_pieces", "rename", "exchange", "replace", "delete", "make_directory"}:
            return found

        def counted(key: str, *args: object) -> object:
            if self._left == 0:
                if name == "write_pieces" and self.supports_rename:
                    self._inner.write_bytes(key, b"torn")
                raise KilledError
            self._left -= 1
            if name == "write_pieces":
                self.written.append(key)
            return found(key, *args)

        return counted


@pytest.mark.parametrize("renames", [True, False])
def test_a_kill_at_any_point_leaves_nothing_that_looks_whole_and_is_continued(tmp_path, tensors, renames):
    files = [
        OutFile(path="a", pieces=[b"a", Wanted("model.wide")]),
        OutFile(path="b", pieces=[Wanted("model.half")]),
        OutFile(path="index", pieces=[b"last"]),
    ]
    whole = MemoryStorage()
    write(tensors, files, whole, "out")
    expected = tree(whole)
    for most in itertools.count():
        inner = LocalStorage(tmp_path / str(most)) if renames else bucket()
        inner.check_root()
        first = _Counting(inner, most, renames=renames)
        try:
            write(tensors, files, first, "out")  # type: ignore[arg-type]
            break
        except KilledError:
            pass
        left = tree(inner)
        assert "out/index" not in left or {path: left[path] for path in expected} == expected, most
        again = _Counting(inner, -1, renames=renames)
        write(tensors, files, again, "out")  # type: ignore[arg-type]
        assert tree(inner) == expected, most
        assert not left.keys() & {key.removesuffix(".part") for key in again.written}, most
    assert most > 5


def test_the_draft_of_another_export_is_not_mixed_with_this_one(tmp_path, tensors):
    storage = LocalStorage(tmp_path)
    files = [OutFile(path=name, pieces=[Wanted("model.wide")]) for name in ("old-1", "old-2")]
    with pytest.raises(KilledError):
        write(tensors, files, _Counting(storage, 6, renames=True), "out")  # type: ignore[arg-type]
    assert (tmp_path / ".out.export~").exists()
    write(tensors, [OutFile(path="new", pieces=[b"n"])], storage, "out")
    assert tree(storage, "out") == {"out/new": b"n"}
    assert not (tmp_path / ".out.export~").exists()


def test_two_exports_to_one_place_do_not_meet(tmp_path, tensors):
    storage = LocalStorage(tmp_path)
    busy: list[str] = []

    def other(_: int) -> None:
        with pytest.raises(RootBusyError) as caught:
            write(tensors, files, storage, "out")
        busy.append(str(caught.value))

    files = [OutFile(path="x", pieces=[Wanted("model.wide")])]
    write(tensors, files, storage, "out", progress=other)
    assert len(busy) == 1
    assert "another process is writing" in busy[0]


@pytest.mark.usefixtures("small_windows")
def test_a_window_stays_as_it_is_while_it_is_held_and_its_memory_is_used_again(state, tensors):
    file = OutFile(path="", pieces=[Wanted("model.wide"), Wanted("model.half")])
    expected = content(state["wide"]) + content(state["half"])
    with _fill.FileFill(tensors) as filled:
        assert b"".join(list(filled.windows(file))) == expected  # all of them held
    with _fill.FileFill(tensors) as filled:
        places = {torch.frombuffer(each, dtype=torch.uint8).data_ptr() for each in filled.windows(file)}
    assert len(places) <= 3 < len(expected) // 4096


def test_damage_in_the_source_fails_the_export_before_it_is_there(tmp_path, state, tensors):
    data = next((tmp_path / "run/step-000000001").glob("__0_0.distcp"))
    raw = bytearray(data.read_bytes())
    at = raw.find(content(state["wide"]))
    raw[at + 7777] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match="wide"):
        write(tensors, [OutFile(path="x", pieces=[Wanted("model.wide")])], LocalStorage(tmp_path), "out")
    assert not (tmp_path / "out").exists()
    write(tensors, [OutFile(path="x", pieces=[Wanted("model.half")])], LocalStorage(tmp_path), "out")


def test_damage_in_a_large_tensor_with_one_checksum_is_found_in_every_window(tmp_path):
    tensor = torch.randn(3 << 20)
    for at in (5, 7 << 20):
        data = bytearray(content(tensor))
        crc = crc32(bytes(data))
        data[at] ^= 1
        storage = MemoryStorage()
        storage.write_bytes("in/data.bin", bytes(data))
        chunk = StoredChunk(path="data.bin", offset=0, offsets=(0,), sizes=tuple(tensor.shape), crc32=crc)
        stored = StoredTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), chunks=[chunk])
        layout = Layout(kind="one", tensors={("w",): stored})
        found = located({"": _foreign(storage, CommittedFiles(storage, "in", None), layout)})
        with pytest.raises(CorruptCheckpointError):
            write(found, [OutFile(path="x", pieces=[Wanted("w")])], storage, "out")
        assert not storage.exists("out/x")


def test_a_source_pruned_meanwhile_is_told_as_such(tmp_path, tensors):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.discard("step-000000001")
    with pytest.raises(CheckpointNotFoundError, match="pruned while it was read"):
        write(tensors, [OutFile(path="x", pieces=[Wanted("model.wide")])], LocalStorage(tmp_path), "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_before_and_a_disk_that_fills_up_is_continued(tmp_path, monkeypatch, tensors):
    files = [OutFile(path=name, pieces=[Wanted("model.wide")]) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "space", lambda _: Space(free_bytes=40_000))
        with pytest.raises(NoRoomError, match="nothing was written"):
            write(tensors, files, LocalStorage(tmp_path), "out")
    written: list[str] = []
    plain = LocalStorage.write_pieces

    def fills_up(self: LocalStorage, key: str, pieces: object) -> None:
        if key.endswith("b.part"):
            raise OSError(28, "No space left on device", key)
        written.append(key)
        plain(self, key, pieces)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write_pieces", fills_up)
        with pytest.raises(NoRoomError, match="the same command continues it"):
            write(tensors, files, LocalStorage(tmp_path), "out")
    assert not (tmp_path / "out").exists()
    write(tensors, files, LocalStorage(tmp_path), "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]


def _of_one_rank(root: Path) -> list[int]:
    coordinator = JobCoordinator()
    found = located(open_parts(LocalStorage(root / "run"), "step-000000001")[2])
    files = [OutFile(path=str(number), pieces=[Wanted("model.odd")]) for number in range(5)]
    told: list[int] = []
    write(found, files, LocalStorage(root), "out", coordinator=coordinator, progress=told.append)
    with pytest.raises(CheckpointExistsError, match="is not empty"):
        write(found, files, LocalStorage(root), "run", coordinator=coordinator)
    return told


@pytest.mark.distributed
def test_ranks_share_the_files_and_fail_together(tmp_path, tensors):
    assert tensors
    assert [len(each) for each in run_ranks(_of_one_rank, 2, tmp_path)] == [3, 2]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list("01234")
