"""Facts about where a checkpoint comes from, as its manifest names them.

Its parent, the start of the job that saved it, the version of the code, a digest of the configuration, and
how far the training was in its data. They say what happened; no load decides by them. None of them names a
machine, a path or a user, and one variable of the environment is all that is read of that.

Fields are left out where unknown, and checked when read. Secrets are left out of a configuration before its
digest is made, since a short one could be guessed and compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from ckpt_core.disclosure import logger_of, printable, public_url
from ckpt_core.formats.codec import Fields
from ckpt_core.types import DataPosition, Parent, Provenance

__all__ = [
    "CODE_VERSION_VARIABLE",
    "CodeVersion",
    "code_version",
    "configuration_digest",
    "parent_fields",
    "provenance_fields",
    "read_parent",
    "read_provenance",
    "software_versions",
]


_NAME: Final = "provenance"
_LIBRARIES: Final = (
    *("numpy", "lightning", "pytorch_lightning", "accelerate", "transformers"),
    *("peft", "torchao", "bitsandbytes", "torchdata"),
)


def provenance_fields(provenance: Provenance) -> dict[str, Any]:
    """Return the fields for a manifest; none if nothing is known."""
    parent, data = provenance.parent, provenance.data
    found = _known(
        parent=None if parent is None else parent_fields(parent),
        run_id=provenance.run_id,
        code=_known(version=provenance.code_version, dirty=provenance.code_dirty),
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
    return DataPosition(**{each: fields.count(each) for each in ("epoch", "samples", "of") if each in fields})


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


MAX_VALUES: Final = 10_000
"""Of further values only the types count: a configuration is small, but may refer to data."""

_DEEPEST: Final = 20
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|\W+")
_SECRET: Final = re.compile(
    r"secret|passw|passphrase|passcode|credential|(?:private|access|api)_?key|conn(?:ection)?_?str|bearer|web_?hook"
    r"|(?:^|_)(?:auth|creds?|dsn|jwt|pwd|psk|sas|cookies?|(?:db|database|sas|(?:pre)?signed)_?ur[il]s?)(?:_|$)"
    r"|(?:^|_)(?:pins?|pass|pat|otp|sig)$|(?:token|key|auth|pwd)s?$"
)
_COUNT: Final = re.compile(
    r"(?:^|_)(?:max|min|num|n|total|new|train|eval|context|batch|warmup|per)_.*(?:tokens|keys)$"
)
"""How many there are, which counts, unlike what they are."""
_NAMED: Final = frozenset({"dtype", "device"})
_logger = logger_of(__name__)


def configuration_digest(configure: Callable[[], Any]) -> str:
    """Return the SHA-256 of the canonical form of a configuration; "" if it has none.

    Mappings count without order and without names of secrets, dataclasses by type and fields, functions and
    classes by name, other objects by type.

    Args:
        configure: returns nested values; it may call code of a host.
    """
    try:
        text = json.dumps(_Canonical().form(configure()), sort_keys=True, separators=(",", ":"))
    except Exception as error:  # noqa: BLE001 - a save must not fail for it; the log has it
        _logger.debug("the configuration has no digest: %s", error)
        return ""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


@final
class _Canonical:
    def __init__(self) -> None:
        self._left = MAX_VALUES

    def form(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            return _type_of(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float | str | Enum | PathLike | bytes):
            return _plain(value)
        return self._nested(value, depth + 1)

    def _nested(self, value: Any, depth: int) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            found = {field.name: getattr(value, field.name, None) for field in fields(value)}
            return {"$type": _type_of(value), **self._mapping(found, depth)}
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, Set):
            return sorted((self.form(each, depth) for each in value), key=repr)
        if isinstance(value, Sequence):
            return [self.form(each, depth) for each in value]
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        kind = type(value)
        return str(value) if kind.__module__ == "torch" and kind.__name__ in _NAMED else _type_of(value)

    def _mapping(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        named = {str(key): value for key, value in values.items()}
        return {key: self.form(value, depth) for key, value in named.items() if not _is_secret(key)}


def _is_secret(name: str) -> bool:
    words = _HUMP.sub("_", name).lower()
    return _SECRET.search(words) is not None and _COUNT.search(words) is None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return f"{_type_of(value)}.{value.name}"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, int):
        return int(value)
    text = value if isinstance(value, str) else fspath(value) if isinstance(value, PathLike) else value.hex()
    return public_url(text) if isinstance(text, str) else text.hex()


def _type_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
