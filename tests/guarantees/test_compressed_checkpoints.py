"""Compressed checkpoints: the same state and identity, read by everything, hostile bytes included."""

from __future__ import annotations

import filecmp
import json
import random
import shutil
import sys
import threading
import zlib
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_core import CheckpointManager, KeepLatest, TrainState, Upload
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Manifest, Marker, plain_storage, verify
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.formats.checksums import checksum
from ckpt_core.formats.codec import Fields
from ckpt_core.formats.frames import Frames, PlainFiles, compress, decompress
from ckpt_core.loading import located, open_parts
from ckpt_core.names import PLAIN
from ckpt_core.reading import Engine, RangeRead
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers import CopyTerms, copy_checkpoint
from ckpt_core.tiers._compressing import auto, chunk_tables
from ckpt_core.types import FileEntry
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import bucket_like

NAME = "step-000000003"
CODECS = ("zstd", "planes")
MIB = 1 << 20


def compress_to(target, source, codec, **options):
    """Copy the checkpoint compressed, as uploads and `ckpt cp` do."""
    copy_checkpoint(source, target, NAME, CopyTerms(compress=codec, **options))


class Odd(torch.nn.Module):
    """Every kind of tensor; most shrink, one does not, and most are larger than a block."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        normal = torch.randn(300, 1100, generator=g) * 0.02
        self.weight = torch.nn.Parameter(normal)
        self.turned = torch.nn.Parameter(normal[:100].t())
        tensors = {
            "brain": normal.bfloat16(),
            "of_half": normal.half(),
            "eight": normal[:200].to(torch.float8_e4m3fn),
            "of_double": normal[:200].double(),
            "complex": torch.complex(normal[:100], normal[100:200]),
            "wide": torch.complex(normal[:50].double(), normal[50:100].double()),
            "count": torch.arange(140_000) + seed,
            "mask": normal > 0.03,
            "noise": torch.randint(0, 256, (99_999,), generator=g, dtype=torch.uint8),
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 5),
        }
        for name, value in tensors.items():
            self.register_buffer(name, value)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return all(
        torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
        if a.numel() and a.dim()
        else torch.equal(a, b)
        for a, b in zip(*(state.values() for state in states), strict=True)
    )


class Little(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter((torch.randn(250, 300, generator=g) * 0.02).bfloat16())
        self.register_buffer("count", torch.arange(140_000) + seed)


def load(root: Path | str, kind: type[torch.nn.Module] = Odd) -> torch.nn.Module:
    model = kind(99)
    with CheckpointManager(root) as checkpoints:
        checkpoints.load(TrainState(model=model))
    return model


def saved(root: Path, model: torch.nn.Module) -> Path:
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(3, TrainState(model=model))
    return root


def compressed_each(plain: Path, folder: Path) -> dict[str, Path]:
    for codec in CODECS:
        assert main(["cp", str(plain), str(folder / codec), "--compress", codec]) == 0
    return {codec: folder / codec for codec in CODECS}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("plain"), Odd(1))


@pytest.fixture(scope="module")
def made(plain, tmp_path_factory) -> dict[str, Path]:
    return compressed_each(plain, tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def little(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("little"), Little(1))


@pytest.fixture(scope="module")
def little_made(little, tmp_path_factory) -> dict[str, Path]:
    return compressed_each(little, tmp_path_factory.mktemp("little-made"))


def test_stock_dcp_reads_zstd_bit_for_bit_and_refuses_planes_by_name(made):
    state = {"model": Odd(99).state_dict()}
    dcp.load(state, checkpoint_id=made["zstd"] / NAME, no_dist=True)
    model = Odd(98)
    model.load_state_dict(state["model"])
    assert same(model, Odd(1))
    with pytest.raises(CheckpointException, match=r"stream\.ckpt-planes"):
        dcp.load(state, checkpoint_id=made["planes"] / NAME, no_dist=True)


@pytest.mark.parametrize("codec", CODECS)
def test_every_reader_sees_the_plain_checkpoint(plain, made, codec, tmp_path, capsys):
    root, size = made[codec], sum(each.stat().st_size for each in (plain / NAME).iterdir())
    assert sum(each.stat().st_size for each in (root / NAME).iterdir()) < 0.95 * size
    assert same(load(root), Odd(1))
    assert main(["verify", str(root)]) == 0
    assert main(["diff", str(plain), str(root)]) == 0
    assert main(["export", str(root), str(tmp_path / "out.pt"), "--to", "torch"]) == 0
    capsys.readouterr()
    assert main(["show", str(root)]) == 0
    assert ("stock dcp.load cannot read it" in capsys.readouterr().out) == (codec == "planes")


@pytest.mark.parametrize("codec", CODECS)
def test_made_plain_again_it_is_the_same_byte_by_byte(plain, made, codec, tmp_path):
    other = "planes" if codec == "zstd" else "zstd"
    assert main(["cp", str(made[codec]), str(tmp_path / "b"), "--compress", other]) == 0
    assert main(["cp", str(tmp_path / "b"), str(tmp_path / "c"), "--compress", "none"]) == 0
    names = [each.name for each in (plain / NAME).iterdir()]
    assert sorted(each.name for each in (tmp_path / "c" / NAME).iterdir()) == sorted(names)
    assert filecmp.cmpfiles(plain / NAME, tmp_path / "c" / NAME, names, shallow=False)[0] == names
    # And compressed in the same way from another form, the same as from the plain one.
    names = [each.name for each in (made[other] / NAME).iterdir()]
    assert filecmp.cmpfiles(made[other] / NAME, tmp_path / "b" / NAME, names, shallow=False)[0] == names


def test_a_root_that_has_it_in_any_form_has_it(plain, made, capsys):
    before = Catalog(LocalStorage(made["zstd"])).find(step=3)
    for source, form in ((plain, []), (plain, ["--compress", "planes"]), (made["planes"], [])):
        assert main(["cp", str(source), str(made["zstd"]), *form]) == 0
        assert capsys.readouterr().out.startswith("there")
    assert Catalog(LocalStorage(made["zstd"])).find(step=3) == before
    assert before.content_sha256 == Catalog(LocalStorage(plain)).find(step=3).manifest_sha256


class Counting(LocalStorage):
    """Counts the bytes of ranged reads."""

    bytes_read = 0

    @contextmanager
    def open_ranges(self, key):
        with super().open_ranges(key) as reader:
            yield Counted(self, reader)


class Counted:
    def __init__(self, storage, reader) -> None:
        self.storage, self.reader, self.size_bytes = storage, reader, reader.size_bytes

    def read_into(self, offset, buffer) -> None:
        self.storage.bytes_read += len(buffer)
        self.reader.read_into(offset, buffer)


@pytest.mark.parametrize("codec", CODECS)
def test_a_range_reads_little_more_than_its_bytes(tmp_path, codec):
    model, root = torch.nn.Linear(2048, 2048, bias=False), LocalStorage(tmp_path)
    torch.nn.init.normal_(model.weight, std=0.02)
    saved(tmp_path / "a", model)
    compress_to(root, LocalStorage(tmp_path / "a"), codec)
    counted = Counting(tmp_path)
    part = open_parts(counted, NAME)[2][""]
    place = next(place for place in part.find(part.metadata.storage_data).values() if place.dtype)
    start, stop = 5 * MIB + 12345, 13 * MIB + 54321
    into = memoryview(bytearray(stop - start))
    counted.bytes_read = 0
    with Engine(part.files.storage, NAME) as engine:
        read = RangeRead(payload=place.payload, start=start, stop=stop, into=into)
        assert engine.verify([read], on_arrival=True) == []
        engine.fetch([read])
    assert into == model.weight.detach().numpy().tobytes()[start:stop]
    assert counted.bytes_read <= 1.1 * (stop - start)


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_a_compressing_copy_that_fails_at_any_operation_is_completed_by_the_next(little, tmp_path, kind):
    def copy(target, codec="planes"):
        compress_to(target, LocalStorage(little), codec)

    def make(number: int):
        return LocalStorage(tmp_path / str(number)) if kind == "local" else bucket_like()

    clean = FaultyStorage(make(-1))
    copy(clean)
    for number in range(len(clean.operations)):
        target = make(number)
        failing = FaultyStorage(target, [Fault(nth=number, error=OSError(121, "gone"))])
        with suppress(Exception):  # any error, so long as nothing is lost
            copy(failing)
        assert all(verify(target, info.name) == [] for info in Catalog(target).committed()), number
        # Every other next one is of another form.
        copy(target, "planes" if number % 2 else None)
        assert [entry.name for entry in target.list("")] == [NAME]
        assert verify(target, NAME) == []
        extra = {each.name for each in target.list(NAME)} - {
            e.path for e in Catalog(target).manifest(NAME).files
        }
        assert extra == {"COMMITTED", "manifest.json"}


def test_a_limited_rate_leaves_time_to_make_the_next_frames(plain, tmp_path):
    sent = list[int]()

    def pace(pieces):
        for piece in pieces:
            sent.append(len(piece))
            yield piece

    compress_to(LocalStorage(tmp_path), LocalStorage(plain), "zstd", pace=pace)
    files = PlainFiles.from_bytes((tmp_path / NAME / PLAIN).read_bytes(), source=PLAIN).files
    (path, frames), *others = files.items()
    size = (tmp_path / NAME / path).stat().st_size
    assert not others
    assert len(frames.codec) > 16
    # A limit counts the time since one piece: were each frame one, the next would be made after the wait.
    assert any(sum(sent[at : at + 2]) == size for at in range(len(sent)))


@pytest.mark.parametrize("sending", [0.0, 1e-5])
def test_nothing_is_compressed_where_sending_keeps_the_processor_as_long_as_the_place(plain, sending):
    source = LocalStorage(plain)
    entries = Manifest.from_bytes((plain / NAME / "manifest.json").read_bytes()).originals
    where = {"write_rate": 1e6, "sending": sending, "stop": lambda: None}
    assert bool(auto(source, NAME, chunk_tables(source, NAME, entries), **where)) == (sending == 0)


def test_a_signed_checkpoint_is_compressed_only_where_it_is_signed_again(plain, tmp_path, capsys):
    root = tmp_path / "signed"
    shutil.copytree(plain, root)
    (root / NAME / "manifest.json.sig").write_bytes(b"by me")
    assert main(["cp", str(root), str(tmp_path / "t"), "--compress", "zstd"]) == 2
    assert "is signed" in capsys.readouterr().err
    assert not (tmp_path / "t").exists() or list((tmp_path / "t").iterdir()) == []
    target, back = LocalStorage(tmp_path / "t"), MemoryStorage()
    compress_to(target, LocalStorage(root), "zstd", sign=lambda each: each[::-1])
    signature = target.read_bytes(f"{NAME}/manifest.json.sig")
    assert signature == target.read_bytes(f"{NAME}/manifest.json")[::-1]
    copy_checkpoint(plain_storage(target, NAME), back, NAME, CopyTerms())
    assert back.read_bytes(f"{NAME}/manifest.json.sig") == b"by me"


def test_without_zstandard_nothing_is_written(plain, made, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert main(["cp", str(plain), str(tmp_path / "t"), "--compress", "zstd"]) == 1
    assert "ckpt-suite[compress]" in capsys.readouterr().err
    assert not (tmp_path / "t").exists() or list((tmp_path / "t").iterdir()) == []
    with pytest.raises(IncompatibleCheckpointError, match="ckpt-suite"):
        load(made["zstd"])


def test_a_damaged_source_is_never_compressed(plain, tmp_path, capsys):
    root = tmp_path / "damaged"
    shutil.copytree(plain, root)
    data = root / NAME / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert main(["cp", str(root), str(tmp_path / "t"), "--compress", "zstd"]) == 1
    assert "the source is damaged" in capsys.readouterr().out
    assert Catalog(LocalStorage(tmp_path / "t")).committed() == []


def test_second_files_are_made_again_when_it_becomes_plain(tmp_path):
    saved(tmp_path / "a", Little(1))
    source, target, back = (LocalStorage(tmp_path / each) for each in "abc")
    manifest = Catalog(source).manifest(NAME)
    for entry in manifest.files:
        source.write_bytes(f"{NAME}/{entry.path}.replica", source.read_bytes(f"{NAME}/{entry.path}"))
    twins = tuple(replace(entry, path=f"{entry.path}.replica") for entry in manifest.files)
    content = replace(manifest, files=(*manifest.files, *twins), replicas=2).to_bytes()
    for path in ("manifest.json", "manifest.json.replica"):
        source.replace(f"{NAME}/{path}", content)
    source.replace(f"{NAME}/COMMITTED", Marker.of(Manifest.from_bytes(content), content).to_bytes())
    assert verify(source, NAME) == []
    compress_to(target, source, "planes")
    assert not [each for each in target.list(NAME) if each.name.endswith(".replica")]
    assert verify(target, NAME) == []
    assert same(load(tmp_path / "b", Little), Little(1))
    copy_checkpoint(plain_storage(target, NAME), back, NAME, CopyTerms())
    names = [each.name for each in (tmp_path / "a" / NAME).iterdir()]
    found = filecmp.cmpfiles(tmp_path / "a" / NAME, tmp_path / "c" / NAME, names, shallow=False)
    assert found[0] == names


class Repaired:
    """Tells when a repair has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def emit(self, event) -> None:
        if event.name == "repair" and event.phase in {"finished", "failed"}:
            self.ended.set()


