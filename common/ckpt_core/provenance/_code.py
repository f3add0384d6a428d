"""The version of the code that trains: the git commit, and whether it was changed.

It is looked for once in a process, on a thread of its own, because git may be slow or hang on a filesystem
that is unwell. No save waits longer for it than `PATIENCE_SECONDS`, counted from the start of the search: the
manifest of an early save may lack it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, final

from ckpt_core.disclosure import logger_of, printable

CODE_VERSION_VARIABLE: Final = "CKPT_SUITE_CODE_VERSION"
"""The version in words of the user, for images without `.git`; empty: none is looked for."""

PATIENCE_SECONDS: Final = 1.0
_GIT_SECONDS: Final = 60.0
_LONGEST: Final = 200
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_ANSWERS: Final = 4
_logger = logger_of(__name__)


@final
@dataclass(frozen=True, slots=True)
class CodeVersion:
    """The version of the code.

    Attributes:
        version: the commit, or what the user has named; "" if unknown.
        dirty: whether files that git tracks differ from that commit; None if unknown.
    """

    version: str = ""
    dirty: bool | None = None


@final
class CodeSearch:
    """The search for the code version, on a daemon thread.

    Concurrency: `result` on any thread.

    Args:
        find: yields what is known, better each time.
        named: what the user has named, instead of a search.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        find: Callable[[], Iterator[CodeVersion]],
        *,
        named: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._clock = clock
        self._found = CodeVersion() if named is None else CodeVersion(printable(named.strip())[:_LONGEST])
        self._ended = threading.Event()
        self._until = clock() + PATIENCE_SECONDS
        if named is not None:
            self._ended.set()
            return
        try:
            threading.Thread(target=self._run, name="ckpt-code", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, or there are too many threads
            self._ended.set()

    def result(self) -> CodeVersion:
        """Return what is known; wait for it only while the search is young."""
        self._ended.wait(max(0.0, self._until - self._clock()))
        return self._found

    def _run(self) -> None:
        try:
            for found in self._find():
                self._found = found
        except Exception as error:  # noqa: BLE001 - a save must not fail for it; the log has it
            _logger.debug("the version of the code is not known: %s", error)
        finally:
            self._ended.set()


def find_code_version() -> CodeSearch:
    """Begin to look for the code version, unless this process has."""
    return _search(os.getpid())  # a forked child has no threads of its parent


def code_version() -> CodeVersion:
    """Return the code version as far as it is known by now."""
    return find_code_version().result()


@lru_cache(maxsize=1)
def _search(_pid: int) -> CodeSearch:
    return CodeSearch(_search_trees, named=os.environ.get(CODE_VERSION_VARIABLE))


def _search_trees() -> Iterator[CodeVersion]:
    git, script = shutil.which("git"), getattr(sys.modules.get("__main__"), "__file__", None)
    if git is None or not Path(git).is_absolute() or not isinstance(script, str):
        return
    place = Path(script).resolve()
    if Path(sys.prefix).resolve() not in place.parents:  # else a program that is installed
        yield from version_of_tree(git, str(place.parent))


def version_of_tree(git: str, directory: str) -> Iterator[CodeVersion]:
    """Yield the commit of a working tree, then also whether it is dirty."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def ask(*words: str, **variables: str) -> list[str]:
        # git changes to the directory by itself: here the interpreter would wait for a filesystem that hangs.
        answer = subprocess.run(  # noqa: S603 - fixed words, and the directory of the running code
            [git, "-C", directory, "--no-optional-locks", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**plain, **variables},
            timeout=_GIT_SECONDS,
            check=False,
        )
        return answer.stdout.decode(errors="surrogateescape").splitlines()

    places = ("--show-toplevel", "--git-path", "index", "--git-path", "objects")
    found = ask("rev-parse", "--path-format=absolute", *places, "HEAD")
    if len(found) != _ANSWERS or not _COMMIT.fullmatch(found[-1]):
        return
    tree, index, objects, commit = found
    yield CodeVersion(commit)
    # A repository may name filters, monitors and transports, which `status` would run. One of our own with
    # the same commit, index and objects names none.
    with tempfile.TemporaryDirectory() as own:
        Path(own, "refs").mkdir()
        Path(own, "HEAD").write_text(commit)
        variables = {"GIT_DIR": own, "GIT_WORK_TREE": tree, "GIT_INDEX_FILE": index}
        variables |= {"GIT_OBJECT_DIRECTORY": objects, "GIT_CONFIG_GLOBAL": os.devnull}
        quick = ("--no-ahead-behind", "--untracked-files=no", "--ignore-submodules=all")
        lines = ask("status", "--porcelain=v2", "--branch", *quick, **variables, GIT_CONFIG_NOSYSTEM="1")
    # The header proves that git has run: where SIGCHLD is ignored its exit code is lost.
    if f"# branch.oid {commit}" in lines:
        yield CodeVersion(commit, any(not line.startswith("#") for line in lines))
