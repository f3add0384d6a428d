"""What is asked of a save, checked before anything else happens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.names import parse_step_name


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What is to be saved under which name. `replace` allows `name` to be committed already."""

    step: int
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replace: bool = False

    def __post_init__(self) -> None:
        named = parse_step_name(self.name)
        if named not in {None, self.step}:
            raise ConfigError(
                f"{self.name!r} is the name of step {named}, which would find it taken: give this "
                f"step, {self.step}, another name"
            )
        # At once: the commit would find out only after everything has been written.
        try:
            json.dumps(self.annotations, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"annotations of step {self.step} must be plain JSON: {error}") from error
        try:
            # A metric is often a tensor of one element, which no listing could show.
            numbers = {str(name): _number(value) for name, value in self.metrics.items()}
        except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"metrics of step {self.step} must be numbers by name: {error}") from error
        object.__setattr__(self, "metrics", numbers)

    def digest(self) -> int:
        """A number, positive and below 2**62, by which ranks tell whether they ask for the same save."""
        text = f"{self.step} {self.replace} {self.name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{value!r:.40} is a {type(value).__name__}")
    return float(value)
