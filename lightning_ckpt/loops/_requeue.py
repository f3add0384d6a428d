"""SLURM's auto-requeue: a job saves, requeues itself once, and goes on from there.

Lightning saves in the signal's handler, wherever that interrupts a step, and requeues at once. Here the
signal is a preemption as any: the job is requeued when its last checkpoint is committed and the root free.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any, Final

from ckpt_core.cadence import OnPreemption, SavePolicy, preemptions
from ckpt_core.disclosure import logger_of

JOB: Final = "slurm_job"
"""The annotation that names the job of a checkpoint."""
_SECONDS: Final = 60
_logger = logger_of(__name__)


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
