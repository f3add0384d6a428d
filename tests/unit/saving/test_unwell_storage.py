"""Storage that cannot be read just now is not a damaged checkpoint."""

from __future__ import annotations

import errno

import pytest
import torch

from ckpt_core import CheckpointManager, LoadError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage


def committed(root):
    with CheckpointManager(root) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((4,), float(step))})


WHERE = pytest.mark.parametrize(
    ("method", "key"),
    [("read_into", "*2/*.distcp"), ("open", "*2/chunks-*"), ("open", "*2/.metadata")],
    ids=["data", "table", "metadata"],
)


def resumed(root, number, method, key):
    fault = Fault(method=method, key=key, error=OSError(number, "unwell"))
    storage = FaultyStorage(LocalStorage(root), [fault])
    state = {"w": torch.zeros(4)}
    with CheckpointManager(storage) as checkpoints:
        step = checkpoints.resume(state)
    return step, state["w"].tolist()


@WHERE
def test_a_passing_read_error_is_raised_and_no_older_checkpoint_is_taken_for_the_newest(
    tmp_path, method, key
):
    committed(tmp_path)
    with pytest.raises(LoadError, match="no older checkpoint was tried"):
        resumed(tmp_path, errno.ESTALE, method, key)


@WHERE
def test_a_block_that_the_device_cannot_read_is_damage(tmp_path, method, key):
    committed(tmp_path)
    assert resumed(tmp_path, errno.EIO, method, key) == (1, [1.0] * 4)
