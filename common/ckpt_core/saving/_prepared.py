"""Values of one save: the request, its destination, and the prepared state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.collective import checked_step
from ckpt_core.dcp import Replicas
from ckpt_core.errors import CheckpointError, ConfigError
from ckpt_core.names import parse_step_name, step_name
from ckpt_core.saving._plan_cache import KeepOwn
from ckpt_core.saving._replicas import Evidence
from ckpt_core.saving._size_estimate import NO_OVERHEAD, Overhead
from ckpt_core.saving._stager import StagedParts
from ckpt_core.state import RankBuffers
from ckpt_core.types import Lineage, Provenance
from ckpt_core.validation import mapping, require, text


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """The step and name of a save, with its metrics and annotations.

    Attributes:
        step: optimizer steps done.
        name: of the checkpoint's directory.
        metrics: numbers by name.
        annotations: plain JSON.
        replace: whether `name` may be committed already.
        refusal: why this rank cannot ask for a save; reported to the ranks that can.
    """

    step: int
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replace: bool = False
    refusal: CheckpointError | None = None

    @classmethod
    def checked(
        cls,
        step: Any,
        name: str | None,
        *,
        metrics: Mapping[str, float] | None,
        annotations: Mapping[str, Any] | None,
    ) -> SaveRequest:
        """Return the request of a call of `save`.

        Raises:
            ConfigError: an argument is invalid.
        """
        number = checked_step("save", step)
        require(
            "save",
            None if name is None or name == "" else text("name", name),
            None if metrics is None else mapping("metrics", metrics),
            None if annotations is None else mapping("annotations", annotations),
        )
        return cls(
            step=number,
            name=step_name(number) if name is None else name,
            metrics=dict(metrics or {}),
            annotations=dict(annotations or {}),
            replace=name is not None,
        )

    def __post_init__(self) -> None:
        named = parse_step_name(self.name)
        if named not in {None, self.step}:
            raise ConfigError(
                f"{self.name!r} is the name of step {named}, which would find it taken: give this "
                f"step, {self.step}, another name"
            )
        # Now, for the commit would find out only after everything has been written.
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
        """Hash the request to [0, 2**62): equal on ranks that ask for the same save."""
        text = f"{self.step} {self.replace} {self.name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The destination of a save; the same on every rank."""

    save_id: str
    working: str
    created: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSave:
    """A save that no longer blocks training.

    Attributes:
        request: the caller's request.
        assignment: its destination.
        files: name -> content of this rank's small files.
        metadata: part -> DCP metadata; on the coordinator only.
        items: item -> kind, for the manifest.
        local: this rank's rank-local buffers.
        keeping: when it writes them.
        staged: the copies, to be released after the write.
        rank: this rank.
        optimizers: their steps wait for copies that are still being made.
        lineage: of the save; on the coordinator only.
        buffers: (part, key) of module buffers.
        error: why this rank could not stage; it reports the error at the commit barrier instead of files.
        overhead: upper bounds of the writes beside tensors.
        evidence: fingerprints of this rank's replicas; None if they are not compared.
        replicas: part -> entries that several ranks hold; on the coordinator only.
        provenance: of the state; the commit adds what concerns the job.
    """

    request: SaveRequest
    assignment: Assignment
    files: Mapping[str, bytes]
    metadata: Mapping[str, Metadata]
    items: Mapping[str, str]
    local: RankBuffers
    keeping: KeepOwn
    staged: StagedParts
    rank: int
    optimizers: Sequence[Any] = ()
    lineage: Lineage = field(default_factory=Lineage)
    buffers: frozenset[tuple[str, str]] = frozenset()
    error: BaseException | None = None
    overhead: Overhead = NO_OVERHEAD
    evidence: Evidence | None = None
    replicas: Mapping[str, Sequence[Replicas]] = field(default_factory=dict[str, Sequence[Replicas]])
    provenance: Provenance = field(default_factory=Provenance)


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{value!r:.40} is a {type(value).__name__}")
    return float(value)
