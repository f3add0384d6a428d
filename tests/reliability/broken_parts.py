"""Parts of the crash command that find something, or fall over."""

from __future__ import annotations

from benchmarks.crashing.outcome import Outcome


def run(*, seed, folder, count):
    assert folder.is_dir()
    for number in range(count):
        lost = seed == 2 and number == 0
        yield Outcome(
            sweep="a sweep", point=str(number), kills=1, acknowledged=2, resumed=1 if lost else 2, problem=""
        )
    if seed == 3:
        raise ZeroDivisionError("the emulator is gone")
