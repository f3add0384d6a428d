"""What a training is when nobody kills it, and where another life of it went another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

Diary = Sequence[dict[str, Any]]
"""What ranks wrote down: which step they began with, and what they held after each step they made."""


@final
class Reference:
    """What an uninterrupted training held at every step.

    Args:
        told: what its ranks wrote down.
        seconds: how long it took.
        steps: how many it had to make.

    Raises:
        RuntimeError: it did not make them.

    Attributes:
        seconds: how long it took, from the start of its process to its end.
    """

    def __init__(self, told: Diary, *, seconds: float, steps: int) -> None:
        self.seconds = seconds
        made = [line for line in told if "step" in line]
        self._states = {line["step"]: line["state"] for line in made}
        self._states |= {line["began"]: line["state"] for line in told if "began" in line}
        self._losses = {(line["rank"], line["step"]): line["loss"] for line in made}
        if set(self._states) != set(range(steps + 1)):
            raise RuntimeError(f"the uninterrupted training made {len(self._states) - 1} steps, not {steps}")

    def differences(self, told: Diary) -> list[str]:
        """Where a life held something else: what it loaded, and the first step that went another way."""
        loaded = [
            f"rank {line['rank']} began at step {line['began']} with other values"
            for line in told
            if "began" in line and line["state"] != self._states.get(line["began"])
        ]
        trained = [
            f"rank {line['rank']} made another step {line['step']}"
            for line in told
            if "step" in line and not self._has(**line)
        ]
        return loaded + trained[:1]

    def _has(self, *, rank: int, step: int, state: str, loss: float) -> bool:
        return self._states.get(step) == state and self._losses.get((rank, step)) == loss
