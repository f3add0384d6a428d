"""Provenance as fields of a manifest: left out where unknown, checked when read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ckpt_core.disclosure import logger_of, printable
from ckpt_core.formats.codec import Fields
from ckpt_core.types import DataPosition, Parent, Provenance

_NAME: Final = "provenance"
_LIBRARIES: Final = (
    *("numpy", "lightning", "pytorch_lightning", "accelerate", "transformers"),
    *("peft", "torchao", "bitsandbytes", "torchdata"),
)


def provenance_fields(provenance: Provenance) -> dict[str, Any]:
    """Return the fields for a manifest; none if nothing is known."""
    parent, data = provenance.parent, provenance.data
    code = _known(version=provenance.code_version, dirty=provenance.code_dirty)
    found = _known(
        parent=None if parent is None else parent_fields(parent),
        run_id=provenance.run_id,
        code=code,
        configuration_sha256=provenance.configuration_sha256,
        data={
            name: _known(epoch=each.epoch, samples=each.samples, of=each.of) for name, each in data.items()
        },
    )
    return {_NAME: found} if found else {}


def read_provenance(fields: Fields) -> Provenance:
    """Read the provenance from a manifest; ValueError for bad values."""
    found = fields.optional(_NAME)
    if found is None:
        return Provenance()
    code, parent, data = found.optional("code"), found.optional("parent"), found.optional("data")
    return Provenance(
        parent=None if parent is None else read_parent(parent),
        run_id=_text(found, "run_id"),
        code_version="" if code is None else _text(code, "version"),
        code_dirty=None if code is None or "dirty" not in code else code.get("dirty", bool),
        configuration_sha256=_text(found, "configuration_sha256"),
        data={} if data is None else {name: _position(data, name) for name in data},
    )


def parent_fields(parent: Parent) -> dict[str, Any]:
    """Return a checkpoint as fields."""
    found = {each: getattr(parent, each) for each in ("name", "step", "save_id", "manifest_sha256")}
    return found | ({"elsewhere": True} if parent.elsewhere else {})


def read_parent(fields: Fields) -> Parent:
    """Read what `parent_fields` made; ValueError for bad values."""
    return Parent(
        name=fields.get("name", str),
        step=fields.count("step"),
        save_id=fields.get("save_id", str),
        manifest_sha256=fields.get("manifest_sha256", str),
        elsewhere="elsewhere" in fields and fields.get("elsewhere", bool),
    )


def _position(data: Fields, name: str) -> DataPosition:
    fields = data.optional(name) or Fields({})
    known = {each: fields.count(each) for each in ("epoch", "samples", "of") if each in fields}
    return DataPosition(**known)


def _text(fields: Fields, name: str) -> str:
    return fields.get(name, str) if name in fields else ""


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", {})}


def software_versions() -> Mapping[str, str]:
    """Return the versions of libraries that are imported already."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {name: str(version) for name, version in found.items() if isinstance(version, str)}


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
