"""Lightning's training loops: positions, running values, and preemptions."""

from lightning_ckpt.loops._evaluation import Evaluations, Measured
from lightning_ckpt.loops._position import Following, TrainingLoops
from lightning_ckpt.loops._preemption import SignalTakeover, ValidationExit
from lightning_ckpt.loops._running import Running

__all__ = [
    "Evaluations",
    "Following",
    "Measured",
    "Running",
    "SignalTakeover",
    "TrainingLoops",
    "ValidationExit",
]
