"""Helpers of the tests that show a defect of stock software."""

from __future__ import annotations

from pathlib import Path


def still_so(shown: object, defect: str) -> None:
    """Fail with the way out when stock software has lost a defect: then our comparison must not claim it."""
    assert shown, f"stock has mended this: {defect}. Drop this test, and its line in docs/defects.md"


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 16
    path.write_bytes(content)
