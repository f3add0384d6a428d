"""The name that was installed, for all that is public in `ckpt_core`: `from ckpt_suite import TrainState`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ckpt_core

if TYPE_CHECKING:
    from ckpt_core import *  # noqa: F403

__all__ = ckpt_core.__all__


def __getattr__(name: str) -> Any:
    return getattr(ckpt_core, name)


def __dir__() -> list[str]:
    return dir(ckpt_core)
