"""A save that cannot be signed commits nothing; a load uses nothing that `verify_manifest` refuses."""

from __future__ import annotations

import hmac
import logging
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt_core import (
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointOptions,
    ConfigError,
    LoadError,
    SaveError,
    UntrustedCheckpointError,
)
from ckpt_core.names import OWN, SIGNATURE
from tests.kit.ranks import run_ranks

KEY = b"only the job has it"


def sign(_name: str, manifest: bytes) -> bytes:
    return hmac.digest(KEY, manifest, "sha256")


def judge(_name: str, manifest: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(signature, hmac.digest(KEY, manifest, "sha256"))


SIGNED = {"checksum": "sha256", "sign_manifest": sign, "verify_manifest": judge}


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), float(value))}


def save(root: Path, *steps: int, **options: object) -> None:
    with CheckpointManager(root, **{**SIGNED, **options}) as manager:
        for step in steps:
            manager.save(step, state_of(step))
            manager.wait()


def untouched(state: dict[str, torch.Tensor]) -> bool:
    return bool((state["w"] == -1.0).all())


def directory(root: Path, step: int) -> Path:
    return root / f"step-{step:09d}"


def spoil(root: Path, step: int) -> None:
    """Another hand has signed it."""
    (directory(root, step) / SIGNATURE).write_bytes(b"\0" * 32)


def test_resume_passes_over_what_is_not_trusted_and_says_so_and_does_not_mark_it(tmp_path, caplog):
    save(tmp_path, 1, 2, 3)
    spoil(tmp_path, 3)
    (directory(tmp_path, 2) / SIGNATURE).unlink()
    state = state_of(-1)
    with CheckpointManager(tmp_path, **SIGNED) as manager, caplog.at_level(logging.ERROR):
        assert manager.resume(state) == 1
        assert float(state["w"][0]) == 1.0
        told = [record.getMessage() for record in caplog.records if "not trusted" in record.getMessage()]
        assert ["step-000000003" in told[0], "step-000000002" in told[1]] == [True, True]
        assert [info.damaged for info in manager.checkpoints()] == [None, None, None]
        manager.save(2, state_of(2.5)).result()  # training goes on, beside what nobody trusts
        assert manager.resume(state) == 2
        assert float(state["w"][0]) == 2.5


@pytest.mark.parametrize("wanted", [{"step": 2}, {"name": "step-000000002"}], ids=str)
def test_load_refuses_what_is_not_trusted_before_anything_is_touched(tmp_path, wanted):
    save(tmp_path, 1, 2)
    spoil(tmp_path, 2)
    state = state_of(-1)
    with CheckpointManager(tmp_path, **SIGNED) as manager:
        with pytest.raises(UntrustedCheckpointError, match="step-000000002 is not trusted"):
            manager.load(state, **wanted)
        assert untouched(state)
        manager.load(state)  # the newest that is trusted
        assert float(state["w"][0]) == 1.0
    with CheckpointManager(tmp_path) as manager:
        manager.load(state, **wanted)  # without a judge everything is as before
        assert float(state["w"][0]) == 2.0


def test_a_root_in_which_nothing_is_trusted_is_no_fresh_start(tmp_path):
    save(tmp_path, 1, 2, sign_manifest=None)
    state = state_of(-1)
    with CheckpointManager(tmp_path, **SIGNED) as manager:
        for load in (manager.resume, manager.load):
            with pytest.raises(
                UntrustedCheckpointError, match=r"every committed checkpoint .* is not trusted"
            ):
                load(state)
        assert untouched(state)


def test_a_judge_that_cannot_be_asked_ends_the_load_and_no_older_one_is_taken(tmp_path):
    save(tmp_path, 1, 2)
    asked = []

    def unreachable(name: str, _manifest: bytes, _signature: bytes) -> bool:
        asked.append(name)
        raise TimeoutError("the key service does not answer")

    state = state_of(-1)
    manager = CheckpointManager(tmp_path, verify_manifest=unreachable)
    with manager, pytest.raises(LoadError, match="does not answer"):
        manager.resume(state)
    assert asked == ["step-000000002"]
    assert untouched(state)


def test_what_stock_dcp_wrote_has_nothing_to_be_judged_and_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="torch.distributed"):
        torch.distributed.checkpoint.save(state_of(1), checkpoint_id=tmp_path / "stock")
    save(tmp_path, 1)
    (directory(tmp_path, 1) / "COMMITTED").unlink()  # so that it would be taken for one, too
    state = state_of(-1)
    with CheckpointManager(tmp_path, **SIGNED) as manager:
        for name in ("stock", "step-000000001"):
            with pytest.raises(UntrustedCheckpointError, match="no manifest to be judged"):
                manager.load(state, name=name)
    assert untouched(state)


def test_a_checkpoint_exchanged_after_it_was_judged_is_not_loaded(tmp_path):
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 1, sign_manifest=None)

    def slow_judge(name: str, manifest: bytes, signature: bytes) -> bool:
        (tmp_path / "a" / name).rename(tmp_path / "away")
        (tmp_path / "b" / name).rename(tmp_path / "a" / name)
        return judge(name, manifest, signature)

    state = state_of(-1)
    manager = CheckpointManager(tmp_path / "a", verify_manifest=slow_judge)
    with manager, pytest.raises(CheckpointNotFoundError, match="replaced while it was being read"):
        manager.load(state, step=1)
    assert untouched(state)


