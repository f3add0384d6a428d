from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from ckpt_core import CheckpointManager
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.loading._targets import Misfits
from tests.kit.memory import MemoryStorage


def metadata(tree: dict[str, Any]):
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree, None, is_coordinator=True)
    return planner.create_global_plan([planner.create_local_plan()])[1]


SAVED = {
    "model": {
        "w": torch.zeros(2, 3),
        "b": torch.zeros(3),
        "old": torch.zeros(1),
        "n": 4,
        "t": torch.zeros(1),
    },
    "other": {"x": torch.zeros(1)},
}


def test_what_fits_passes():
    misfits = Misfits()
    misfits.compare({"model.w": torch.zeros(2, 3)}, metadata({"model": {"w": torch.zeros(2, 3)}}))
    misfits.raise_if_any("root/step")


def test_everything_that_does_not_fit_is_in_one_error():
    live = {
        "model.w": torch.zeros(3, 3),
        "model.b": torch.zeros(3, dtype=torch.float16),
        "model.n": torch.zeros(1),
        "model.t": None,
        "model.new": torch.zeros(1),
    }
    misfits = Misfits()
    misfits.compare(live, metadata(SAVED))
    with pytest.raises(
        IncompatibleCheckpointError, match=r"root/step does not fit.*nothing was loaded"
    ) as caught:
        misfits.raise_if_any("root/step")
    error = caught.value
    assert error.missing == ("model.new",)
    assert error.unexpected == ("model.old",)
    assert error.mismatched == (
        "model.w: shape (3, 3) here, (2, 3) in the checkpoint",
        "model.b: torch.float16 here, torch.float32 in the checkpoint",
        "model.n: a tensor here, a plain value in the checkpoint",
        "model.t: a plain value here, a tensor in the checkpoint",
    )
    for text in (*error.missing, *error.unexpected, *error.mismatched):
        assert text in str(error)


def test_items_that_are_not_loaded_are_nobodys_business():
    misfits = Misfits()
    misfits.compare({"other.x": torch.zeros(1)}, metadata(SAVED))
    assert misfits.unexpected == []


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_attribute():
    misfits = Misfits()
    misfits.compare({f"model.new{i}": torch.zeros(1) for i in range(20)}, metadata({"z": torch.zeros(1)}))
    with pytest.raises(IncompatibleCheckpointError, match=r"and 12 more") as caught:
        misfits.raise_if_any("place")
    assert len(caught.value.missing) == 20


def test_misfits_of_all_parts_come_together():
    misfits = Misfits()
    misfits.compare({"a": torch.zeros(1)}, metadata({"b": 1}))
    misfits.compare({"c": torch.zeros(1)}, metadata({"d": 1}))
    with pytest.raises(IncompatibleCheckpointError) as caught:
        misfits.raise_if_any("place")
    assert caught.value.missing == ("a", "c")


def test_nothing_live_is_touched_by_a_load_that_does_not_fit():
    with CheckpointManager(MemoryStorage()) as checkpoints:
        checkpoints.save(1, {"fits": torch.ones(2), "shape": torch.ones(3), "value": 5})
        live = {"fits": torch.zeros(2), "shape": torch.zeros(4), "value": 0, "new": torch.zeros(1)}
        with pytest.raises(IncompatibleCheckpointError) as caught:
            checkpoints.load(live, step=1)
    assert live["fits"].tolist() == [0, 0]
    assert live["value"] == 0
    assert caught.value.missing == ("new",)
    assert caught.value.mismatched == ("shape: shape (4,) here, (3,) in the checkpoint",)
