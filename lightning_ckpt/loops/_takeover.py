"""Signals in spite of Lightning's handlers, and SLURM's auto-requeue.

Lightning's SLURM handler saves wherever it interrupts a step, and requeues at once. Here its signal is a
preemption as any: the job is requeued when its last checkpoint is committed and the root free.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, final

from ckpt_core.cadence import OnPreemption, preemptions
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import shadow
from ckpt_core.policies import SavePolicy

T = TypeVar("T")

JOB: Final = "slurm_job"
"""The annotation that names the job of a checkpoint."""
_SECONDS: Final = 60
_logger = logger_of(__name__)


@final
class SignalTakeover:
    """Keeps the core's signal handlers ahead of Lightning's until the end of a fit.

    Lightning's SIGTERM handler waits for a collective: ranks that are signalled one after another, or in the
    middle of a step, hang in it. Under SLURM its SIGUSR1 handler saves wherever the signal arrives. At its
    end Lightning puts back the handlers that it has found, which are ours: so those before follow.

    Args:
        noted: one of them, to be noted for `was_noted`; None for none.
    """

    def __init__(self, connector: Any, names: Iterable[str], noted: str | None = None) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        self._connector = connector
        self._before = {each: _handler(each) for each in map(signal.Signals.__getitem__, names) if on_main}
        self._ours: dict[signal.Signals, Any] = {}
        self._noted = noted
        self.was_noted = False

    def made_by(self, make: Callable[[], T]) -> T:
        """Call `make`; keep the handlers that it installs ahead of Lightning's."""
        if self._noted is not None:  # the core's handler calls the one before it
            _install({each: self._note for each in self._before if each.name == self._noted})
        made = make()
        self._ours = {number: _handler(number) for number in self._before}
        if self._ours:
            methods = {"register_signal_handlers": self._register, "teardown": self._teardown}
            shadow(self._connector, methods)
        return made

    def _note(self, *_: Any) -> None:
        self.was_noted = True

    def _register(self) -> None:
        type(self._connector).register_signal_handlers(self._connector)
        _install(self._ours)

    def _teardown(self) -> None:
        for name in ("register_signal_handlers", "teardown"):
            vars(self._connector).pop(name, None)
        self._connector.teardown()
        _install(self._before)


def _handler(number: signal.Signals) -> Any:
    # None is a handler that C code installed, which Python cannot put back.
    return signal.getsignal(number) or signal.SIG_DFL


def _install(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def requeue_signal(trainer: Any) -> str | None:
    """Return the signal at which a Trainer is to requeue its job, or None."""
    environment = trainer._accelerator_connector.cluster_environment
    names = {cls.__name__ for cls in type(environment).__mro__}
    if "SLURMEnvironment" not in names or not environment.auto_requeue:
        return None
    return None if environment.requeue_signal is None else signal.Signals(environment.requeue_signal).name


def with_requeue(policy: SavePolicy | None, signal_name: str | None) -> SavePolicy | None:
    """Return a policy that also saves and stops at the signal to requeue."""
    heard = preemptions(policy)
    if signal_name is None or any(each.stop and signal_name in each.signals for each in heard):
        return policy
    requeue = OnPreemption((signal_name,))
    return requeue if policy is None else policy | requeue


def job_note() -> Mapping[str, Any]:
    """Return what identifies the SLURM job that saves, if there is one."""
    job = _job()
    return {} if job is None else {JOB: job}


def continues(saved: Mapping[str, Any]) -> bool:
    """Return whether SLURM has started again the very job that made these annotations."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return restarts.isdigit() and int(restarts) > 0 and _job() is not None and saved.get(JOB) == _job()


def requeue() -> None:
    """Requeue this process's job; on one rank. A failure is logged."""
    job = _job()
    command = ["scontrol", "requeue", str(job)]
    try:
        subprocess.run(command, check=True, timeout=_SECONDS, capture_output=True)  # noqa: S603 - no shell
    except (OSError, subprocess.SubprocessError) as error:
        _logger.error(  # noqa: TRY400 - the message is all there is to say
            "the job was not requeued: %r. Its last checkpoint is committed; requeue it with `%s`",
            error, " ".join(command),
        )  # fmt: skip
    else:
        _logger.warning("SLURM job %s is requeued; it continues from its last checkpoint", job)


def _job() -> str | None:
    array, task = (os.environ.get(name) for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