def test_a_save_that_cannot_be_signed_commits_nothing_and_the_next_can(tmp_path):
    answers = {1: b"signed", 3: b"signed"}

    def sometimes(name: str, _manifest: bytes) -> bytes:
        assert not (tmp_path / name).exists()
        return answers[int(name[-9:])]

    with CheckpointManager(tmp_path, sign_manifest=sometimes, on_error="warn") as manager:
        assert manager.save(1, state_of(1)).result().step == 1
        failure = manager.save(2, state_of(2)).committed.exception()
        assert isinstance(failure, SaveError)
        assert failure.phase == "commit"
        assert "could not be signed: sign_manifest raised KeyError: 2" in str(failure)
        assert not failure.in_doubt
        manager.save(3, state_of(3)).result()
        assert [info.step for info in manager.checkpoints()] == [1, 3]
    assert {path.name for path in tmp_path.glob(".*")} <= {OWN}


def test_a_save_whose_signing_hangs_is_given_up_and_never_committed_later(tmp_path):
    asked, answered, returned = (threading.Event() for _ in range(3))

    def slow(_name: str, _manifest: bytes) -> bytes:
        asked.set()
        answered.wait()
        returned.set()
        return b"too late"

    manager = CheckpointManager(tmp_path, sign_manifest=slow, deadline_seconds=0.5)
    failure = manager.save(1, state_of(1)).committed.exception()
    assert asked.is_set()
    assert isinstance(failure, SaveError)
    assert "signing the manifest has made no progress" in str(failure)
    assert not failure.in_doubt
    answered.set()
    returned.wait()
    while list(tmp_path.glob(".incomplete-*")):  # removed by the thread that has woken up
        threading.Event().wait(0.01)
    assert manager.checkpoints() == []
    manager.close()


def test_a_signature_covers_the_manifest_that_is_committed(tmp_path):
    given = {}

    def remember(name: str, manifest: bytes) -> bytes:
        given[name] = manifest
        return b"s"

    with CheckpointManager(tmp_path, sign_manifest=remember) as manager:
        manager.save(1, state_of(1), metrics={"loss": float("nan")}, annotations={"ä": [1, None]}).result()
    assert given == {"step-000000001": (directory(tmp_path, 1) / "manifest.json").read_bytes()}


def test_hooks_are_named_in_a_file_and_imported_when_the_manager_is_made(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "checksum: sha256\n"
        "sign_manifest: tests.guarantees.test_signed_checkpoints:sign\n"
        "verify_manifest: tests.guarantees.test_signed_checkpoints:judge\n"
    )
    options = CheckpointOptions.from_file(tmp_path / "run.yaml")
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(1, state_of(1)).result()
        assert manager.resume(state_of(0)) == 1
    for name in ("sign_manifest", "verify_manifest"):
        with pytest.raises(ConfigError, match=f"{name}: cannot import"):
            CheckpointManager(tmp_path, **{name: "no.such.module:function"})
        with pytest.raises(ConfigError, match=f"{name} must be a function"):
            CheckpointManager(tmp_path, **{name: "words"})


def test_a_key_never_shows_in_options_or_in_what_is_wrong_with_them():
    from functools import partial

    options = CheckpointOptions(
        sign_manifest=partial(hmac.digest, KEY), verify_manifest=partial(hmac.digest, KEY)
    )
    assert KEY.decode() not in repr(options)
    with pytest.raises(ConfigError) as caught:
        CheckpointOptions(sign_manifest=KEY)
    assert KEY.decode() not in str(caught.value)
    assert "bytes" in str(caught.value)


def on_two_ranks(root: str) -> list[object]:
    """Only the coordinator signs and judges; both ranks learn of it."""
    coordinator = dist.get_rank() == 0

    def own_sign(name: str, manifest: bytes) -> bytes:
        assert coordinator
        return sign(name, manifest)

    def own_judge(name: str, manifest: bytes, signature: bytes) -> bool:
        assert coordinator
        return judge(name, manifest, signature)

    options = {"checksum": "sha256", "sign_manifest": own_sign, "verify_manifest": own_judge}
    found: list[object] = []
    with CheckpointManager(root, deadline_seconds=60, **options) as manager:
        for step in (1, 2):
            manager.save(
                step, {f"of_rank_{dist.get_rank()}": torch.full((9,), float(step)), **state_of(step)}
            )
        manager.wait()
        state = {f"of_rank_{dist.get_rank()}": torch.zeros(9), **state_of(-1)}
        found.append(manager.resume(state))
        if coordinator:
            spoil(Path(root), 2)
        dist.barrier()
        try:
            manager.load(state, step=2)
        except UntrustedCheckpointError as error:
            found.append(str(error).partition(": ")[0])
        found.append(manager.resume(state))
        found.append(float(state[f"of_rank_{dist.get_rank()}"][0]))
    with CheckpointManager(
        root, deadline_seconds=60, sign_manifest=lambda *_: b"", on_error="warn"
    ) as manager:
        manager.resume(state)
        try:
            manager.save(7, state).result(60)
        except SaveError as error:
            found.append("could not be signed" in str(error))
        found.append([info.step for info in manager.checkpoints()])
    return found


@pytest.mark.distributed
def test_the_coordinator_alone_signs_and_judges_and_every_rank_is_told(tmp_path):
    one, two = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert one == two == [2, f"{tmp_path}/step-000000002 is not trusted", 1, 1.0, True, [1, 2]]


def link_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(40 << 30)


@pytest.mark.parametrize("replace", [link_out, pipe, sparse])
def test_what_is_no_file_of_ours_in_the_place_of_a_signature_blocks_nothing_older(tmp_path, replace):
    save(tmp_path, 1, 2)
    replace(directory(tmp_path, 2) / SIGNATURE)
    state = state_of(-1)
    with CheckpointManager(tmp_path, **SIGNED) as manager:
        with pytest.raises(UntrustedCheckpointError, match=SIGNATURE):
            manager.load(state, step=2)
        assert untouched(state)
        assert manager.resume(state) == 1
        assert float(state["w"][0]) == 1.0
