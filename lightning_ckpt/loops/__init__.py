"""Lightning's training loops: positions, running values, and preemptions."""

from lightning_ckpt.loops._evaluation import Evaluations, Measured
from lightning_ckpt.loops._preemption import SignalTakeover, ValidationExit
from lightning_ckpt.loops._running import Running
from lightning_ckpt.loops._steps import Following, TrainingLoops
from lightning_ckpt.loops._tokens import TokenCount, TokensInBatch, tokens_in_batch

__all__ = [
    "Evaluations",
    "Following",
    "Measured",
    "Running",
    "SignalTakeover",
    "TokenCount",
    "TokensInBatch",
    "TrainingLoops",
    "ValidationExit",
    "tokens_in_batch",
]
