"""P3 against power cuts: what was acknowledged is on the disk, whatever else has reached it or not."""

from __future__ import annotations

import errno
import itertools

import pytest

from ckpt_core.names import set_aside
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault
from tests.support.power import PowerLog, power_cut
from tests.support.system_calls import SystemCalls

pytestmark = pytest.mark.reliability

NO_EXCHANGE = Fault(method="exchange", error=OSError(errno.EINVAL, "Invalid argument"))
FATES = (
    ("strict", 0),
    *(("journal", seed) for seed in range(6)),
    *(("random", seed) for seed in range(40)),
)


class CutShortError(Exception):
    pass


def cut_short(_operation):
    raise CutShortError


def exchange_until(root, log, number):
    """Exchange two directories; the power fails before the nth call."""
    (root / "old").mkdir(parents=True)
    (root / "old" / "f").write_bytes(b"old")
    (root / "new").mkdir()
    (root / "new" / "f").write_bytes(b"new")
    PowerLog.begin(root, log)
    with SystemCalls(root, [Fault(nth=number, before=cut_short), NO_EXCHANGE, PowerLog(root, log).fault]):
        LocalStorage(root).exchange("new", "old")


def test_names_that_change_places_step_by_step_are_never_both_lost(tmp_path):
    for number in itertools.count():
        root, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        try:
            exchange_until(root, log, number)
        except CutShortError:
            pass
        else:
            break
        for index, (fate, seed) in enumerate(FATES):
            left = tmp_path / f"{number}.{index}"
            power_cut(log, root, left, fate=fate, seed=seed)
            found = {path.parent.name: path.read_bytes() for path in left.glob("*/f")}
            # Under its name, or where the next job looks for it.
            asides = [content for name, content in found.items() if set_aside(name) == "old"]
            assert "old" in found or asides == [b"old"], (number, fate, seed, found)
    assert number > 5


def test_a_root_that_a_killed_job_made_is_durable_once_the_next_job_uses_it(tmp_path):
    disk, log = tmp_path / "disk", tmp_path / "log"
    disk.mkdir()
    PowerLog.begin(disk, log)
    root = disk / "runs" / "a"
    with SystemCalls(disk, [PowerLog(disk, log).fault]):
        root.mkdir(parents=True)  # and killed before it was synced
        LocalStorage(root).check_root()
        LocalStorage(root).replace(".ckpt-suite/writer.json", b"{}")
    power_cut(log, disk, tmp_path / "left")
    assert (tmp_path / "left" / "runs" / "a" / ".ckpt-suite/writer.json").read_bytes() == b"{}"