@pytest.mark.parametrize("lost", [False, True])
def test_a_root_is_made_whole_and_plain_from_a_compressed_tier(little, little_made, tmp_path, lost):
    local, durable, sink = tmp_path / "local", tmp_path / "durable", Repaired()
    shutil.copytree(little_made["planes"], durable)
    if lost:
        local.mkdir()
    else:
        shutil.copytree(little, local)
        data = bytearray((local / NAME / "__0_0.distcp").read_bytes())
        data[len(data) // 2] ^= 1
        (local / NAME / "__0_0.distcp").write_bytes(data)
    upload, keep = Upload(durable, every=1000), KeepLatest(2)
    with CheckpointManager(local, upload=upload, keep=keep, sinks=[sink]) as checkpoints:
        model = Little(99)
        assert checkpoints.resume(TrainState(model=model)) == 3
        assert same(model, Little(1))
        assert sink.ended.wait(60)
    names = [each.name for each in (little / NAME).iterdir()]
    assert filecmp.cmpfiles(little / NAME, local / NAME, names, shallow=False)[0] == names
    assert sorted(names) == sorted(each.name for each in (local / NAME).iterdir())


def forged(root: Path, path: str, content: bytes) -> None:
    """Replace a file, with manifest and marker of whoever has written that on purpose."""
    storage = LocalStorage(root)
    manifest = Catalog(storage).manifest(NAME)
    entry = FileEntry(path=path, size_bytes=len(content), checksum=checksum(content))
    files = tuple(entry if each.path == path else each for each in manifest.files)
    text = replace(manifest, files=files).to_bytes()
    (root / NAME / path).write_bytes(content)
    (root / NAME / "manifest.json").write_bytes(text)
    (root / NAME / "COMMITTED").write_bytes(Marker.of(Manifest.from_bytes(text), text).to_bytes())


def only_errors_of_ours(root: Path, by_manager: bool) -> bool:
    """Read everything; return whether it went well, and then to the right state."""
    try:
        if by_manager:
            assert same(load(root, Little), Little(1))
        else:
            parts = open_parts(LocalStorage(root), NAME)[2]
            found = {name: tensor.read(lambda _: None) for name, tensor in located(parts).items()}
            for name, value in Little(1).state_dict().items():
                assert torch.equal(found[f"model.{name}"], value.flatten())
    except CheckpointError:
        return False
    return True


def mutated(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 9])):
        place = rng.randrange(len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[place] = rng.choice(b'0123456789-[]{},"')
        elif kind == 2:
            del changed[place : place + rng.randrange(1, 40)]
        else:
            changed[place:place] = changed[place : place + rng.randrange(1, 40)]
    return bytes(changed)


def mutations(root: Path, seeds: range, scratch: Path) -> int:
    """Hostile changes of every file, most with right checksums; return how many loaded all the same."""
    shutil.copytree(root, scratch)
    original = {path.name: path.read_bytes() for path in (root / NAME).iterdir()}
    names = sorted(original.keys() - {"manifest.json", "COMMITTED"})
    loaded = 0
    for seed in seeds:
        rng = random.Random(seed)
        path = rng.choice([PLAIN, PLAIN, "__0_0.distcp", *names])
        content = original[path]
        if path.endswith(".z"):
            content = zlib.compress(mutated(zlib.decompress(content), rng))
        else:
            content = mutated(content, rng)
        if rng.randrange(5):
            forged(scratch, path, content)
        else:
            (scratch / NAME / path).write_bytes(content)
        verify(LocalStorage(scratch), NAME)
        loaded += only_errors_of_ours(scratch, by_manager=seed % 10 == 0)
        for name in {path, "manifest.json", "COMMITTED"}:
            (scratch / NAME / name).write_bytes(original[name])
    return loaded


@pytest.mark.parametrize("codec", CODECS)
def test_hostile_changes_are_errors_of_ours_or_the_right_state(little_made, codec, tmp_path):
    assert mutations(little_made[codec], range(30), tmp_path / "m") < 30


BOMBS = {
    "names its size": zstandard.ZstdCompressor(level=19).compress(bytes(64 * MIB)),
    "without a size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB)),
    "names another size": b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_frame_never_becomes_more_than_its_block(made, bomb, tmp_path):
    into = memoryview(bytearray(MIB))
    with pytest.raises(ValueError, match="does not hold what its frame should"):
        decompress(1, memoryview(BOMBS[bomb]), into)
    root = tmp_path / "bomb"
    shutil.copytree(made["zstd"], root)
    table = json.loads(zlib.decompress((root / NAME / PLAIN).read_bytes()))
    (frames,) = [each for each in table["files"] if each["path"] == "__0_0.distcp"]
    at = next(at for at, size in enumerate(frames["stored_bytes"]) if frames["codec"][at] and size > 200_000)
    data = bytearray((root / NAME / "__0_0.distcp").read_bytes())
    start = sum(frames["stored_bytes"][:at])
    data[start : start + len(BOMBS[bomb])] = BOMBS[bomb]
    forged(root, "__0_0.distcp", bytes(data))
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        load(root)


def test_no_table_makes_a_large_allocation():
    sizes = {"codec": [1], "plain_bytes": [MIB], "stored_bytes": [MIB]}
    for name, value in (("plain_bytes", MIB + 1), ("stored_bytes", 1 << 40), ("codec", 3), ("codec", -1)):
        Frames.of(Fields(sizes))
        with pytest.raises(ValueError, match="frame"):
            Frames.of(Fields({**sizes, name: [value]}))


@pytest.mark.parametrize("codec", [1, 2, 4, 8])
def test_frames_of_any_length_come_back(codec):
    for size in (0, 1, 7, 8, 4096, 4099):
        content = random.Random(size).randbytes(size)
        into = memoryview(bytearray(size))
        decompress(codec, memoryview(bytes(compress(codec, content))), into)
        assert into == content
