"""The numbers that a plan assumes: each with its default, its unit and its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, final

from ckpt_core.errors import ConfigError
from ckpt_core.validation import require

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
MONTH: Final = 30 * DAY

LLAMA_3_FAILURES: Final = 419 / (54 * 24 * 16_384)
"""Interruptions per GPU and hour: 419 unexpected ones in 54 days on 16,384 GPUs."""


class PlanAssumption(NamedTuple):
    """One assumption of a plan, for users.

    Attributes:
        name: what is assumed.
        value: with its unit.
        source: where it comes from; "given" if a user said it.
        option: the option that overrides it.
    """

    name: str
    value: str
    source: str
    option: str


def _number(default: float, name: str, unit: str, source: str) -> Any:
    return field(default=default, metadata={"name": name, "unit": unit, "source": source})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanNumbers:
    """Numbers of machine, training and market; each has an option of its name."""

    staging_rate: float = _number(
        20e9, "copy to the host, per GPU", "B/s", "pinned memory over PCIe 4 x16, about 2/3 of 31.5 GB/s"
    )
    call_seconds: float = _number(
        0.02, "stall beside the copy", "s", "agreement of ranks and hooks (assumed)"
    )
    slowdown: float = _number(
        0.02,
        "share of training time lost while a save is in flight",
        "",
        "assumed; a running job measures it",
    )
    step_seconds: float = _number(10.0, "time of a step", "s", "assumed")
    restart_seconds: float = _number(
        300.0,
        "from a failure until the load begins",
        "s",
        "detection, scheduling, start and warm-up (assumed)",
    )
    failures_per_gpu_hour: float = _number(
        LLAMA_3_FAILURES,
        "failures per GPU and hour",
        "",
        "419 interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783, section 3.3.4)",
    )
    node_loss: float = _number(
        0.0, "share of failures after which only the upload tiers are left", "", "assumed: the root survives"
    )
    gpu_hour: float = _number(
        4.40, "price of a GPU", "$/h", "a B200 on demand (NVIDIA blog on nvCOMP, 2026-04-09)"
    )
    rank_bytes: float = _number(
        37_000,
        "values of one rank: random states, data position",
        "B",
        "measured: AdamW on a CPU, torch 2.13",
    )
    chunk_bytes: float = _number(
        2_400,
        "metadata and padding of one shard of one tensor",
        "B",
        "measured: 310 B of `.metadata` and chunk table; half a page of padding",
    )

    def __post_init__(self) -> None:
        require("plan", *(at_least_zero(each.name, getattr(self, each.name)) for each in fields(self)))
        for name in ("staging_rate", "step_seconds"):
            if getattr(self, name) == 0:
                raise ConfigError(f"plan: {name} must be above 0")
        if self.slowdown >= 1:
            raise ConfigError(f"plan: slowdown is a share of training time, below 1, not {self.slowdown:g}")
        if self.node_loss > 1:
            raise ConfigError(
                f"plan: node_loss is a share of the failures, at most 1, not {self.node_loss:g}"
            )

    def assumptions(self, given: Mapping[str, Any]) -> list[PlanAssumption]:
        """List all of them; `given` names those of a user."""
        return [
            PlanAssumption(
                name=each.metadata["name"],
                value=with_unit(getattr(self, each.name), each.metadata["unit"]),
                source="given" if each.name in given else each.metadata["source"],
                option=option_of(each.name),
            )
            for each in fields(self)
        ]


def option_of(name: str) -> str:
    """Return the option of the command line for a number."""
    return f"--{name.replace('_', '-')}"


def with_unit(value: float, unit: str) -> str:
    """Format a number with its unit; rates in GB/s."""
    return f"{value / 1e9:g} GB/s" if unit == "B/s" else f"{value:,.6g} {unit}".rstrip()


def at_least_zero(name: str, value: float) -> str | None:
    """Check a finite number that is not below 0."""
    if 0 <= value < math.inf:
        return None
    return f"{name} must be a finite number of at least 0, not {value!r}"
