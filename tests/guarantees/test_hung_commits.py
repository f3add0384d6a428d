"""What is told of a save that hangs: where it hung, and in doubt only if it was the commit itself."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.errors import SaveError
from ckpt_core.testing import Fault
from tests.support.system_calls import SystemCalls

pytestmark = pytest.mark.reliability

LONG = 30.0
STATE = {"w": torch.arange(4.0)}


def failures(root: Path, fault: dict[str, Any], saves: int) -> list[SaveError]:
    """How these saves failed, of which the first hangs at the fault."""
    gate = threading.Event()
    hang = Fault(**fault, nth=0, before=lambda _: gate.wait(LONG))
    found: list[SaveError] = []
    with SystemCalls(root, [hang]):
        manager = CheckpointManager(root, deadline_seconds=0.5, arenas=2)
        handles = [manager.save(step, STATE) for step in range(1, saves + 1)]
        for handle in handles:
            with pytest.raises(SaveError) as caught:
                handle.result(LONG)
            found.append(caught.value)
        gate.set()
        with suppress(SaveError):
            manager.close()
    return found


@pytest.mark.parametrize(
    ("fault", "phase", "in_doubt"),
    [
        ({"method": "mkdir", "key": "*step-*"}, "open", False),
        ({"method": "fsync", "key": "*.distcp"}, "write", False),
        ({"method": "fsync", "key": "*manifest.json"}, "commit", True),
        ({"method": "rename", "key": "*step-*"}, "commit", True),
    ],
    ids=["open", "write", "manifest", "rename"],
)
def test_only_a_save_that_hangs_in_its_commit_is_in_doubt(tmp_path, fault, phase, in_doubt):
    (failed,) = failures(tmp_path / "root", fault, 1)
    assert (failed.phase, failed.in_doubt, failed.step) == (phase, in_doubt, 1)


def test_a_save_that_waits_behind_one_that_hangs_in_its_commit_is_not_in_doubt(tmp_path):
    fault = {"method": "rename", "key": "*step-*"}
    hung, waited = failures(tmp_path / "root", fault, 2)
    assert (hung.in_doubt, hung.phase) == (True, "commit")
    assert (waited.in_doubt, waited.phase, waited.step) == (False, "open", 2)
    assert "step 2 was not saved" in str(waited)
