"""Each adapter hashes, signs and judges as the core does, and judges what a host reads by itself, too."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from jsonargparse import ArgumentParser
from lightning import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import accelerate_ckpt
from accelerate_ckpt._roots import Settings
from accelerate_ckpt.trainer._loading import newest_to_resume
from ckpt_core import CheckpointManager, CorruptCheckpointError, EverySteps, UntrustedCheckpointError
from ckpt_core.commit import Catalog
from ckpt_core.names import SIGNATURE
from ckpt_core.storage import LocalStorage
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.trainer_jobs import TrainerJob, trainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_accelerate")]


def sign(_name: str, manifest: bytes) -> bytes:
    return hmac.digest(b"key", manifest, "sha256")


def judge(_name: str, manifest: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(signature, hmac.digest(b"key", manifest, "sha256"))


SIGNED: dict[str, Any] = {"checksum": "sha256", "sign_manifest": sign, "verify_manifest": judge}
NAMED = {
    "checksum": "sha256",
    "sign_manifest": "tests.adapters.test_signed_checkpoints:sign",
    "verify_manifest": "tests.adapters.test_signed_checkpoints:judge",
}


def assert_signed(root: Path, name: str) -> None:
    manifest = Catalog(LocalStorage(root)).manifest(name)
    assert {entry.checksum.partition(":")[0] for entry in manifest.files} == {"sha256"}
    assert judge(name, (root / name / "manifest.json").read_bytes(), (root / name / SIGNATURE).read_bytes())


def spoil(checkpoint: Path) -> None:
    (checkpoint / SIGNATURE).write_bytes(b"another hand")


def fitted(callback: ShardedCheckpoint, steps: int, ckpt_path: str | None = None) -> Trainer:
    made = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    made.fit(BoringModel(), ckpt_path=ckpt_path)
    return made


def test_lightning_resumes_only_what_is_trusted(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def callback() -> ShardedCheckpoint:
        return ShardedCheckpoint(root, save=EverySteps(2), **SIGNED)

    first = fitted(callback(), 4)
    for name in ("step-000000002", "step-000000004"):
        assert_signed(root, name)
    spoil(root / "step-000000004")
    with pytest.raises(UntrustedCheckpointError):
        fitted(callback(), 5, str(root / "step-000000004"))
    assert fitted(callback(), 3, "last").global_step == 3  # from step 2: 4 would not train at all
    torch.save({"state_dict": first.lightning_module.state_dict()}, tmp_path / "stock.ckpt")
    with pytest.raises(UntrustedCheckpointError, match="Lightning wrote it"):
        fitted(callback(), 5, str(tmp_path / "stock.ckpt"))


def test_lightning_takes_the_options_from_yaml(tmp_path: Path) -> None:
    parser = ArgumentParser()
    parser.add_argument("--callback", type=Callback)
    arguments = {"dirpath": str(tmp_path), **NAMED}
    parsed = parser.parse_object(
        {"callback": {"class_path": "lightning_ckpt.ShardedCheckpoint", "init_args": arguments}}
    )
    options = parser.instantiate_classes(parsed).callback.settings.options
    assert options.checksum == "sha256"
    assert options.manifest_signer("", b"x") == sign("", b"x")
    assert options.manifest_verifier("", b"x", sign("", b"x")) is True


def test_accelerate_takes_the_options_from_the_environment() -> None:
    environment = {f"CKPT_SUITE_{name.upper()}": value for name, value in NAMED.items()}
    options = Settings.resolve({}, environment).options
    assert options.checksum == "sha256"
    assert options.manifest_signer is not None
    assert options.manifest_signer("", b"x") == sign("", b"x")


def test_accelerate_loads_only_what_is_trusted(tmp_path: Path) -> None:
    stock = Accelerator(cpu=True)
    stock.prepare(torch.nn.Linear(2, 1))
    stock.save_state(str(tmp_path / "stock"))
    made = accelerate_ckpt.enable(Accelerator(cpu=True), tmp_path / "run", **SIGNED)
    net = made.prepare(torch.nn.Linear(2, 1))
    for value in (1.0, 2.0):
        torch.nn.init.constant_(net.weight, value)
        made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    for name in ("checkpoint_0", "checkpoint_1"):
        assert_signed(tmp_path / "run", name)
    spoil(tmp_path / "run" / "checkpoint_1")
    torch.nn.init.constant_(net.weight, -1.0)
    for path in (tmp_path / "run" / "checkpoint_1", tmp_path / "stock"):
        with pytest.raises(UntrustedCheckpointError):
            made.load_state(str(path))
    assert float(net.weight[0, 0]) == -1.0
    made.load_state()
    assert float(net.weight[0, 0]) == 1.0
    made.end_training()


def test_the_trainer_reads_nothing_that_is_not_trusted(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=2, save_steps=1, options=SIGNED)
    made = trainer(job)
    made.train()
    assert_signed(tmp_path, "checkpoint-2")
    spoil(tmp_path / "checkpoint-2")
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    state.unlink()
    state.mkdir()  # whoever reads it finds out
    with pytest.raises(UntrustedCheckpointError):
        trainer(job).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with CheckpointManager(tmp_path, **SIGNED) as manager:
        assert newest_to_resume(manager) == str(tmp_path / "checkpoint-1")
        assert {info.step: info.damaged for info in manager.checkpoints()} == {1: None, 2: None}
        spoil(tmp_path / "checkpoint-1")
        with pytest.raises(CorruptCheckpointError, match="not trusted"):
            newest_to_resume(manager)


def test_the_trainer_passes_over_what_stock_wrote_where_manifests_are_judged(tmp_path: Path) -> None:
    trainer(TrainerJob(root=str(tmp_path), steps=1, save_steps=1, enabled=False)).train()
    with CheckpointManager(tmp_path) as manager:
        assert newest_to_resume(manager) == str(tmp_path / "checkpoint-1")
    with CheckpointManager(tmp_path, **SIGNED) as manager, pytest.raises(CorruptCheckpointError):
        newest_to_resume(manager)
    made = trainer(TrainerJob(root=str(tmp_path), options=SIGNED))
    with pytest.raises(UntrustedCheckpointError):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
