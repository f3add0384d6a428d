"""Lightning's training loops: positions, running values, and preemptions."""

from lightning_ckpt.loops._counts import TokensInBatch, TrainingCounts, tokens_in_batch
from lightning_ckpt.loops._evaluation import Evaluations, Measured
from lightning_ckpt.loops._facts import configuration_of, positions_in_samples
from lightning_ckpt.loops._positions import POSITIONS, PREFETCHED, position_in, positions, tell_of_hidden
from lightning_ckpt.loops._preemption import SignalTakeover, ValidationExit
from lightning_ckpt.loops._requeue import continues, job_note, requeue, requeue_signal, with_requeue
from lightning_ckpt.loops._running import Running
from lightning_ckpt.loops._steps import Following, TrainingLoops, as_completed

__all__ = [
    "POSITIONS",
    "PREFETCHED",
    "Evaluations",
    "Following",
    "Measured",
    "Running",
    "SignalTakeover",
    "TokensInBatch",
    "TrainingCounts",
    "TrainingLoops",
    "ValidationExit",
    "as_completed",
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
