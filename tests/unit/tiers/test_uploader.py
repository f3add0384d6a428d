"""Uploads that fail: again after growing pauses, reported once, and out of the way of newer ones."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from ckpt_core.commit import Catalog
from ckpt_core.coordination import Solo
from ckpt_core.errors import UploadError
from ckpt_core.names import OWN
from ckpt_core.options import CheckpointOptions, Upload
from ckpt_core.telemetry import InMemorySink, Telemetry
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers.uploading._due import DueCheckpoint
from ckpt_core.tiers.uploading._follower import Follower, UploadJob
from ckpt_core.tiers.uploading._tier_root import TierRoot
from tests.kit.clock import FakeClock
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import save


class Service:
    """A tier on a clock that only pauses move, down until a certain second."""

    def __init__(self, *, down_for: float, when_busy="overtake", during: Callable[[], None] | None = None):
        self.clock = FakeClock(0.0)
        self.down_for = down_for
        self.pauses: list[float] = []
        self.outcomes: dict[int, list[object]] = {}
        self.root, self.inner = MemoryStorage("root"), MemoryStorage("tier")
        self.during = during
        self.on_answer: Callable[[], object] = lambda: None
        self.sink = InMemorySink()
        upload = Upload(
            FaultyStorage(self.inner, [Fault(before=self._answer)]), when_busy=when_busy, deadline_seconds=600
        )
        job = UploadJob(
            source=self.root,
            rank=0,
            open_channel=Solo().commit_channel,
            deadline_seconds=1800,
            telemetry=Telemetry(self.sink),
        )
        tier = TierRoot(
            upload, upload.to, CheckpointOptions(), telemetry=Telemetry(), until_idle=lambda: None, spared=()
        )
        self.uploader = Follower(tier, upload, job, lambda copy, done: None)
        self.uploader.clock, self.uploader.pause = self.clock, self._pause

    def _answer(self, _) -> None:
        self.on_answer()
        if self.clock() < self.down_for:
            raise ConnectionError("down")

    def _pause(self, _, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)
        if self.during is not None:
            self.during()

    def due(self, step: int) -> None:
        info = save(self.root, step)
        self.outcomes[step] = []
        self.uploader.line.add(DueCheckpoint(info, self.outcomes[step].append))

    def run(self) -> None:
        if self.during is None:
            self.uploader.line.close()
        self.uploader.start()
        assert self.uploader.join(60)

    @property
    def steps(self) -> list[int]:
        return [info.step for info in Catalog(self.inner).committed()]


def test_a_service_that_is_down_for_an_hour_delays_an_upload_which_is_reported_once(caplog):
    service = Service(down_for=3600.0)
    service.due(1)
    service.run()
    assert service.steps == [1]
    assert service.pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert max(service.pauses) == 60.0
    error, info = service.outcomes[1]
    assert isinstance(error, UploadError)
    assert info.step == 1
    assert [event.attributes["step"] for event in service.sink.finished("upload.failed")] == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_while_a_service_stays_down_an_upload_is_reported_once_its_time_has_passed():
    service = Service(down_for=3600.0)
    reported_at: list[float] = []

    def look() -> None:
        if service.outcomes[1] and not reported_at:
            assert isinstance(service.uploader.failure, UploadError)  # for `on_error="raise"`
            reported_at.append(service.clock())
        if service.clock() > 1000:
            service.uploader.line.close()

    service.during = look
    service.due(1)
    service.run()
    # The time, a pause that it ends in, and the next one, in which this test looks.
    assert 600 <= reported_at[0] <= 600 + 2 * 60
    assert service.steps == [1]


def test_an_upload_that_fails_gives_way_to_a_newer_checkpoint(caplog):
    service = Service(down_for=3600.0)

    def become_due() -> None:
        if len(service.pauses) == 3:
            service.due(2)
            service.uploader.line.close()

    service.during = become_due
    service.due(1)
    service.run()
    assert service.steps == [2]
    assert service.outcomes[1] == [None]
    assert not [entry.name for entry in service.inner.list("") if entry.name.startswith(".i")]


@pytest.mark.parametrize("when_busy", ["queue", "wait"])
def test_in_a_queue_it_gives_way_only_after_its_time(when_busy):
    service = Service(down_for=700.0, when_busy=when_busy)
    service.due(1)
    service.due(2)
    service.run()
    assert service.steps == [2]
    error, nothing = service.outcomes[1]
    assert isinstance(error, UploadError)
    assert nothing is None
    assert sum(service.pauses) >= 600


def test_what_no_other_try_can_change_is_not_tried_again():
    service = Service(down_for=0.0)
    service.due(1)
    service.root.delete("step-000000001/__0_0.distcp")
    service.run()
    assert service.pauses == []
    assert all(isinstance(each, UploadError) for each in service.outcomes[1])
    assert service.steps == []


def test_a_torn_upload_that_nobody_continues_is_removed_and_one_that_goes_on_is_kept():
    service = Service(down_for=0.0)
    info = save(service.root, 1)
    torn = f".incomplete-{info.save_id}-{info.name}"
    for name in (torn, ".incomplete-00000099-step-000000099"):
        service.inner.write_bytes(f"{name}/manifest.json", b"{}")
    tier = TierRoot(
        replace(service.uploader.upload, keep=None),
        service.inner,
        CheckpointOptions(),
        telemetry=Telemetry(),
        until_idle=lambda: None,
        spared={torn},
    )
    tier.take()
    assert [entry.name for entry in service.inner.list("") if entry.is_directory] == [OWN, torn]
    tier.release()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_an_upload_gives_way_to_the_training():
    """Each thread that reads or sends a file has a lower priority; that of the training stays."""

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    ours, seen = priority(), dict[str, int]()
    service = Service(down_for=0)
    service.on_answer = lambda: seen.update({threading.current_thread().name: priority()})
    service.due(1)
    service.run()
    sending = [seen[name] for name in seen if name.startswith(("ckpt-upload", "ckpt-send"))]
    assert service.steps == [1]
    assert sending
    assert min(sending) >= max(ours, 10)
    assert priority() == ours
