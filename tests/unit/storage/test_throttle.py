from __future__ import annotations

import pytest

from ckpt_core.storage import Throttle


class Time:
    """A clock that only sleeping and writing move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def throttle(time: Time, bytes_per_second: float) -> Throttle:
    return Throttle(bytes_per_second, clock=time.clock, sleep=time.sleep)


def pieces(*sizes: int) -> list[memoryview]:
    return [memoryview(bytes(size)) for size in sizes]


def test_on_average_no_more_than_the_cap_goes_by(time):
    given = pieces(1000, 1000, 500, 1000)
    assert list(throttle(time, 1000)(given)) == given
    assert time.slept == [1.0, 1.0, 0.5]


def test_the_time_that_writing_takes_counts(time):
    paced = throttle(time, 1000)(pieces(1000, 1000, 1000))
    next(paced)
    time.now += 0.75
    next(paced)
    time.now += 5
    next(paced)
    assert time.slept == [0.25]


def test_a_pause_saves_nothing_up(time):
    paced = throttle(time, 1000)
    list(paced(pieces(1000)))
    time.now += 1_000_000
    list(paced(pieces(1000, 1000, 1000)))
    assert time.slept == [1.0, 1.0]


def test_several_files_share_the_cap(time):
    paced = throttle(time, 1000)
    list(paced(pieces(1000)))
    list(paced(pieces(1000)))
    assert time.slept == [1.0]


def test_pieces_are_prepared_one_by_one(time):
    taken: list[int] = []

    def source():
        for piece in pieces(10, 20):
            taken.append(len(piece))
            yield piece

    paced = iter(throttle(time, 1)(source()))
    next(paced)
    assert taken == [10]
