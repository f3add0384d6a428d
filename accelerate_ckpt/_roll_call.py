"""Which ranks come to a save: in scripts for stock it may be the main one alone."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal, final

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from ckpt_core import DeadlineError
from ckpt_core._torch_internals import default_store
from ckpt_core.disclosure import logger_of

_logger = logger_of(__name__)

PATIENCE_SECONDS = 10.0
"""How long the main process waits for the others before it says so."""
_POLL_SECONDS = 0.05
_ADVICE = "Call save_state() on every process; is it under `if accelerator.is_main_process`?"
_numbers = itertools.count()


@final
class RollCall:
    """Finds out who comes to a save, until all ranks have come to one together.

    A late rank learns what was decided without it, so that no checkpoint is of two moments. Main thread only.
    """

    def __init__(self, accelerator: Accelerator, deadline_seconds: float) -> None:
        self._accelerator = accelerator
        self._deadline_seconds = deadline_seconds
        self._prefix = f"ckpt_suite/roll_call/{next(_numbers)}"
        self._round = 0
        self._over = False
        self._saves = 0

    def call(self) -> Literal["all", "alone", "without"]:
        """Return who saves now: all, this one alone, or the main process without it."""
        if self._is_over():
            return "all"
        store, is_main = default_store(), self._accelerator.process_index == 0
        if is_main and store.check([self._key]):
            if not store.check(self._others()):
                return "alone"
            self._round += 1  # they were late, and may come again
        self._over = self._decide(is_main=is_main)
        if self._over:
            return "all"
        if is_main:
            self._warn("the main process saves alone, without random numbers and stateful data of the others")
            return "alone"
        self._round += 1
        _logger.warning("the main process has saved without this rank, which came later. %s", _ADVICE)
        return "without"

    def _decide(self, *, is_main: bool) -> bool:
        """Wait for the others or the main process; return whether all are here."""
        store, others = default_store(), self._others()
        store.set(self._key_of(self._accelerator.process_index), "0")
        began, told = time.monotonic(), False
        while not store.check([self._key]):
            waited, all_here = time.monotonic() - began, is_main and store.check(others)
            late = waited > min(PATIENCE_SECONDS, self._deadline_seconds)
            if all_here or (is_main and late and self._has_replicas()):
                store.set(self._key, "all" if all_here else "alone")
            elif late and not told:
                told = True
                self._warn()
            elif waited > self._deadline_seconds:
                store.delete_key(self._key_of(self._accelerator.process_index))
                missing = self._missing()
                raise DeadlineError(
                    f"rank {_listed(missing)} did not come to save_state() within "
                    f"{self._deadline_seconds:g} s: nothing was saved. {_ADVICE}",
                    awaited=missing,
                )
            time.sleep(_POLL_SECONDS)
        found: bytes = store.get(self._key)
        return found == b"all"

    @contextmanager
    def watching(self) -> Generator[None]:
        """Warn of ranks that do not come while a save by all ranks waits for them."""
        watch = threading.Timer(PATIENCE_SECONDS, self._warn)
        if self._over:
            own, self._saves = self._accelerator.process_index, self._saves + 1
            default_store().set(self._key_of(own), str(self._saves))  # nobody waits for it
            if own == 0:
                watch.daemon = True
                watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def was_missed(self) -> bool:
        """Return whether the main process has saved alone meanwhile; collective."""
        if self._is_over() or not default_store().check([self._key]):
            return False
        self._round += 1
        return True

    @property
    def _key(self) -> str:
        return f"{self._prefix}/{self._round}"

    def _others(self) -> list[str]:
        own, size = self._accelerator.process_index, self._accelerator.num_processes
        return [f"{self._key}/{rank}" for rank in range(size) if rank != own]

    def _is_over(self) -> bool:
        return self._over or self._accelerator.num_processes == 1 or not torch.distributed.is_initialized()

    def _has_replicas(self) -> bool:
        models = self._accelerator._models
        sharded = any(isinstance(each, DTensor) for model in models for each in model.parameters())
        return not sharded and self._accelerator.distributed_type != DistributedType.FSDP

    def _key_of(self, rank: int) -> str:
        return f"{self._prefix}/came/{rank}" if self._over else f"{self._key}/{rank}"

    def _missing(self) -> list[int]:
        store, ranks = default_store(), range(self._accelerator.num_processes)
        keys = map(self._key_of, ranks)
        own = self._accelerator.process_index
        return [
            rank
            for rank, key in zip(ranks, keys, strict=True)
            if rank != own and (not store.check([key]) or int(store.get(key)) < self._saves)
        ]

    def _warn(self, consequence: str = "this save waits for them") -> None:
        if missing := self._missing():
            _logger.warning(
                "rank %s did not come to save_state() within %g s: %s. %s",
                _listed(missing),
                PATIENCE_SECONDS,
                consequence,
                _ADVICE,
            )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8]))
