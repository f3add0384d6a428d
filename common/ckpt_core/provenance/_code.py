"""The version of the code that trains: the git commit, and whether it was changed.

It is looked for once in a process, when a job takes its root, and never waited for long: git may be slow on a
filesystem that is unwell.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from ckpt_core.disclosure import logger_of, printable

CODE_VERSION_VARIABLE: Final = "CKPT_SUITE_CODE_VERSION"
"""The version in words of the user, for images without `.git`; empty: none is looked for."""

_GIT_SECONDS: Final = 1.0
_LONGEST: Final = 200
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_ANSWERS: Final = 4
_logger = logger_of(__name__)


class CodeVersion(NamedTuple):
    """The version of the code.

    Attributes:
        version: the commit, or what the user has named; "" if unknown.
        dirty: whether files that git tracks differ from that commit; None if unknown.
    """

    version: str = ""
    dirty: bool | None = None


@lru_cache(maxsize=1)
def code_version() -> CodeVersion:
    """Return the version of the running script, as far as git tells it in time."""
    named = os.environ.get(CODE_VERSION_VARIABLE)
    if named is not None:
        return CodeVersion(printable(named.strip())[:_LONGEST])
    git, script = shutil.which("git"), getattr(sys.modules.get("__main__"), "__file__", None)
    if git is None or not Path(git).is_absolute() or not isinstance(script, str):
        return CodeVersion()
    place = Path(script).resolve()
    if Path(sys.prefix).resolve() in place.parents:  # a program that is installed
        return CodeVersion()
    return version_of_tree(git, str(place.parent))


def version_of_tree(git: str, directory: str) -> CodeVersion:
    """Return the commit of a working tree, and whether it is dirty, as far as known."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def ask(*words: str, **variables: str) -> list[str]:
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

    known = CodeVersion()
    try:
        places = ("--show-toplevel", "--git-path", "index", "--git-path", "objects")
        found = ask("rev-parse", "--path-format=absolute", *places, "HEAD")
        if len(found) != _ANSWERS or not _COMMIT.fullmatch(found[-1]):
            return known
        tree, index, objects, commit = found
        known = CodeVersion(commit)
        # A repository may name filters, monitors and transports, which `status` would run. One of our own
        # with the same commit, index and objects names none.
        with tempfile.TemporaryDirectory() as own:
            Path(own, "refs").mkdir()
            Path(own, "HEAD").write_text(commit)
            variables = {"GIT_DIR": own, "GIT_WORK_TREE": tree, "GIT_INDEX_FILE": index}
            variables |= {"GIT_OBJECT_DIRECTORY": objects, "GIT_CONFIG_GLOBAL": os.devnull}
            quick = ("--no-ahead-behind", "--untracked-files=no", "--ignore-submodules=all")
            lines = ask("status", "--porcelain=v2", "--branch", *quick, **variables, GIT_CONFIG_NOSYSTEM="1")
        # The header proves that git has run: where SIGCHLD is ignored its exit code is lost.
        if f"# branch.oid {commit}" in lines:
            return CodeVersion(commit, any(not line.startswith("#") for line in lines))
    except (OSError, subprocess.SubprocessError) as error:  # a save must not fail for it; the log has it
        _logger.debug("the version of the code is not known: %s", error)
    return known
