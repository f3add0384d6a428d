"""The user's own pre-hooks (`register_save_state_pre_hook`), with the models they would get from stock.

Diffusers-style hooks write a model themselves and take its weights out of the list, on the main process only;
whether a model was taken over is therefore the coordinator's word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator

from ckpt_core.coordination import Coordinator


def run_save_hooks(
    accelerator: Accelerator,
    weights: list[Mapping[str, Any]],
    directory: Path,
    coordinator: Coordinator,
) -> list[int]:
    """Call the hooks; returns which models are left to us. Collective if there are hooks.

    Args:
        accelerator: whose hooks and models.
        weights: state dicts of the models, as stock passes them; none under FSDP. Hooks take theirs out.
        directory: where hooks may write.
        coordinator: the ranks of the job.
    """
    every = list(range(len(accelerator._models)))
    hooks = accelerator._save_model_state_pre_hook
    if not hooks:
        return every
    offered = list(weights)
    error: BaseException | None = None
    try:
        for hook in hooks.values():
            hook(accelerator._models, weights, str(directory))
    except Exception as failure:  # noqa: BLE001 - the exchange carries it to every rank
        error = failure
    left = [index for index, state in enumerate(offered) if any(state is each for each in weights)]
    own = left if offered else every
    return coordinator.gather_scatter(
        own if error is None else cast("list[int]", error), lambda of: [of[0]] * len(of)
    )


def run_load_hooks(accelerator: Accelerator, models: Sequence[Any], directory: Path) -> list[int]:
    """Call the hooks; returns which models are left to us.

    Args:
        accelerator: whose hooks.
        models: those the hooks may load themselves; none under FSDP.
        directory: where hooks may read.
    """
    remaining = list(models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(remaining, str(directory))
    if not models:
        return list(range(len(accelerator._models)))
    return [
        index for index, model in enumerate(accelerator._models) if any(model is each for each in remaining)
    ]
