"""Parts of the command that find something, or fall over."""

from __future__ import annotations

from tests.reliability.outcome import Outcome


def run(choice, folder):
    assert folder.is_dir()
    for number in range(choice.count):
        lost = choice.seed == 2 and number == 0
        yield Outcome(
            sweep="a sweep", point=str(number), kills=1, acknowledged=2, resumed=1 if lost else 2, problem=""
        )
    if choice.seed == 3:
        raise ZeroDivisionError("the emulator is gone")
