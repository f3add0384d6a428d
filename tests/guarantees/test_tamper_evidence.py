"""Changed weights are found with `checksum="sha256"`, whatever was done to keep their CRC-32."""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError, CorruptCheckpointError, TrainState
from ckpt_core.cli import main
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage, object_storage
from ckpt_core.types import CapturedState
from tests.guarantees.forged import forge
from tests.kit.memory import MemoryStorage

SHARDS = "__0_0.distcp"


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64,), float(value))}


def save(root: Path, *steps: int, checksum: str = "sha256") -> None:
    with CheckpointManager(root, checksum=checksum) as manager:
        for step in steps:
            manager.save(step, state_of(step))
            manager.wait()


def resumed(root: Path, **options: object) -> tuple[int | None, float, float]:
    state = state_of(-1.0)
    with CheckpointManager(root, **options) as manager:
        return manager.resume(state), float(state["w"][0]), float(state["w"][1])


def change_weights(checkpoint: Path) -> None:
    """Two weights become the attacker's, a third is sacrificed; every CRC-32 stays."""
    path = checkpoint / SHARDS
    payload = path.read_bytes().find(struct.pack("<f", 2.0) * 64)
    assert payload > 0
    changes = {payload: struct.pack("<f", 1337.0), payload + 4: struct.pack("<f", -4242.0)}
    forge(path, changes, sacrificed=payload + 4 * 40)


