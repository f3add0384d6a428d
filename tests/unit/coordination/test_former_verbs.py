"""Coordinators written for version 0.1, one class with the former verbs, go on working."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ckpt_core import CheckpointManager, EverySeconds
from ckpt_core.coordination import Coordinator, Solo


def make_theirs() -> type[Coordinator]:
    """As a user may have written it: every method of the former contract, on top of one of ours."""

    class Theirs(Coordinator):
        rank = 0
        world_size = 1

        def __init__(self) -> None:
            self.inner: Any = Solo()
            self.calls: list[str] = []

        @property
        def relays(self) -> bool:
            self.calls.append("relays")
            return bool(self.inner.relays)

        def as_of_now(self) -> Coordinator:
            self.calls.append("as_of_now")
            return self

        def agree(self, value: Any, *, what: str = "") -> Any:
            self.calls.append("agree")
            return self.inner.agree(value, what=what)

        def exchange(
            self,
            value: Any,
            decide: Callable[[list[Any]], list[Any]],
            *,
            what: str = "",
            deadline_seconds: float | None = None,
        ) -> Any:
            self.calls.append("exchange")
            return self.inner.exchange(value, decide, what=what, deadline_seconds=deadline_seconds)

        def combine(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
            self.calls.append("combine")
            return tuple(self.inner.combine(flags, what=what))

        def relay(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
            self.calls.append("relay")
            self.inner.relay(buffer, ranks)

        def announce(self, name: str, make: Callable[[], Any], *, deadline_seconds: float) -> Any:
            self.calls.append("announce")
            return self.inner.announce(name, make, deadline_seconds=deadline_seconds)

        def meet(self, name: str, payload: Any, commit: Any, *, deadline_seconds: float) -> bytes:
            self.calls.append("meet")
            return bytes(self.inner.meet(name, payload, commit, deadline_seconds=deadline_seconds))

        def close(self) -> None:
            self.inner.close()

    return Theirs


def test_a_coordinator_with_the_former_verbs_saves_and_loads(tmp_path):
    with pytest.warns(
        DeprecationWarning, match="agree is now broadcast.*meet is now CommitChannel.commit_ba"
    ):
        theirs: Any = make_theirs()()
    with CheckpointManager(tmp_path, coordinator=theirs, save=EverySeconds(0.001)) as checkpoints:
        checkpoints.maybe_save(1, {"x": torch.arange(3.0)})
        checkpoints.save(2, {"x": torch.arange(3.0)}).result(60)
        target = {"x": torch.zeros(3)}
        assert checkpoints.resume(target) == 2
    assert target["x"].tolist() == [0, 1, 2]
    assert {"exchange", "combine", "as_of_now", "announce", "meet"} <= set(theirs.calls)
    assert theirs.broadcast(5) == 5
    theirs.broadcast_tensor(torch.zeros(3, dtype=torch.uint8), [0])
    assert not theirs.can_broadcast_tensors
    assert theirs.calls[-3:] == ["agree", "relay", "relays"]


def test_ours_answer_to_the_former_verbs():
    ours: Any = Solo()
    assert ours.agree(1) == 1
    assert ours.exchange(2, lambda values: [values[0] * 10]) == 20
    assert ours.once(lambda: 5) == 5
    assert ours.combine([3, 0]) == (3, 0)
    assert ours.as_of_now() is ours
    assert ours.announce("name", lambda: 6, deadline_seconds=1) == 6
    assert ours.meet("name", b"in", lambda payloads: payloads[0] + b" out", deadline_seconds=1) == b"in out"
    assert not ours.relays
    ours.relay(torch.zeros(3, dtype=torch.uint8), [0])


def test_a_coordinator_with_the_present_verbs_is_not_warned_of(recwarn):
    class Present(Coordinator):
        def broadcast(self, value: Any, *, what: str = "") -> Any: ...

    assert not recwarn.list
