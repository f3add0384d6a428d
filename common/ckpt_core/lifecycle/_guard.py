"""Holds back whatever may change the state until the copies of saves in flight are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch.utils.hooks import RemovableHandle

from ckpt_core.staging import DeferredCopies


@final
class StepGuard:
    """Makes steps of optimizers wait for copies that are still being made. Main thread only."""

    def __init__(self) -> None:
        self._pending: list[DeferredCopies] = []
        self._hooks: list[RemovableHandle] = []

    def watch(self, deferred: DeferredCopies, optimizers: Sequence[Any]) -> None:
        """From now on steps of `optimizers` wait for `deferred`, and for those before that are not done."""
        self._pending = [each for each in self._pending if not each.done] + [deferred]
        self._unhook()
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in optimizers]

    def wait(self) -> None:
        """Let what this thread does next come after every copy.

        On CUDA, what it enqueues next on the current streams.
        """
        for deferred in self._pending:
            deferred.wait()
        self._pending = [each for each in self._pending if not each.done]

    def close(self) -> None:
        """Take the hooks away."""
        self._unhook()
        self._pending = []

    def _before_step(self, *_: Any) -> None:
        self.wait()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
