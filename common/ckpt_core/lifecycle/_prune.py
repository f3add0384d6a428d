"""Retention applied: which committed checkpoints go, and in what order. Coordinator only, after a commit."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_core.commit import countable, remove
from ckpt_core.retention import Abandoned, PrunePlan, RetentionPolicy, plan_prune
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry


def prune(
    storage: Storage,
    policy: RetentionPolicy,
    *,
    telemetry: Telemetry,
    abandoned: Abandoned,
    dry_run: bool = False,
    check: Callable[[], None] = lambda: None,
) -> PrunePlan:
    """Remove what the policy does not keep, oldest first; with `dry_run`, only say what would go.

    The history is read anew from storage, so that it survives restarts and sees pins and marks set meanwhile.
    What is marked as damaged is neither counted nor removed, only listed. `check` is called before each
    removal, and raises to refuse.
    """
    plan = plan_prune(policy, countable(storage), time.time(), abandoned=abandoned)
    if not dry_run:
        for info in plan.drop:
            check()
            with telemetry.span("prune.remove", step=info.step, name=info.name):
                remove(storage, info)
    return plan
