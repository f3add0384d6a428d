"""Messages over a torch.distributed Store: small, ordered, with deadlines that name who is missing."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, final

import torch.distributed as dist

from ckpt_core.coordination._base import failure_text
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError

_SLICE_SECONDS = 2.0  # so that Ctrl-C is heard while waiting
_GRACE_SECONDS = 5.0  # so that the coordinator's verdict, which names the missing, arrives first


class MessageStore(Protocol):
    """What we use of a torch.distributed Store (whose own stubs leave half of it out)."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


@final
class Channel:
    """One rank's end of a line of exchanges; used by one thread at a time.

    Messages are pickles between the ranks of one job, which trust each other already.
    """

    def __init__(self, store: MessageStore, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._stale: list[str] = []

    def broadcast(self, topic: str, value: Any, deadline_seconds: float) -> Any:
        """The coordinator's value on every rank."""
        key = f"{topic}/value"
        if self._rank == 0:
            self._store.set(key, pickle.dumps(value))
            self._stale.append(key)
            return value
        return pickle.loads(self._await(key, [0], topic, deadline_seconds + _GRACE_SECONDS))  # noqa: S301

    def exchange(
        self, topic: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline_seconds: float
    ) -> Any:
        """Values to the coordinator, answers back; see `Coordinator.exchange`."""
        if self._rank == 0:
            return self._lead(topic, value, decide, deadline_seconds)
        failed = isinstance(value, BaseException)
        message = {"failure": failure_text(value)} if failed else {"value": value}
        self._store.set(f"{topic}/arrive/{self._rank}", pickle.dumps(message))
        reply = self._await(f"{topic}/depart/{self._rank}", [0], topic, deadline_seconds + _GRACE_SECONDS)
        return _open_reply(pickle.loads(reply), value if failed else None)  # noqa: S301

    def _lead(
        self, topic: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline_seconds: float
    ) -> Any:
        cause: BaseException | None = value if isinstance(value, BaseException) else None
        reply: dict[str, Any]
        answers: list[Any] = []
        try:
            values = self._collect(topic, value, deadline_seconds)
            self._forget()
            answers = decide(values)
            reply = {}
        except CheckpointError as error:
            reply, cause = {"error": error}, cause or error.__cause__
        except Exception as error:  # noqa: BLE001 - every rank is told through the reply below
            text = failure_text(error)
            reply = {"error": CoordinationError(f"rank 0: {text}", failures={0: text})}
            cause = error
        self._answer(topic, reply, answers)
        return _open_reply({**reply, "value": answers[0] if answers else None}, cause)

    def _answer(self, topic: str, reply: dict[str, Any], answers: Sequence[Any]) -> None:
        for rank in range(1, self._world_size):
            own = reply if "error" in reply else {"value": answers[rank]}
            self._store.set(f"{topic}/depart/{rank}", pickle.dumps(own))
            self._stale += [f"{topic}/depart/{rank}", f"{topic}/arrive/{rank}"]

    def _collect(self, topic: str, value: Any, deadline_seconds: float) -> list[Any]:
        deadline = time.monotonic() + deadline_seconds
        failures: dict[int, str] = {}
        values = [value]
        if isinstance(value, BaseException):
            failures[0] = failure_text(value)
        keys = {rank: f"{topic}/arrive/{rank}" for rank in range(1, self._world_size)}
        for rank, key in keys.items():
            if not self._wait([key], deadline):
                missing = [r for r, k in keys.items() if r >= rank and not self._store.check([k])]
                raise _missing(topic, missing or [rank], deadline_seconds, failures)
            message = pickle.loads(self._store.get(key))  # noqa: S301
            if "failure" in message:
                failures[rank] = message["failure"]
            values.append(message.get("value"))
        if failures:
            raise CoordinationError(_list_failures(failures), failures=failures)
        return values

    def _await(self, key: str, awaited: Sequence[int], topic: str, deadline_seconds: float) -> bytes:
        if not self._wait([key], time.monotonic() + deadline_seconds):
            raise _missing(topic, awaited, deadline_seconds, {})
        return self._store.get(key)

    def _wait(self, keys: list[str], deadline: float) -> bool:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return self._store.check(keys)
            try:
                self._store.wait(keys, timedelta(seconds=min(remaining, _SLICE_SECONDS)))
            except dist.DistStoreError:
                continue
            except RuntimeError as error:
                raise CoordinationError(
                    f"the job's store is gone while waiting for {keys[0]}: {error}. "
                    "The process that serves it (rank 0 or the launcher) has probably died."
                ) from error
            return True

    def _forget(self) -> None:
        """Delete the keys of earlier exchanges: all ranks have arrived at a later one, so they are read."""
        for key in self._stale:
            self._store.delete_key(key)
        self._stale.clear()


def _open_reply(reply: dict[str, Any], cause: BaseException | None) -> Any:
    if "error" in reply:
        raise reply["error"] from cause
    return reply["value"]


def _list_failures(failures: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))


def _missing(topic: str, ranks: Sequence[int], seconds: float, failures: dict[int, str]) -> DeadlineError:
    known = f" ({_list_failures(failures)})" if failures else ""
    names = ", ".join(str(rank) for rank in ranks)
    return DeadlineError(
        f"{topic}: rank(s) {names} did not arrive within {seconds:g} s{known}; "
        "they have died, hang, or did not make the same call",
        awaited=tuple(ranks),
        failures=dict(failures),
    )
