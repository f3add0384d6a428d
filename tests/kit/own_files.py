"""What is in a root beside the small files of ours that stay in one."""

from __future__ import annotations

from pathlib import Path

from ckpt_core.names import DAMAGED, OWN, PINS, SPARES, TIERS, WRITER, is_run_file

STAYING = {DAMAGED, PINS, TIERS} | {f"{key}.lock" for key in (DAMAGED, PINS, WRITER)}


def beside_own(root: Path) -> set[str]:
    """Names in a root, and of what no idle root has in the directory that is ours, such as a claim."""
    own = {path.name for path in (root / OWN).iterdir()} if (root / OWN).is_dir() else set()
    left = {f"{OWN}/{name}" for name in own - SPARES if not is_run_file(name)} - STAYING
    return ({path.name for path in root.iterdir()} - {OWN}) | left
