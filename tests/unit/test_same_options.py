"""Ranks that are given different options are refused on every rank, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from ckpt_core import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    FirstStep,
    KeepLatest,
    MaxOverhead,
    OnPreemption,
    Optimal,
    Upload,
)
from ckpt_core.cadence import SavePolicy
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions
from ckpt_core.testing import run_ranks


class Mine(SavePolicy):
    """A policy of a user, whose repr has an address."""

    def decide(self, context):
        return None


@dataclass(frozen=True)
class Theirs(Mine):
    n: int = 1


CASES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "save": ({"save": Optimal("6h")}, {"save": EverySeconds(60)}, "save is EverySeconds(seconds=60), on"),
    "save at steps": ({"save": EverySteps(2)}, {}, "save is None, on rank 0 EverySteps(n=2, offset=0)"),
    "one of several": (
        {"save": FirstStep() | MaxOverhead(0.01)},
        {"save": FirstStep() | MaxOverhead(0.02)},
        "MaxOverhead(fraction=0.02)",
    ),
    "a user's": ({"save": Mine()}, {"save": Theirs()}, "save is Theirs(n=1), on rank 0 Mine"),
    "a user's field": ({"save": Theirs(2)}, {"save": Theirs()}, "save is Theirs(n=1), on rank 0 Theirs(n=2)"),
    "stop": (
        {"save": OnPreemption()},
        {"save": OnPreemption(stop=False)},
        "save is OnPreemption(stop=False)",
    ),
    "keep": ({"keep": KeepLatest(2)}, {"keep": KeepLatest(3)}, "keep is KeepLatest(n=3), on"),
    "two": ({"replicas": 2, "checksum": "sha256"}, {}, "checksum is 'crc32', on rank 0 'sha256', repl"),
    "abandoned": ({}, {"abandoned": "prune"}, "abandoned is 'prune', on rank 0 'keep'"),
    "back_pressure": ({}, {"back_pressure": "skip"}, "back_pressure is 'skip', on rank 0 'wait'"),
    "staging": ({}, {"staging": "overlapped"}, "staging is 'overlapped', on rank 0 'blocking'"),
    "reject_non_finite": ({}, {"reject_non_finite": True}, "reject_non_finite is True, on rank 0 False"),
    "on_error": ({}, {"on_error": "warn"}, "on_error is 'warn', on rank 0 'raise'"),
    "on_divergence": ({}, {"on_divergence": "warn"}, "on_divergence is 'warn', on rank 0 'refuse'"),
    "checksum": ({}, {"checksum": "sha256"}, "checksum is 'sha256', on rank 0 'crc32'"),
    "replicas": ({}, {"replicas": 2}, "replicas is 2, on rank 0 1"),
    "verify": ({}, {"verify": "full"}, "verify is 'full', on rank 0 None"),
    "read_once": ({}, {"read_once": False}, "read_once is False, on rank 0 True"),
    "allow_pickle": ({}, {"allow_pickle": True}, "allow_pickle is True, on rank 0 False"),
    "deadline_seconds": ({}, {"deadline_seconds": 90}, "deadline_seconds is 90, on rank 0 1800.0"),
    "no upload": ({"upload": "one"}, {}, "upload is none, on rank 0 to {path}/one"),
    "no upload on the first": ({}, {"upload": "one"}, "upload is to {path}/one, on rank 0 none"),
    "another place": ({"upload": "one"}, {"upload": "other"}, "upload is to {path}/other, on"),
    "every": ({"upload": ("one", {"every": 2})}, {"upload": "one"}, "upload.every is 1, on rank 0 2"),
    "when_busy": (
        {"upload": "one"},
        {"upload": ("one", {"when_busy": "wait"})},
        "upload.when_busy is 'wait'",
    ),
    "keep of it": (
        {"upload": "one"},
        {"upload": ("one", {"keep": KeepLatest(2)})},
        "upload.keep is KeepLatest(n=2), on rank 0 None",
    ),
    "on_error of it": (
        {"upload": "one"},
        {"upload": ("one", {"on_error": "raise"})},
        "upload.on_error is 'raise'",
    ),
    "order": (
        {"upload": ["one", "other"]},
        {"upload": ["other", "one"]},
        "upload is to {path}/other and {path}/one",
    ),
    "the second": (
        {"upload": ["one", "other"]},
        {"upload": ["one", ("other", {"every": 3})]},
        "upload[1].every is 3, on rank 0 1",
    ),
}
OF_EACH_RANK: Mapping[str, tuple[Any, Any]] = {
    "arenas": (1, 2),
    "staging_memory": (None, "1 GiB"),
    "write_bandwidth": (None, "1 GB/s"),
    "headroom": (None, "1 MiB"),
    "storage_options": ({}, {}),
    "sign_manifest": (lambda name, content: b"s", None),
    "verify_manifest": (lambda name, content, signature: True, None),
    "job_name": ("first", "second"),
    "journal": (True, False),
    "save": (Mine() | OnPreemption(file="/a"), Mine() | OnPreemption(file="/b")),
}
CALLS: Mapping[str, Callable[[CheckpointManager, Any], object]] = {
    "save": lambda manager, state: manager.save(1, state),
    "resume": lambda manager, state: manager.resume(state),
    "load": lambda manager, state: manager.load(state),
    "maybe_save": lambda manager, state: manager.maybe_save(1, state),
    "due": lambda manager, _: manager.due(),
}


def _options(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    def upload(each: Any) -> Upload:
        name, more = each if isinstance(each, tuple) else (each, {})
        return Upload(path / name, **more)

    found = dict(given)
    if "upload" in found:
        each = found["upload"]
        found["upload"] = [upload(one) for one in each] if isinstance(each, list) else upload(each)
    return found


def refused(path: str) -> list[str]:
    rank, found = distributed.get_rank(), []
    preempted = ({"save": OnPreemption()}, {"save": OnPreemption() | EverySeconds(9)}, "")
    both = ({"save": Optimal("6h")}, {"save": EverySeconds(60)}, "")
    calls = [(CALLS["save"], *case) for case in CASES.values()]
    calls += [(CALLS[name], *both) for name in ("resume", "load", "maybe_save")]
    calls += [(CALLS["due"], *preempted)]
    for call, *given, _ in calls:
        manager = CheckpointManager(Path(path, "root"), **_options(given[rank], Path(path)))
        try:
            call(manager, {"w": torch.ones(3)})
        except ConfigError as error:
            found.append(str(error))
        manager.close()
    if rank == 1:
        assert not Path(path, "root").exists()
    own = {name: values[rank] for name, values in OF_EACH_RANK.items()}
    own["upload"] = Upload(Path(path, "one"), bandwidth=[None, "1 GB/s"][rank])
    with CheckpointManager(Path(path, "root"), **own) as manager:
        manager.maybe_save(1, {"w": torch.ones(3)})
        manager.save(1, {"w": torch.ones(3)})
    return found


@pytest.mark.distributed
def test_options_that_differ_between_ranks_are_refused_on_every_rank_with_the_difference(tmp_path):
    first, second = run_ranks(refused, 2, str(tmp_path), timeout_seconds=120)
    assert first == second
    for message, (_, _, expected) in zip(first, CASES.values(), strict=False):
        assert message.startswith("every rank must be given the same options, and they differ: rank 1: ")
        assert expected.format(path=tmp_path) in message
        assert message.endswith(". Nothing was written")
    assert len(first) == len(CASES) + 4
    assert not (tmp_path / "other").exists()
    assert [each.name for each in (tmp_path / "one").iterdir() if each.is_dir()] == ["step-000000001"]


@pytest.mark.parametrize("name", [each.name for each in fields(CheckpointOptions)])
def test_of_every_option_it_is_known_whether_ranks_may_differ(name):
    assert name in OF_EACH_RANK or any(name in {**one, **other} for one, other, _ in CASES.values())
