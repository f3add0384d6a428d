"""Messages over a torch.distributed Store: small, ordered, with deadlines that name who is missing."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch.distributed as dist

from ckpt_core.coordination._base import failure_text
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError

_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.25
_PAUSE_GROWTH = 1.25
_GRACE_SECONDS = 5.0  # so that the coordinator's verdict, which names the missing, arrives first


class MessageStore(Protocol):
    """What we use of a torch.distributed Store (whose own stubs leave half of it out)."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

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
            self._set(key, pickle.dumps(value))
            self._stale.append(key)
            return value
        return pickle.loads(self._await(key, [0], topic, deadline_seconds + _GRACE_SECONDS))  # noqa: S301

    def exchange(
        self, topic: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline_seconds: float
    ) -> Any:
        """Values to the coordinator, answers back; see `Coordinator.exchange`."""
        if self._rank == 0:
            return self._lead(topic, value, decide, deadline_seconds)
        message, cause = _pack(value)
        self._set(f"{topic}/arrive/{self._rank}", message)
        reply = self._await(f"{topic}/depart/{self._rank}", [0], topic, deadline_seconds + _GRACE_SECONDS)
        answer = pickle.loads(reply)  # noqa: S301
        if "error" in answer:
            raise answer["error"] from cause
        return answer["value"]

    def _lead(
        self, topic: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline_seconds: float
    ) -> Any:
        cause = value if isinstance(value, BaseException) else None
        try:
            values = self._collect(topic, value, deadline_seconds)
            self._forget()
            answers = decide(values)
            # Packed before the first is sent: what cannot be sent must not leave ranks waiting.
            replies = [pickle.dumps({"value": answers[rank]}) for rank in range(1, self._world_size)]
        except CheckpointError as error:
            self._answer(topic, [_pack_error(error)] * (self._world_size - 1))
            raise error from cause or error.__cause__
        except Exception as error:
            text = failure_text(error)
            refusal = CoordinationError(f"rank 0: {text}", failures={0: text})
            self._answer(topic, [_pack_error(refusal)] * (self._world_size - 1))
            raise refusal from error
        self._answer(topic, replies)
        return answers[0]

    def _answer(self, topic: str, replies: Sequence[bytes]) -> None:
        for rank, reply in enumerate(replies, start=1):
            self._set(f"{topic}/depart/{rank}", reply)
            self._stale += [f"{topic}/depart/{rank}", f"{topic}/arrive/{rank}"]

    def _collect(self, topic: str, value: Any, deadline_seconds: float) -> list[Any]:
        deadline = time.monotonic() + deadline_seconds
        failures: dict[int, str] = {}
        values = [value]
        if isinstance(value, BaseException):
            failures[0] = failure_text(value)
        keys = {rank: f"{topic}/arrive/{rank}" for rank in range(1, self._world_size)}
        for rank, key in keys.items():
            if not self._wait(key, deadline):
                missing = [r for r, k in keys.items() if r >= rank and not self._has([k])]
                raise _missing(topic, missing or [rank], deadline_seconds, failures)
            message = pickle.loads(self._get(key))  # noqa: S301
            if "failure" in message:
                failures[rank] = message["failure"]
            values.append(message.get("value"))
        if failures:
            raise CoordinationError(_list_failures(failures), failures=failures)
        return values

    def _await(self, key: str, awaited: Sequence[int], topic: str, deadline_seconds: float) -> bytes:
        if not self._wait(key, time.monotonic() + deadline_seconds):
            raise _missing(topic, awaited, deadline_seconds, {})
        return self._get(key)

    def _wait(self, key: str, deadline: float) -> bool:
        # Asked again and again: a store that waits for us cannot be interrupted by Ctrl-C, and writes a line
        # to stderr whenever its time is up. The longer it takes, the less a moment more matters.
        pause = _SHORTEST_PAUSE
        while not self._has([key]):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
        return True

    def _set(self, key: str, value: bytes) -> None:
        with _told_if_gone():
            self._store.set(key, value)

    def _get(self, key: str) -> bytes:
        with _told_if_gone():
            return self._store.get(key)

    def _has(self, keys: list[str]) -> bool:
        with _told_if_gone():
            return self._store.check(keys)

    def _forget(self) -> None:
        """Delete the keys of earlier exchanges: all ranks have arrived at a later one, so they are read."""
        with _told_if_gone():
            for key in self._stale:
                self._store.delete_key(key)
        self._stale.clear()


@contextmanager
def _told_if_gone() -> Generator[None]:
    """Turn the loss of the store into an error for people; a time-out of `wait` passes."""
    try:
        yield
    except dist.DistStoreError:
        raise
    except RuntimeError as error:
        raise CoordinationError(
            f"the job's store is gone: {error}. "
            "The process that serves it (rank 0 or the launcher) has probably died"
        ) from error


def _pack(value: Any) -> tuple[bytes, BaseException | None]:
    """A rank's message and the error in it, if it is one; what cannot be pickled is one, too."""
    if not isinstance(value, BaseException):
        try:
            return pickle.dumps({"value": value}), None
        except Exception as error:  # noqa: BLE001 - every rank is told through the message below
            value = error
    return pickle.dumps({"failure": failure_text(value)}), value


def _pack_error(error: CheckpointError) -> bytes:
    try:
        return pickle.dumps({"error": error})
    except Exception:  # noqa: BLE001 - it is told as text
        text = failure_text(error)
        return pickle.dumps({"error": CoordinationError(f"rank 0: {text}", failures={0: text})})


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