def ckpt(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def digest_of(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()


def test_weights_changed_under_the_same_crc32_are_found_by_sha256(tmp_path, capsys):
    save(tmp_path, 1, 2)
    change_weights(tmp_path / "step-000000002")
    assert ckpt("verify", tmp_path / "step-000000002") == 1
    assert "made on purpose" in capsys.readouterr().out
    with CheckpointManager(tmp_path) as manager:
        assert [failure.path for failure in manager.verify()] == [SHARDS]
    with CheckpointManager(tmp_path, verify="full") as manager:
        target = state_of(-1.0)
        with pytest.raises(CorruptCheckpointError, match=SHARDS):
            manager.load(target, step=2)
        assert float(target["w"].sum()) == -64.0
    assert resumed(tmp_path, verify="full") == (1, 1.0, 1.0)


def test_the_forgery_is_one_that_crc32_cannot_find(tmp_path):
    save(tmp_path, 1, 2, checksum="crc32")
    change_weights(tmp_path / "step-000000002")
    assert ckpt("verify", tmp_path / "step-000000002") == 0
    assert resumed(tmp_path, verify="full") == (2, 1337.0, -4242.0)


def test_verify_read_compares_tensors_by_their_crc32_alone(tmp_path):
    save(tmp_path, 1, 2)
    change_weights(tmp_path / "step-000000002")
    assert resumed(tmp_path, verify="read") == (2, 1337.0, -4242.0)  # as docs/loading.md says


def test_a_changed_byte_in_any_file_is_found(tmp_path):
    with CheckpointManager(tmp_path, checksum="sha256", allow_pickle=True) as manager:
        manager.save(1, {**state_of(1.0), "words": {"a", "b"}, "plain": 3}).result()
        files = [entry.path for entry in Catalog(manager.storage).manifest("step-000000001").files]
    assert len(files) >= 5
    for path in files:
        file = tmp_path / "step-000000001" / path
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with CheckpointManager(tmp_path) as manager:
            assert [failure.path for failure in manager.verify()] == [path]
        file.write_bytes(content)


def storages(tmp_path: Path) -> list[object]:
    return [
        LocalStorage(tmp_path / "run"),
        MemoryStorage(),
        object_storage(f"memory://{secrets.token_hex(8)}/run"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2], ids=["local", "memory", "bucket"])
@pytest.mark.parametrize("options", [{}, {"staging": "overlapped"}, {"write_bandwidth": "1 GB/s"}], ids=str)
def test_the_manifest_has_the_sha256_of_every_file(tmp_path, place, options):
    storage = storages(tmp_path)[place]
    big = {"w": torch.arange(9 << 20, dtype=torch.float32), "b": torch.ones(3)}  # more than two pieces
    captured = CapturedState(
        sharded={"model": {"model": big}, "optimizer": {"o": {"m": big["w"] + 1, "lr": 0.1}}},
        files={"notes.txt": b"small"},
        stable=[big["w"]],
    )
    with CheckpointManager(storage, checksum="sha256", **options) as manager:
        manager.save(1, captured)
        info = manager.save(2, captured).result()  # of the plan that is kept
        manifest = Catalog(storage).manifest(info.name)
        assert {entry.path for entry in manifest.files} >= {
            *("model/__0_0.distcp", "optimizer/__0_0.distcp", "optimizer/__0_1.distcp"),
            *("model/.metadata", "notes.txt", "chunks-00000.json.z"),
        }
        for entry in manifest.files:
            content = storage.read_bytes(f"{info.name}/{entry.path}")
            assert entry.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}", entry.path
        assert manager.verify() == []
        assert (
            info.manifest_sha256
            == hashlib.sha256(storage.read_bytes(f"{info.name}/manifest.json")).hexdigest()
        )


def test_a_root_may_hold_both_kinds_and_all_of_them_load(tmp_path):
    save(tmp_path, 1, checksum="crc32")
    with CheckpointManager(tmp_path, checksum="sha256") as manager:
        manager.resume(state_of(0.0))
        manager.save(2, state_of(2.0))
    for verify in ("full", "read", "off"):
        with CheckpointManager(tmp_path, verify=verify) as manager:
            for step in (1, 2):
                target = state_of(0.0)
                manager.load(target, step=step)
                assert float(target["w"][5]) == step
    manifest = json.loads((tmp_path / "step-000000001" / "manifest.json").read_bytes())
    assert {text.partition(":")[0] for text in manifest["files"]["checksum"]} == {"crc32"}


def test_a_model_resumes_exactly_from_a_sha256_checkpoint(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path, checksum="sha256", verify="full") as manager:
        manager.save(1, TrainState(model=model, optimizer=optimizer)).result()
        other = torch.nn.Linear(3, 2)
        assert manager.resume(TrainState(model=other, optimizer=torch.optim.AdamW(other.parameters()))) == 1
    assert torch.equal(other.weight, model.weight)


def test_show_prints_the_digest_and_verify_compares_it(tmp_path, capsys):
    save(tmp_path, 1, 2)
    one, two = (digest_of(tmp_path / f"step-00000000{step}") for step in (1, 2))
    assert ckpt("show", tmp_path) == 0
    assert f"sha256:{two}" in capsys.readouterr().out
    assert ckpt("show", tmp_path, "--step", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["manifest_sha256"] == one
    assert ckpt("verify", tmp_path, "--manifest-sha256", two) == 0
    assert ckpt("verify", tmp_path / "step-000000001", "--manifest-sha256", f"sha256:{one.upper()}") == 0
    assert ckpt("verify", tmp_path, "--step", 1, "--manifest-sha256", one) == 0
    assert [info.manifest_sha256 for info in Catalog(LocalStorage(tmp_path)).committed()] == [one, two]


def test_an_exchanged_manifest_is_found_by_its_digest_and_is_no_damage(tmp_path, capsys):
    save(tmp_path / "a", 1, 2)
    save(tmp_path / "b", 1, 2)
    honest = digest_of(tmp_path / "a" / "step-000000002")
    # A whole checkpoint in the place of another: manifest, marker and files fit together.
    (tmp_path / "a" / "step-000000002").rename(tmp_path / "away")
    (tmp_path / "b" / "step-000000002").rename(tmp_path / "a" / "step-000000002")
    root = tmp_path / "a"
    assert ckpt("verify", root) == 0
    for arguments in ((root,), (root, "--step", 2), (root / "step-000000002",)):
        assert ckpt("verify", *arguments, "--manifest-sha256", honest) == 1
        assert "another checkpoint than was asked for" in capsys.readouterr().out
    assert Catalog(LocalStorage(root)).known_damage("step-000000002") is None
    # Only the manifest exchanged: the marker tells, too.
    (root / "step-000000002" / "manifest.json").write_bytes(
        (tmp_path / "away" / "manifest.json").read_bytes()
    )
    assert ckpt("verify", root, "--manifest-sha256", honest) == 1


@pytest.mark.parametrize("wrong", ["", "12", "g" * 64, "crc32:" + "0" * 64])
def test_what_is_no_sha256_is_refused_as_wrong_usage(tmp_path, wrong):
    save(tmp_path, 1)
    assert ckpt("verify", tmp_path, "--manifest-sha256", wrong) == 2
    assert ckpt("verify", tmp_path, "--all", "--manifest-sha256", "0" * 64) == 2


def test_a_stock_directory_has_no_manifest_to_be_the_one_asked_for(tmp_path):
    with pytest.warns(UserWarning, match="torch.distributed"):
        torch.distributed.checkpoint.save(state_of(1.0), checkpoint_id=tmp_path / "stock")
    assert ckpt("verify", tmp_path / "stock") == 0
    assert ckpt("verify", tmp_path / "stock", "--manifest-sha256", "0" * 64) == 1


def test_the_option_comes_from_a_file_and_a_wrong_one_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("checkpoint: {checksum: sha256}")
    assert CheckpointOptions.from_file(tmp_path / "run.yaml").checksum == "sha256"
    assert CheckpointOptions().checksum == "crc32"
    for wrong in ("md5", "SHA256", None, 256):
        with pytest.raises(ConfigError, match="checksum must be one of"):
            CheckpointManager(tmp_path, checksum=wrong)
