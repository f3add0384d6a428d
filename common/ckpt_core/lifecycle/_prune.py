"""Retention applied: which committed checkpoints go, and in what order. Coordinator only, after a commit."""

from __future__ import annotations

from ckpt_core.commit import Catalog, remove
from ckpt_core.retention import PrunePlan, RetentionPolicy, plan_prune
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry


def prune(
    storage: Storage,
    policy: RetentionPolicy,
    *,
    now: float,
    telemetry: Telemetry,
    dry_run: bool = False,
    just_committed: int | None = None,
) -> PrunePlan:
    """Remove what the policy does not keep, oldest first; with `dry_run`, only say what would go.

    The history is read anew from storage, so that it survives restarts and sees pins and marks set meanwhile.
    What is marked as damaged is neither counted nor removed, only listed.

    Args:
        storage: the root.
        policy: what to keep.
        now: Unix time in seconds.
        telemetry: receives a span for each that is removed.
        dry_run: whether only to tell.
        just_committed: the step that was committed just now, if any: it stays.
    """
    plan = plan_prune(policy, Catalog(storage).committed(), now, just_committed=just_committed)
    if not dry_run:
        for info in plan.drop:
            with telemetry.span("prune.remove", step=info.step, name=info.name):
                remove(storage, info)
    return plan
