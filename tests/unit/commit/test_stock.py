from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core.commit import verify_stock
from ckpt_core.commit._verify import zip_problem
from ckpt_core.errors import CheckpointNotFoundError
from ckpt_core.storage import LocalStorage


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """What stock `dcp.save` writes: tensors, byte entries, two files."""
    place = tmp_path_factory.mktemp("stock") / "checkpoint"
    state = {
        "model": {"weight": torch.randn(200, 100), "bias": torch.zeros(7, dtype=torch.bfloat16)},
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0),
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.99), "name": "adam"},
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place, thread_count=2), no_dist=True)
    return place


@pytest.fixture
def stock(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoint"))


def failures(stock: Path):
    return verify_stock(LocalStorage(stock.parent), stock.name)


def flipped(content: bytes, position: int, bit: int = 0) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def flip(file: Path, position: int) -> None:
    file.write_bytes(flipped(file.read_bytes(), position))


def chunk_of(stock: Path, key: str):
    """The file that holds a tensor, and where in it."""
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    (where,) = (where for index, where in metadata.storage_data.items() if index.fqn == key)
    return stock / where.relative_path, where


def test_what_stock_dcp_wrote_verifies(stock):
    assert len(list(stock.glob("*.distcp"))) == 2
    assert failures(stock) == []


def test_a_flipped_bit_in_a_tensor_is_found_and_named(stock):
    file, where = chunk_of(stock, "model.weight")
    flip(file, where.offset + where.length // 2)
    (failure,) = failures(stock)
    assert failure.path == file.name
    assert failure.problem.startswith("1 of ")
    assert f"'model.weight' at byte {where.offset}: not a whole torch zip: Bad CRC-32" in failure.problem


def test_every_flipped_bit_is_found_or_harmless():
    """What is not found (time stamps, padding, versions) must not change what torch reads."""
    stream = io.BytesIO()
    torch.save(torch.arange(5), stream)
    intact = stream.getvalue()
    missed = [
        position * 8 + bit
        for position in range(len(intact))
        for bit in (position % 8, (position + 3) % 8)
        if zip_problem(io.BytesIO(flipped(intact, position, bit)), 0, len(intact)) is None
    ]
    assert 0 < len(missed) < len(intact)
    for number in missed:
        content = io.BytesIO(flipped(intact, *divmod(number, 8)))
        assert torch.equal(torch.load(content, weights_only=True), torch.arange(5))


def test_the_directory_attribute_that_makes_torch_load_garbage_is_found():
    """Bit 4 of a record's attributes: torch takes the tensor for a directory, and does not say so."""
    stream = io.BytesIO()
    torch.save(torch.arange(5), stream)
    intact = stream.getvalue()
    record = intact.rfind(b"PK\1\2", 0, intact.rfind(b"archive/data/0"))
    content = flipped(intact, record + 38, 4)
    problem = zip_problem(io.BytesIO(content), 0, len(content))
    assert problem == "not a whole torch zip: its directory is damaged"


def load(stock: Path) -> dict[str, object]:
    state = {
        "model": {"weight": torch.zeros(200, 100), "bias": torch.ones(7, dtype=torch.bfloat16)},
        "scalar": torch.tensor(0.0),
        "empty": torch.zeros(0),
        "optimizer": {"lr": 0.0, "betas": (0.0, 0.0), "name": ""},
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(stock), no_dist=True)
    return {"model": {k: v.tolist() for k, v in state["model"].items()}, "optimizer": state["optimizer"]}


@pytest.mark.parametrize("cut", [1, 22, 500, 20_000])
def test_a_truncated_file_is_found(stock, cut):
    file = max(stock.glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-cut])
    (failure,) = failures(stock)
    assert failure.path == file.name
    assert failure.problem.startswith("truncated")


def test_missing_data_and_missing_metadata_are_found(stock):
    for file in stock.glob("*.distcp"):
        file.unlink()
    assert {failure.problem for failure in failures(stock)} == {"missing"}
    (stock / ".metadata").unlink()
    (stock / "__0_0.distcp").write_bytes(b"")
    (failure,) = failures(stock)
    assert (failure.path, failure.problem[:7]) == (".metadata", "missing")


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps({}), pickle.dumps(7)])
def test_an_unreadable_metadata_is_a_failure_not_a_crash(stock, content):
    (stock / ".metadata").write_bytes(content)
    (failure,) = failures(stock)
    assert failure.path == ".metadata"
    assert failure.problem.startswith("cannot be read")


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_hostile_metadata_runs_nothing(stock, tmp_path):
    (stock / ".metadata").write_bytes(pickle.dumps([Hostile(tmp_path / "run")]))
    assert len(failures(stock)) == 1
    assert not (tmp_path / "run").exists()


def test_a_compressed_record_is_refused_before_it_is_unpacked():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50 << 20))
    problem = zip_problem(stream, 0, len(stream.getvalue()))
    assert "compressed" in str(problem)


def test_a_metadata_that_points_outside_is_refused(stock):
    content = (stock / ".metadata").read_bytes()
    assert content.count(b"__0_1.distcp")
    (stock / ".metadata").write_bytes(content.replace(b"__0_1.distcp", b"../.0_distcp"))
    (failure,) = failures(stock)
    assert "not a relative path inside the checkpoint" in failure.problem
    (stock / ".metadata").write_bytes(content.replace(b"__0_1.distcp", b"a//b//.distc"))
    (failure,) = failures(stock)
    assert "not a relative path inside the checkpoint" in failure.problem


def test_padding_between_chunks_is_no_damage(stock):
    """Our own writer aligns chunks; DCP's index says where they are, so that gaps do not matter."""
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    for file in stock.glob("*.distcp"):
        chunks = [where for where in metadata.storage_data.values() if where.relative_path == file.name]
        content, padded = file.read_bytes(), b""
        for chunk in sorted(chunks, key=lambda where: where.offset):
            piece = content[chunk.offset : chunk.offset + chunk.length]
            padded += bytes(-len(padded) % 4096)
            chunk.offset = len(padded)
            padded += piece
        file.write_bytes(padded + bytes(-len(padded) % 4096))
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    assert failures(stock) == []
    assert load(stock)["optimizer"]["name"] == "adam"


def test_parts_in_sub_directories_are_all_verified(stock):
    nested = stock.parent / "outer"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.copytree(stock, nested / part)
    file, where = chunk_of(nested / "optimizer_0", "model.weight")
    flip(file, where.offset + where.length // 2)
    (failure,) = failures(nested)
    assert failure.path == f"optimizer_0/{file.name}"


def test_data_written_without_crc32_is_not_called_whole(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    (failure,) = failures(tmp_path / "checkpoint")
    assert "switched off" in failure.problem


def test_a_directory_without_dcp_data_is_not_found(tmp_path):
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError, match="no DCP checkpoint"):
        failures(tmp_path / "empty")


def test_verification_needs_no_torch(stock):
    program = (
        "import sys\n"
        "from ckpt_core.commit import verify_stock\n"
        "from ckpt_core.storage import LocalStorage\n"
        f"assert verify_stock(LocalStorage({str(stock.parent)!r}), {stock.name!r}) == []\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
