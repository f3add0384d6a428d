"""Checkpoints written in the formats of others, and of others in ours.

A sink is a function that lays out the files of a format as `OutFile`s; one engine fills them.
"""

from ckpt_core.convert._exporting import SINKS, ExportSummary, export
from ckpt_core.convert._fill import size_of
from ckpt_core.convert._importing import import_checkpoint, weights_bytes, write_weights
from ckpt_core.convert._laid_out import (
    Computed,
    Conversion,
    ExportOptions,
    Late,
    OutFile,
    OutPiece,
    Span,
    Wanted,
)
from ckpt_core.convert._output import write

__all__ = [
    "SINKS",
    "Computed",
    "Conversion",
    "ExportOptions",
    "ExportSummary",
    "Late",
    "OutFile",
    "OutPiece",
    "Span",
    "Wanted",
    "export",
    "import_checkpoint",
    "size_of",
    "weights_bytes",
    "write",
    "write_weights",
]
