"""Twins: a second file of the same bytes for every file of a save (`replicas=2`).

Each rank has a *partner* on another host if there is one, which writes the twins of its files. The bytes go
to the partner over a connection between the two, piece by piece, while the rank writes its own files.
"""

from ckpt_core.saving.twins._partners import HOST_VARIABLE, Partners
from ckpt_core.saving.twins._session import TwinSession

__all__ = ["HOST_VARIABLE", "Partners", "TwinSession"]
