from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.errors import ConfigError
from ckpt_core.formats.checksums import Checksum
from ckpt_core.types import CapturedState

PIECE = 16 << 20


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
@pytest.mark.parametrize("given", [{"priority": 0}, {}, {"priority": 19, "writers": 3}], ids=str)
def test_what_copies_hashes_and_writes_gives_way_and_the_training_does_not(tmp_path, monkeypatch, given):
    seen = dict[str, int]()
    writers = {f"ckpt-write-{number}" for number in range(given.get("writers", 2))}
    all_write = threading.Barrier(len(writers))  # one alone could be quick enough for all pieces

    def watched(owner, name):
        real = getattr(owner, name)

        def watching(*arguments, **keywords):
            thread = threading.current_thread().name
            if thread in writers - seen.keys():
                all_write.wait(60)
            seen[thread] = nice()
            return real(*arguments, **keywords)

        monkeypatch.setattr(owner, name, watching)

    for owner, name in ((np, "copyto"), (os, "pwrite"), (os, "fsync"), (Checksum, "update")):
        watched(owner, name)
    ours = nice()
    weights = torch.nn.Parameter(torch.ones(PIECE))
    optimizers = [torch.optim.SGD([weights])]
    state = CapturedState(sharded={"": {"w": weights}}, stable=[weights], optimizers=optimizers)
    with CheckpointManager(tmp_path, staging="overlapped", checksum="sha256", **given) as manager:
        manager.save(1, state).result()
    of_us = {name: found for name, found in seen.items() if name != threading.current_thread().name}
    assert {name for name in of_us if name.startswith("ckpt-write")} == writers
    assert {"ckpt-copy", "ckpt-save", "ckpt-hash-0"} <= of_us.keys()
    of_us.pop("ckpt-journal", None)  # writes a few lines when the run begins and ends
    assert set(of_us.values()) == {max(ours, given.get("priority", 10))}
    assert nice() == ours


@pytest.mark.parametrize("root", ["memory://several", "memory://other/run"])
def test_a_number_of_writers_is_refused_where_no_thread_of_ours_writes(root):
    with pytest.raises(ConfigError, match=r"writers=3: memory://.* is no local filesystem"):
        CheckpointManager(root, writers=3)
