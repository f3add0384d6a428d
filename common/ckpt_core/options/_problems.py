"""What is wrong in a piece of configuration, gathered so that a person fixes it all at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import Any, final

from ckpt_core.errors import ConfigError


@final
class Problems:
    """Collects what is wrong; used by one reader at a time."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        """Note one problem."""
        self._found.append(problem)

    def collect(self, build: Callable[..., Any], *arguments: Any, prefix: str = "") -> Any:
        """What `build(*arguments)` returns, or None with its error noted."""
        try:
            return build(*arguments)
        except ConfigError as error:
            self.add(f"{prefix}{error}")
            return None

    def unknown(self, where: str, keys: Iterable[Any], allowed: Collection[str]) -> None:
        """Note every key that is not allowed, with the nearest one that is."""
        wrong = [key for key in keys if key not in allowed]
        if wrong:
            named = ", ".join(f"{key!r}{_hint(key, allowed)}" for key in wrong)
            self.add(f"{where}: unknown {named}; allowed are {', '.join(sorted(allowed))}")

    def raise_if_any(self, separator: str = "\n") -> None:
        """Raise one error with all problems noted.

        Raises:
            ConfigError: there is at least one.
        """
        if self._found:
            raise ConfigError(separator.join(self._found))


def _hint(key: Any, allowed: Collection[str]) -> str:
    close = difflib.get_close_matches(str(key), allowed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
