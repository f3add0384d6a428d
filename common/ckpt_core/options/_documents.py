"""Parsing of option files; errors name positions, never the content.

The content may be a password.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ckpt_core.errors import ConfigError


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text.

    Args:
        text: the document.
        where: the origin of the text, for messages.

    Raises:
        ConfigError: it is not YAML, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{where}: YAML needs PyYAML: `pip install pyyaml`, or write TOML or JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(
            f"{where}: cannot read the options: not YAML{place} ({type(error).__name__})"
        ) from None


def read_document(path: Path) -> Mapping[str, Any]:
    """Read the mapping in a `.toml`, `.yaml` or `.yml` file; empty for an empty file.

    Raises:
        ConfigError: it cannot be read, or holds no mapping.
    """
    if path.suffix not in _PARSERS:
        raise ConfigError(f"{path}: options are read from {', '.join(_PARSERS)} files only")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the options: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 at byte {error.start}") from None
    document = _PARSERS[path.suffix](text, str(path))
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: expected a mapping at the top, not {type(document).__name__}")
    return document


def _parse_toml(text: str, where: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Only the position of its message: the rest may quote the content.
        _, found, place = str(error).rpartition("(at ")
        position = f" at {place.rstrip(')')}" if found else ""
        raise ConfigError(f"{where}: cannot read the options: not TOML{position}") from None


_PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    ".toml": _parse_toml,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
}
