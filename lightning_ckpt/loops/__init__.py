"""Lightning's training loops: positions, running values, and preemptions."""

from lightning_ckpt.loops._measured import (
    Evaluations,
    Measured,
    TokensInBatch,
    TrainingCounts,
    tokens_in_batch,
)
from lightning_ckpt.loops._positions import (
    POSITIONS,
    PREFETCHED,
    DataResume,
    configuration_of,
    position_in,
    positions,
    positions_in_samples,
    tell_of_hidden,
)
from lightning_ckpt.loops._running import Running
from lightning_ckpt.loops._takeover import (
    SignalTakeover,
    continues,
    job_note,
    requeue,
    requeue_signal,
    with_requeue,
)

__all__ = [
    "POSITIONS",
    "PREFETCHED",
    "DataResume",
    "Evaluations",
    "Measured",
    "Running",
    "SignalTakeover",
    "TokensInBatch",
    "TrainingCounts",
    "configuration_of",
    "continues",
    "job_note",
    "position_in",
    "positions",
    "positions_in_samples",
    "requeue",
    "requeue_signal",
    "tell_of_hidden",
    "tokens_in_batch",
    "with_requeue",
]
