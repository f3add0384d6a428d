"""Messages over a torch.distributed Store: small, ordered, with deadlines that name who is missing."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

from ckpt_core.coordination._base import failure_text
from ckpt_core.coordination._mailbox import Mailbox, MessageStore
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError

_GRACE_SECONDS = 5.0  # so that the coordinator's verdict, which names the missing, arrives first
_DECIDING = "deciding"
_DECIDED = "decided"


@final
class Channel:
    """One rank's end of a line of exchanges; used by one thread at a time.

    Messages are pickles between the ranks of one job, which trust each other already. The coordinator reads
    all messages of an exchange in one request, and every rank deletes its own: with thousands of ranks the
    coordinator would otherwise be busy with the store alone.

    Of every exchange either all ranks hear the same end, or none is told that it went well: before the
    coordinator decides, and before another rank gives up, it leaves its word under one key, where the first
    stands. So a coordinator that wakes up after the others have given up decides nothing any more.
    """

    def __init__(
        self, store: MessageStore, rank: int, world_size: int, *, patience_seconds: float = 1800.0
    ) -> None:
        self._mail = Mailbox(store, patience_seconds)
        self._rank = rank
        self._world_size = world_size
        self._stale: list[str] = []

    def broadcast(self, topic: str, value: Any, deadline_seconds: float) -> Any:
        """The coordinator's value on every rank."""
        key = f"{topic}/value"
        if self._rank == 0:
            self._mail.put(key, pickle.dumps(value))
            self._stale.append(key)
            return value
        return pickle.loads(self._await(key, topic, deadline_seconds))  # noqa: S301

    def announce(self, topic: str, make: Callable[[], Any], deadline_seconds: float) -> Any:
        """What the coordinator alone makes, or the error of making it; see `Coordinator.announce`."""
        key = f"{topic}/said"
        if self._rank != 0:
            return self._opened(self._await(key, topic, deadline_seconds), None)
        self._stale.append(key)

        def answer() -> tuple[Any, dict[str, bytes]]:
            made = make()
            return made, {key: _pack_answer(made)}

        return self._decided(topic, answer, [key], None)

    def exchange(
        self,
        topic: str,
        value: Any,
        decide: Callable[[list[Any]], list[Any]],
        deadline_seconds: float,
        *,
        waited_seconds: float = 0.0,
    ) -> Any:
        """Values to the coordinator, to each rank its answer; see `Coordinator.exchange`.

        `waited_seconds` is how long the ranks have been waited for by other means already.
        """
        if self._rank:
            return self._follow(
                topic, value, f"{topic}/depart/{self._rank}", deadline_seconds, waited_seconds=waited_seconds
            )
        keys = [f"{topic}/depart/{rank}" for rank in range(1, self._world_size)]

        def answer() -> tuple[Any, dict[str, bytes]]:
            answers = decide(self._collect(topic, value, deadline_seconds, waited_seconds))
            word = self._mail.claim(f"{topic}/outcome", _DECIDED)
            self._stale.append(f"{topic}/outcome")
            if word != _DECIDED:
                raise _came_late(topic, word)
            # Packed before the first is sent: what cannot be sent must not leave ranks waiting.
            return answers[0], {key: _pack_answer(answers[rank]) for rank, key in enumerate(keys, start=1)}

        return self._decided(topic, answer, keys, value)

    def meet(
        self, topic: str, value: Any, commit: Callable[[list[Any]], Any], deadline_seconds: float
    ) -> Any:
        """Values to the coordinator, one answer to all; see `Coordinator.meet`."""
        key = f"{topic}/depart"
        if self._rank:
            return self._follow(topic, value, key, deadline_seconds)

        def answer() -> tuple[Any, dict[str, bytes]]:
            committed = commit(self._collect(topic, value, deadline_seconds))
            return committed, {key: _pack_answer(committed)}

        try:
            return self._decided(topic, answer, [key], value)
        finally:
            self._stale.append(key)

    def _follow(
        self,
        topic: str,
        value: Any,
        reply_key: str,
        deadline_seconds: float,
        *,
        waited_seconds: float = 0.0,
    ) -> Any:
        message, cause = _pack(value)
        own = f"{topic}/arrive/{self._rank}"
        self._mail.put(own, message)
        reply = self._await(
            reply_key, topic, deadline_seconds, may_be_deciding=True, waited_seconds=waited_seconds
        )
        # Answered, so it has been read.
        self._mail.delete([own] if reply_key.endswith("/depart") else [own, reply_key])
        return self._opened(reply, cause)

    def _opened(self, reply: bytes, cause: BaseException | None) -> Any:
        answer = pickle.loads(reply)  # noqa: S301
        if "error" in answer:
            raise answer["error"] from cause
        return answer["value"]

    def _decided(
        self,
        topic: str,
        decide: Callable[[], tuple[Any, dict[str, bytes]]],
        reply_keys: Sequence[str],
        value: Any,
    ) -> Any:
        """Decide, and send the replies; an error goes to every rank before it is raised."""
        cause = value if isinstance(value, BaseException) else None
        try:
            answer, replies = decide()
        except CheckpointError as error:
            self._refuse(reply_keys, error)
            raise error from cause or error.__cause__
        except Exception as error:
            text = failure_text(error)
            refusal = CoordinationError(_told(topic, f"rank 0: {text}"), failures={0: text})
            self._refuse(reply_keys, refusal)
            raise refusal from error
        for key, reply in replies.items():
            self._mail.put(key, reply)
        return answer

    def _refuse(self, reply_keys: Sequence[str], error: CheckpointError) -> None:
        reply = _pack_error(error)
        for key in reply_keys:
            self._mail.put(key, reply)

    def _collect(
        self, topic: str, value: Any, deadline_seconds: float, waited_seconds: float = 0.0
    ) -> list[Any]:
        deadline = time.monotonic() + deadline_seconds
        failures = {0: failure_text(value)} if isinstance(value, BaseException) else dict[int, str]()
        keys = [f"{topic}/arrive/{rank}" for rank in range(1, self._world_size)]
        if keys and not self._mail.wait(keys, deadline):
            missing = [rank for rank, key in enumerate(keys, start=1) if not self._mail.has([key])]
            for rank, message in enumerate(self._arrived(keys, missing), start=1):
                if message is not None and "failure" in message:
                    failures[rank] = message["failure"]
            raise _missing(topic, missing or [len(keys)], waited_seconds + deadline_seconds, failures)
        messages = self._arrived(keys, ())
        self._forget()
        self._stale.append(f"{topic}/verdict")
        failures |= {
            rank: message["failure"]
            for rank, message in enumerate(messages, start=1)
            if message is not None and "failure" in message
        }
        if failures:
            raise CoordinationError(_told(topic, _list_failures(failures)), failures=failures)
        word = self._mail.claim(f"{topic}/verdict", _DECIDING)
        if word != _DECIDING:
            raise _came_late(topic, word)
        return [value, *(message.get("value") for message in messages if message is not None)]

    def _arrived(self, keys: Sequence[str], missing: Collection[int]) -> list[dict[str, Any] | None]:
        """The messages in rank order, None for a rank that is missing."""
        there = [key for rank, key in enumerate(keys, start=1) if rank not in missing]
        found = dict(zip(there, self._mail.take_all(there), strict=True))
        return [pickle.loads(found[key]) if key in found else None for key in keys]  # noqa: S301

    def _await(
        self,
        key: str,
        topic: str,
        deadline_seconds: float,
        *,
        may_be_deciding: bool = False,
        waited_seconds: float = 0.0,
    ) -> bytes:
        """What the coordinator leaves under `key`; it gets a second chance if it is known to be at it."""
        grace = min(_GRACE_SECONDS, deadline_seconds)
        if self._mail.wait([key], time.monotonic() + deadline_seconds + grace):
            return self._mail.take(key)
        if not may_be_deciding or self._mail.claim(f"{topic}/verdict", f"rank {self._rank}") != _DECIDING:
            raise _missing(topic, [0], waited_seconds + deadline_seconds, {})
        if self._mail.wait([key], time.monotonic() + deadline_seconds):
            return self._mail.take(key)
        # Of an exchange the coordinator hears in time that it is no use; a commit cannot be taken back.
        if self._mail.claim(f"{topic}/outcome", f"rank {self._rank}") == _DECIDED:
            return self._await(key, topic, deadline_seconds)
        raise DeadlineError(
            f"{topic}: rank(s) 0 had heard from all ranks, and has not told within {deadline_seconds:g} s "
            "how it ended: it has died or hangs; whether it came to its end is not known here",
            awaited=(0,),
            in_doubt=True,
        )

    def _forget(self) -> None:
        """Delete what all ranks have read, for all of them have arrived at a later exchange."""
        self._mail.delete(self._stale)
        self._stale.clear()


