"""What the package's metadata takes from README.md, and from the address of the repository.

The repository has no address that could be written here. A release gives it, `CKPT_SUITE_HOME=https://…`:
links of the README lead there, and an index shows it. Without it links become the text that they had, so
that no link of the README is dead on an index.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^)\s]+)\)")


def readme(text: str, home: str) -> str:
    """Return a README whose relative links lead to `home`, or are no links if there is none."""

    def replaced(link: re.Match[str]) -> str:
        picture, label, target = link.groups()
        if home:
            return f"{picture}[{label}]({home}/{'raw' if picture else 'blob'}/HEAD/{target})"
        return "" if picture else label

    return RELATIVE.sub(replaced, text)


class Hook(MetadataHookInterface):
    """Sets the readme, and the URLs where they are known."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what pyproject.toml declares to be dynamic."""
        home = os.environ.get("CKPT_SUITE_HOME", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, home)}
        changes = f"{home}/blob/HEAD/CHANGELOG.md"
        metadata["urls"] = {"Source": home, "Issues": f"{home}/issues", "Changelog": changes} if home else {}
