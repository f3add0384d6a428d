"""The context of all operations of a manager: storage, ranks and telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ckpt_core.coordination import Coordinator
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job that a manager serves.

    Attributes:
        storage: the root.
        coordinator: the ranks of the job.
        telemetry: receives spans and events.
    """

    storage: Storage
    coordinator: Coordinator
    telemetry: Telemetry
