"""What all ranks ask for: checked on each, and the same on all, before anything is done about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ckpt_core.codec import MAX_COUNT
from ckpt_core.coordination import Coordinator
from ckpt_core.errors import ConfigError
from ckpt_core.validation import integer, plain_integer, require, text

T = TypeVar("T")


def _agreed(coordinator: Coordinator, call: str, ask: Callable[[], T]) -> T:
    """Tell what every rank asks for with `call`; a rank that asks wrongly keeps no other waiting. Collective.

    Args:
        coordinator: of the ranks.
        call: the method, as the user calls it.
        ask: gives what this rank asks for, which must be plain.

    Raises:
        ConfigError: `ask` raised one on any rank, or ranks ask for different things; the same on all.
    """
    said: tuple[T | None, str | None]
    try:
        said = ask(), None
    except ConfigError as error:
        said = None, str(error)

    def decide(heard: list[tuple[T | None, str | None]]) -> list[T | None]:
        for rank, (_, problem) in enumerate(heard):
            if problem is not None:
                raise ConfigError(problem if len(heard) == 1 else f"rank {rank}: {problem}")
        asked = [each for each, _ in heard]
        if any(each != asked[0] for each in asked):
            different = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(asked[:8]))
            raise ConfigError(f"{call}: ranks ask for different things, and must agree: {different}")
        return asked

    return coordinator.gather_scatter(said, decide, what=f"agreeing on {call}")  # type: ignore[return-value]


def agreed_place(
    coordinator: Coordinator,
    call: str,
    step: int | None,
    name: str | None,
    *,
    check: Callable[[], object] = lambda: None,
) -> tuple[int | None, str | None]:
    """Tell which checkpoint all ranks ask for; neither step nor name: the newest. Collective.

    `check` raises ConfigError if anything else that this rank asks for is wrong.

    Raises:
        ConfigError: on any rank it is no step or no name in a root, or they ask for different ones.
    """

    def ask() -> tuple[int | None, str | None]:
        require(call, None if name is None else _key("name", name))
        check()
        return None if step is None else checked_step(call, step), name

    return _agreed(coordinator, call, ask)


def agreed_step(coordinator: Coordinator, call: str, step: int, *reasons: str) -> int:
    """Tell which step all ranks ask for; of their reasons, the coordinator's counts. Collective.

    Raises:
        ConfigError: on any rank it is no step, or a reason is none, or they ask for different ones.
    """

    def ask() -> int:
        require(call, *(text("reason", reason) for reason in reasons))
        return checked_step(call, step)

    return _agreed(coordinator, call, ask)


def checked_step(owner: str, step: Any) -> int:
    """The step as an int.

    Raises:
        ConfigError: it is none, or larger than a checkpoint can say.
    """
    plain = plain_integer(step)
    require(owner, integer("step", plain, minimum=0, maximum=MAX_COUNT))
    return int(plain)


def _key(name: str, value: Any) -> str | None:
    """Problem of a name that must be of something below the root."""
    if (problem := text(name, value)) is not None:
        return problem
    parts = value.split("/")
    if "\0" in value or any(part in {"", ".", ".."} for part in parts):
        return (
            f"{name} must be the name of a directory in the root, not {value!r}; for another, give its root"
        )
    return None
