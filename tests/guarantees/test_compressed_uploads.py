"""Uploads that compress: one checkpoint with that of the root, continued as it was begun, resumed exactly."""

from __future__ import annotations

import importlib.util
import shutil
import threading

import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointOptions, Upload, UploadError
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, plain_files, verify
from ckpt_core.errors import ConfigError
from ckpt_core.formats.frames import ZSTD
from ckpt_core.names import SIGNATURE
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers import _copy_process
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import bucket_like

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAME = "step-000000001"


def state(seed: int) -> dict[str, torch.Tensor]:
    """Weights that shrink, and bytes that do not."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randint(256, (300_000,), generator=g, dtype=torch.uint8)
    return {
        "weight": torch.randn(400, 1000, generator=g),
        "half": torch.randn(200_000, generator=g).bfloat16(),
    } | {"noise": noise}


def zeros() -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in state(1).items()}


def upload_one(root, tier, *, step=1, **options):
    """Save a step and wait until it is uploaded."""
    with CheckpointManager(root, upload=Upload(tier, deadline_seconds=60, **options)) as manager:
        return manager.save(step, state(step)).uploaded.result(60)


def begin_in_planes(root, tier):
    """Upload a step in planes, all but the marker."""
    tried = threading.Event()
    fault = Fault(key="*COMMITTED", method="create", before=lambda _: tried.set(), error=TimeoutError("down"))
    upload = Upload(FaultyStorage(tier, [fault]), compress="planes", deadline_seconds=60)
    with CheckpointManager(root, upload=upload) as manager:
        manager.save(1, state(1))
        assert tried.wait(60)
        manager.close(wait_for_uploads=False)


def in_planes(storage) -> bool:
    manifest = Catalog(storage).manifest(NAME)
    return any(max(each.codec) > ZSTD for each in plain_files(storage, NAME, manifest).files.values())


def size(storage) -> int:
    return Catalog(storage).find(name=NAME).size_bytes


@pytest.mark.parametrize("codec", ["zstd", "planes", "auto"])
def test_both_tiers_hold_one_checkpoint_and_a_lost_disk_is_resumed_exactly(tmp_path, codec):
    root, tier = tmp_path / "root", LocalStorage(tmp_path / "tier")
    upload = Upload(tier, compress=codec, bandwidth="2 MB/s")
    with CheckpointManager(root, upload=upload) as manager:
        assert manager.save(1, state(1)).uploaded.result(60).step == 1
        assert [info.step for info in manager.checkpoints()] == [1]
    assert verify(tier, NAME) == []
    if codec != "auto":
        assert size(tier) < 0.97 * size(LocalStorage(root))
        assert in_planes(tier) == (codec == "planes")
    shutil.rmtree(root)
    found = zeros()
    with CheckpointManager(root, upload=upload) as manager:
        assert manager.resume(found) == 1
        assert [info.step for info in manager.checkpoints()] == [1]
    assert all(torch.equal(value, found[key]) for key, value in state(1).items())


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_an_upload_that_was_begun_goes_on_as_it_was_compressed_and_sends_nothing_twice(tmp_path, kind):
    tier = LocalStorage(tmp_path / "tier") if kind == "disk" else bucket_like()
    begin_in_planes(tmp_path / "root", tier)
    sent = {(path.name, path.stat().st_ino) for path in (tmp_path / "tier").rglob("*.distcp")}
    assert (len(sent) > 0) == (kind == "disk")
    with CheckpointManager(tmp_path / "root", upload=Upload(tier, compress="auto")) as manager:
        assert manager.resume(zeros()) == 1
    assert (verify(tier, NAME), in_planes(tier)) == ([], True)
    assert sent == {(path.name, path.stat().st_ino) for path in (tmp_path / "tier").rglob("*.distcp")}


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_what_another_zstandard_has_begun_is_compressed_again(tmp_path, monkeypatch, kind):
    tier = LocalStorage(tmp_path / "tier") if kind == "disk" else bucket_like()
    begin_in_planes(tmp_path / "root", tier)
    monkeypatch.setattr("ckpt_core.formats.frames._LEVEL", 9)  # makes other frames of the same bytes
    with CheckpointManager(tmp_path / "root", upload=Upload(tier, compress="planes")) as manager:
        assert manager.resume(zeros()) == 1
    assert [verify(tier, info.name) for info in Catalog(tier).committed()] == [[]]


def test_what_stock_dcp_is_to_read_is_not_continued_in_planes(tmp_path):
    inner = MemoryStorage("tier")
    begin_in_planes(tmp_path, inner)
    with CheckpointManager(tmp_path, upload=Upload(inner, compress="zstd")) as manager:
        assert manager.resume(zeros()) == 1
    assert (verify(inner, NAME), in_planes(inner)) == ([], False)


def test_what_does_not_shrink_is_stored_as_it_is(tmp_path):
    tier = MemoryStorage("tier")
    with CheckpointManager(tmp_path, upload=Upload(tier, compress="planes")) as manager:
        manager.save(1, {"noise": state(1)["noise"]}).uploaded.result(60)
    assert Catalog(tier).find(name=NAME).plain_sha256 == ""


def test_a_process_of_its_own_compresses_what_is_worth_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_copy_process, "_LEAST_BYTES", 1)
    monkeypatch.setattr("ckpt_core.tiers._copy.compressed", None)  # a call here would fail
    tier = LocalStorage(tmp_path / "tier")

    upload_one(tmp_path / "root", tier.url, compress="planes")

    assert (verify(tier, NAME), in_planes(tier)) == ([], True)


def test_a_signed_run_signs_what_it_compresses_and_without_the_key_nothing_is_compressed(tmp_path):
    tier, without = MemoryStorage("tier"), MemoryStorage("without")
    key = b"key of "

    def sign(name: str, content: bytes) -> bytes:
        return key + name.encode() + content[-40:]

    def check(name: str, content: bytes, signature: bytes) -> bool:
        return signature == sign(name, content)

    with CheckpointManager(
        tmp_path, upload=Upload(tier, compress="zstd"), sign_manifest=sign, verify_manifest=check
    ) as manager:
        manager.save(1, state(1)).uploaded.result(60)
    assert tier.exists(f"{NAME}/{SIGNATURE}")
    found = zeros()
    with CheckpointManager(tier, verify_manifest=check) as manager:
        assert manager.resume(found) == 1
    assert torch.equal(found["weight"], state(1)["weight"])
    with (
        pytest.raises(UploadError, match="is signed"),
        CheckpointManager(tmp_path, upload=Upload(without, compress="zstd", on_error="raise")) as manager,
    ):
        manager.resume(zeros())
    assert Catalog(without).committed() == []


@pytest.mark.parametrize(
    ("given", "named"), [({"compress": "lz4"}, "compress must be one of"), ({"compress": True}, "compress")]
)
def test_what_cannot_be_compressed_is_refused_before_anything_is_written(tmp_path, given, named):
    with pytest.raises(ConfigError, match=named):
        CheckpointOptions.from_mapping({"upload": {"to": str(tmp_path / "tier"), **given}})


def test_without_zstandard_compression_is_refused_at_the_start(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "ckpt_core.options._options.find_spec", lambda name: None if name == "zstandard" else real(name)
    )
    assert Upload(tmp_path).compress is None
    with pytest.raises(ConfigError, match=r"ckpt-suite\[compress\]"):
        Upload(tmp_path, compress="zstd")


def test_yaml_and_the_environment_say_it_as_python_does(tmp_path):
    options = CheckpointOptions.from_mapping({"upload": {"to": str(tmp_path), "compress": "auto"}})
    assert options.uploads == (Upload(str(tmp_path), compress="auto"),)


def test_a_copy_by_hand_compresses_as_suits_the_place_and_goes_on_with_what_was_begun(tmp_path, capsys):
    root, target = tmp_path / "root", tmp_path / "target"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1)).result(60)

    assert main(["cp", str(root), str(target), "--compress", "auto", "--bandwidth", "2 MB/s"]) == 0

    assert "1 copied" in capsys.readouterr().out
    assert verify(LocalStorage(target), NAME) == []
    assert [path.name for path in target.iterdir() if path.name.startswith(".probe")] == []
