"""Copies that go on while the training computes, and that the next optimizer step waits for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ckpt_core.errors import CheckpointError


@final
@dataclass(frozen=True, slots=True)
class Copy:
    """One copy to be made: from a live tensor into its slot; `name` is for messages."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


@final
class DeferredCopies:
    """Copies of tensors that change only in an optimizer step.

    Who calls what: 1. (main thread) construct, at the moment of the save. 2. (background thread) `finish`,
    which on the CPU makes the copies and on CUDA waits for them. 3. (main thread) `wait`, from a step
    pre-hook of every optimizer that changes the tensors.

    On CUDA the copies run on a side stream behind everything the training has enqueued so far, and an
    optimizer step is only *enqueued* behind them: the host never waits.

    Tensors' version counters tell whether something else has changed a source while it was being copied;
    `finish` then fails, so that a mixture of two moments never becomes a checkpoint. Changes that bypass the
    counter (`tensor.data`) cannot be seen: call `wait` before such a change.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies: Sequence[Copy] = copies
        self._versions = [_version(copy.source) for copy in copies]
        self._guard = threading.Lock()
        self._checked = False
        self._changed: list[str] = []
        self._done = threading.Event()
        self._on_host = any(not copy.source.is_cuda for copy in copies)
        self._cuda: dict[torch.device, Any] = {}
        for device in {copy.source.device for copy in copies if copy.source.is_cuda}:
            self._cuda[device] = self._enqueue(device)

    def finish(self) -> None:
        """Return when every copy is made.

        Raises:
            CheckpointError: a source was changed meanwhile, other than by a step that waited.
        """
        try:
            for copy in self._copies:
                if not copy.source.is_cuda:
                    copy.target.copy_(copy.source)
            for event in self._cuda.values():
                event.synchronize()
            self._check()
        finally:
            self._done.set()
            # Clones and slots are not needed any more, and this object may live until the next save.
            self._copies = ()
        if self._changed:
            raise CheckpointError(
                f"{len(self._changed)} tensor(s) changed while they were being copied, first "
                f"{self._changed[0]}, and not in a step of the optimizers given: wait for handle.staged "
                "before changing weights by other means, or use staging='blocking'"
            )

    def wait(self) -> None:
        """Let what the calling thread does next come after the copies."""
        if self._on_host:
            self._done.wait()
        self._check()
        for device, event in self._cuda.items():
            torch.cuda.current_stream(device).wait_event(event)

    def _enqueue(self, device: torch.device) -> Any:
        side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for copy in self._copies:
                if copy.source.device == device:
                    copy.target.copy_(copy.source, non_blocking=True)
                    # Should the training drop the tensor, its memory must not be given away before.
                    copy.source.record_stream(side)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(side)
        return done

    def _check(self) -> None:
        """Compare versions once: after the copies, but before a step that has waited changes them."""
        with self._guard:
            if self._checked:
                return
            self._checked = True
            self._changed = [
                copy.name
                for copy, version in zip(self._copies, self._versions, strict=True)
                if _version(copy.source) != version
            ]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
