"""Options as a frozen value, read from a mapping, YAML or TOML.

A policy is written as a mapping whose entries are joined by "or"; `any`, `all_of` and `not` nest:

    save: {every_steps: 500, every_seconds: 900, on_preemption: true}
    keep: {latest: 3, every: 10000, best: {metric: val_loss, n: 2, mode: min}}
"""

from __future__ import annotations

from ckpt_core.options._options import (
    CheckpointOptions,
    Checksums,
    Export,
    OnDivergence,
    OnStale,
    SignManifest,
    Staging,
    Upload,
    Verify,
    VerifyManifest,
    WhenBusy,
    shows_options,
    signature_with_options,
)
from ckpt_core.options._parsing import Headroom, bytes_text, parse_yaml, policy_from, read_document
from ckpt_core.options._sameness import difference, given_options, text_of

__all__ = [
    "CheckpointOptions",
    "Checksums",
    "Export",
    "Headroom",
    "OnDivergence",
    "OnStale",
    "SignManifest",
    "Staging",
    "Upload",
    "Verify",
    "VerifyManifest",
    "WhenBusy",
    "bytes_text",
    "difference",
    "given_options",
    "parse_yaml",
    "policy_from",
    "read_document",
    "shows_options",
    "signature_with_options",
    "text_of",
]
