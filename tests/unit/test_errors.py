"""The error tree: catchable both ways, and whole after a trip between ranks."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from ckpt_core import errors
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DeadlineError,
    FileFailure,
    SaveError,
    StagingMemoryError,
)

ALL = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, BaseException) and member.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ALL)
def test_one_except_catches_every_error(error):
    assert issubclass(error, CheckpointError)
    assert error.__doc__


@pytest.mark.parametrize("error", ALL)
@pytest.mark.parametrize(
    "travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"]
)
def test_errors_survive_the_trip_between_ranks(error, travel):
    there = travel(error("step 5: disk full", step=5, failures={3: "ENOSPC"}))
    assert type(there) is error
    assert str(there) == "step 5: disk full"
    assert (there.step, there.failures) == (5, {3: "ENOSPC"})


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError, ValueError),
        (CheckpointNotFoundError, FileNotFoundError),
        (CheckpointExistsError, FileExistsError),
        (DeadlineError, TimeoutError),
        (StagingMemoryError, MemoryError),
    ],
)
def test_errors_are_caught_by_the_builtin_a_caller_would_expect(error, builtin):
    with pytest.raises(builtin, match="what happened"):
        raise error("what happened")


def test_attributes_have_defaults():
    assert (SaveError("x").step, SaveError("x").phase, dict(SaveError("x").failures)) == (-1, "", {})
    assert tuple(CorruptCheckpointError("x").failures) == ()


def test_a_file_failure_reads_as_one_line():
    assert str(FileFailure(path="__0_0.distcp", problem="3 bytes short")) == "__0_0.distcp: 3 bytes short"


def test_the_tree_in_the_docstring_is_complete():
    tree = errors.__doc__ or ""
    assert [error.__name__ for error in ALL if error.__name__ not in tree] == []
