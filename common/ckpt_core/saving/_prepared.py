"""A save that no longer blocks training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.dcp import Replicas
from ckpt_core.saving._checks import TrainedSlots
from ckpt_core.saving._disk_space import SpaceNeeded
from ckpt_core.saving._handle import SaveRequest
from ckpt_core.saving._plan_cache import KeepOwn
from ckpt_core.saving._replicas import Evidence
from ckpt_core.saving._stager import StagedParts
from ckpt_core.state import RankBuffers
from ckpt_core.types import Lineage, Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSave:
    """A save that no longer blocks training.

    Attributes:
        request: the caller's request.
        save_id: of this save.
        working: the directory that it is written in; with the rest of its destination equal on every rank.
        created: when it was agreed on, Unix seconds on the coordinator's clock.
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
        generation: of the plans.
        extra: upper bounds of what all ranks write beside planned tensors.
        evidence: fingerprints of this rank's replicas; None if they are not compared.
        replicas: part -> entries that several ranks hold; on the coordinator only.
        provenance: of the state; the commit adds what concerns the job.
        trained: what training changes of this rank's share; empty if it is not compared.
    """

    request: SaveRequest
    save_id: str
    working: str
    created: float
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
    generation: int = 0
    extra: SpaceNeeded = field(default_factory=SpaceNeeded)
    evidence: Evidence | None = None
    replicas: Mapping[str, Sequence[Replicas]] = field(default_factory=dict[str, Sequence[Replicas]])
    provenance: Provenance = field(default_factory=Provenance)
    trained: TrainedSlots = field(default_factory=dict[str, Any])
