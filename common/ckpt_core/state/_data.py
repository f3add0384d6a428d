"""The position in the training data: whatever has `state_dict` and `load_state_dict`, one value per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.errors import ConfigError


def check_dataloader(name: str, loader: Any) -> None:
    """Refuse a loader whose position cannot be saved.

    Raises:
        ConfigError: it lacks `state_dict` or `load_state_dict`.
    """
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return
    raise ConfigError(
        f"{name} is a {type(loader).__name__}, which cannot tell its position, so a resumed run "
        "would see other data; use torchdata.stateful_dataloader.StatefulDataLoader (same arguments), "
        "or leave it out"
    )


def dataloader_state(loader: Any) -> dict[str, Any]:
    """Where the loader is.

    A torchdata loader that was never iterated starts its iterator here and draws that iterator's seed from
    the global generator, which its first `iter` does not do again; capture the generators after this.
    """
    return dict(loader.state_dict())


def load_dataloader_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Put the loader where it was, with its iterator made.

    Otherwise the next `iter` would make it and draw a seed from the global generator, which the run that was
    saved did not do at this point. Restore the generators after this.
    """
    loader.load_state_dict(dict(state))
    loader.state_dict()