def _pack(value: Any) -> tuple[bytes, BaseException | None]:
    """A rank's message and the error in it, if it is one; what cannot be pickled is one, too."""
    if not isinstance(value, BaseException):
        try:
            return pickle.dumps({"value": value}), None
        except Exception as error:  # noqa: BLE001 - every rank is told through the message below
            value = error
    return pickle.dumps({"failure": failure_text(value)}), value


def _pack_answer(answer: Any) -> bytes:
    return pickle.dumps({"value": answer})


def _pack_error(error: CheckpointError) -> bytes:
    try:
        return pickle.dumps({"error": error})
    except Exception:  # noqa: BLE001 - it is told as text
        text = failure_text(error)
        return pickle.dumps({"error": CoordinationError(f"rank 0: {text}", failures={0: text})})


def _list_failures(failures: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))


def _told(topic: str, text: str) -> str:
    """The text, with what the ranks were at, where the topic tells it in words."""
    return f"{topic}: {text}" if topic.startswith("while ") else text


def _came_late(topic: str, word: str) -> DeadlineError:
    return DeadlineError(f"{topic}: {word} gave up waiting for rank 0, which came too late", awaited=(0,))


def _missing(topic: str, ranks: Sequence[int], seconds: float, failures: dict[int, str]) -> DeadlineError:
    known = f" ({_list_failures(failures)})" if failures else ""
    names = ", ".join(str(rank) for rank in ranks)
    return DeadlineError(
        f"{topic}: rank(s) {names} did not arrive within {seconds:g} s{known}; "
        "they have died, hang, or did not make the same call",
        awaited=tuple(ranks),
        failures=dict(failures),
    )
