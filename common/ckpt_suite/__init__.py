"""The public names of `ckpt_core`, by the name that was installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ckpt_core

if TYPE_CHECKING:
    from ckpt_core import *  # noqa: F403

__all__ = ckpt_core.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return getattr(ckpt_core, name)


def __dir__() -> list[str]:
    return dir(ckpt_core)
