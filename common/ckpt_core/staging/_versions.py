"""Whether tensors have been changed in place, by torch's own counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ckpt_core.staging._pieces import Copy


@final
class Versions:
    """The versions of sources now, to be compared with later ones.

    A change through `tensor.data`, NumPy or another view without a counter cannot be seen.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._sources = [(copy.name, copy.source, _version(copy.source)) for copy in copies]

    def changed(self) -> Sequence[str]:
        """Names of the sources that have been changed since."""
        return [name for name, source, version in self._sources if _version(source) != version]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
