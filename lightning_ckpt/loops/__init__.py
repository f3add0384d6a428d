"""Lightning's training loops: a fit, its position in the data, and preemptions."""

from lightning_ckpt.loops._fit import Fit, Measured
from lightning_ckpt.loops._positions import (
    POSITIONS,
    PREFETCHED,
    RNG,
    SEED,
    DataResume,
    configuration_of,
    position_in,
    positions,
    positions_in_samples,
    tell_of_hidden,
)
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
    "RNG",
    "SEED",
    "DataResume",
    "Fit",
    "Measured",
    "SignalTakeover",
    "configuration_of",
    "continues",
    "job_note",
    "position_in",
    "positions",
    "positions_in_samples",
    "requeue",
    "requeue_signal",
    "tell_of_hidden",
    "with_requeue",
]
