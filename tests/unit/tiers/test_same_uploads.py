"""Ranks that are given different uploads are refused, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from ckpt_core import CheckpointManager, KeepLatest, Upload
from ckpt_core.errors import ConfigError
from ckpt_core.testing import run_ranks


def uploads(case: str, rank: int, path: Path):
    one, other = Upload(path / "one"), Upload(path / "other")
    return {
        "none on one": [one, None],
        "none on the first": [None, one],
        "another place": [one, other],
        "another every": [Upload(path / "one", every=2), one],
        "another when_busy": [one, Upload(path / "one", when_busy="wait")],
        "another keep": [one, Upload(path / "one", keep=KeepLatest(2))],
        "another on_error": [one, Upload(path / "one", on_error="raise")],
        "two on one": [[one, other], one],
        "another order": [[one, other], [other, one]],
        "in the second": [[one, other], [one, Upload(path / "other", every=3)]],
    }[case][rank]


CASES = {
    "none on one": "rank 1: no upload, and rank 0: uploads to {path}/one",
    "none on the first": "rank 1: uploads to {path}/one, and rank 0: no upload",
    "another place": "rank 1: upload.to is {path}/other, on rank 0 {path}/one",
    "another every": "rank 1: upload.every is 1, on rank 0 2",
    "another when_busy": "rank 1: upload.when_busy is 'wait', on rank 0 'overtake'",
    "another keep": "rank 1: upload.keep is KeepLatest(n=2), on rank 0 None",
    "another on_error": "rank 1: upload.on_error is 'raise', on rank 0 'warn'",
    "two on one": "rank 1: uploads to {path}/one, and rank 0: uploads to {path}/one and {path}/other",
    "another order": "rank 1: upload[0].to is {path}/other, on rank 0 {path}/one",
    "in the second": "rank 1: upload[1].every is 3, on rank 0 1",
}
CALLS = {
    "save": lambda manager, state: manager.save(1, state),
    "resume": lambda manager, state: manager.resume(state),
    "load": lambda manager, state: manager.load(state),
}


def refused(path: str) -> list[str]:
    rank, found = distributed.get_rank(), []
    for number, case in enumerate(CASES):
        for call in CALLS if not number else ["save"]:
            manager = CheckpointManager(Path(path, "root"), upload=uploads(case, rank, Path(path)))
            try:
                CALLS[call](manager, {"w": torch.ones(3)})
            except ConfigError as error:
                found.append(f"{case}: {error}")
            manager.close()
    bandwidth = [None, "1 GB/s"][rank]
    with CheckpointManager(
        Path(path, "root"), upload=Upload(Path(path, "one"), bandwidth=bandwidth)
    ) as manager:
        manager.save(1, {"w": torch.ones(3)})
    return found


@pytest.mark.distributed
def test_uploads_that_differ_between_ranks_are_refused_on_every_rank_with_the_difference(tmp_path):
    first, second = run_ranks(refused, 2, str(tmp_path), timeout_seconds=120)
    assert first == second
    expected = ["none on one", "none on one", *CASES]
    for message, case in zip(first, expected, strict=True):
        assert message.startswith(f"{case}: every rank must be given the same upload=")
        assert CASES[case].format(path=tmp_path) in message
    assert not (tmp_path / "other").exists()
    assert [each.name for each in (tmp_path / "one").iterdir() if each.is_dir()] == ["step-000000001"]
