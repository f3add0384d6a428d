"""`verify`: read checkpoints back and compare them with what was committed."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ckpt_core.cli._arguments import Commands, nothing_at, open_checkpoint, open_root
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.commit import Catalog, stock_parts, strangers, verify, verify_stock, whole_info
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FileFailure,
    PartialCheckpointError,
    lost,
)
from ckpt_core.names import MANIFEST, MARKER, is_corrupt, is_incomplete, is_trash, step_name
from ckpt_core.storage import Storage

_MOST_SHOWN: Final = 5
_REPAIR: Final = "REPAIR"
"""The state of a checkpoint with damage for which twins make up: it loads."""
_SHA256: Final = re.compile("[0-9a-f]{64}")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """The result for one checkpoint.

    Attributes:
        strangers: paths that are in no manifest.
        note: how it was verified, if not by its manifest.
        damaged: the problem that a mark named.
        mark: the change of its mark, in words; "" if none.
    """

    name: str
    failures: Sequence[FileFailure]
    strangers: Sequence[str] = ()
    note: str = ""
    damaged: str | None = None
    mark: str = ""

    @property
    def verdict(self) -> str:
        """One word for its state."""
        if not self.failures:
            return "ok"
        return "FAILED" if lost(self.failures) else _REPAIR

    @property
    def fields(self) -> dict[str, Any]:
        """The fields for `--json`."""
        fields: dict[str, Any] = {
            "name": self.name,
            "ok": not lost(self.failures),
            "failures": [asdict(failure) for failure in self.failures],
            "strangers": list(self.strangers),
        }
        return fields | ({"was_marked": self.damaged, "mark": self.mark} if self.mark else {})


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the command to those of `ckpt`."""
    command = commands.add_parser(
        "verify",
        parents=[shared],
        help="read checkpoints back and compare them with what was committed",
        description="Verifies a checkpoint, the newest of a root, or a directory written by stock DCP. One "
        "that is damaged is marked, so that no resume relies on it; one that verifies loses its mark.",
    )
    command.add_argument("place", metavar="ROOT_OR_CHECKPOINT", help="path or URL")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="verify this step of the root")
    which.add_argument("--all", action="store_true", help="verify every checkpoint of the root")
    command.add_argument(
        "--strict",
        action="store_true",
        help="fail also if a checkpoint holds what its manifest does not name",
    )
    command.add_argument(
        "--manifest-sha256",
        metavar="HEX",
        help="fail unless this is the SHA-256 of its manifest, which `show` prints",
    )
    command.set_defaults(command=run)


def run(arguments: Namespace) -> Outcome:
    """Verify a checkpoint, chosen ones of a root, or what stock DCP wrote."""
    wants_root = arguments.step is not None or arguments.all
    digest = _digest(arguments)
    if not wants_root and (found := _one_checkpoint(arguments, digest)) is not None:
        return found
    storage = open_root(arguments.place, arguments.storage_options)
    if arguments.all:
        return _every_one(storage, strict=arguments.strict)
    names = _names(storage, arguments)
    if names:
        return outcome(storage, names, strict=arguments.strict, digest=digest)
    return _stock(arguments, digest)


def _digest(arguments: Namespace) -> str | None:
    """Return the SHA-256 of the manifest that is wanted; None if any will do.

    Raises:
        ConfigError: it is no SHA-256, or more than one checkpoint is to have it.
    """
    if arguments.manifest_sha256 is None:
        return None
    digest = str(arguments.manifest_sha256).lower().removeprefix("sha256:")
    if not _SHA256.fullmatch(digest):
        raise ConfigError("--manifest-sha256 must be 64 hex digits, as `ckpt show` prints them")
    if arguments.all:
        raise ConfigError("--manifest-sha256 is of one checkpoint: it does not go with --all")
    return digest


def _one_checkpoint(arguments: Namespace, digest: str | None) -> Outcome | None:
    """Verify a checkpoint, committed or torn; None if the place is none."""
    try:
        storage, name = open_checkpoint(arguments.place, arguments.storage_options)
    except ConfigError:
        return None  # a bucket has no parent; any other error is raised when it is opened as a root
    if is_incomplete(name) or is_trash(name) or is_corrupt(name) or storage.exists(f"{name}/{MARKER}"):
        if not storage.list(name):
            raise nothing_at(f"{storage.url}/{name}")
        return outcome(storage, [name], strict=arguments.strict, digest=digest)
    return None


def _names(storage: Storage, arguments: Namespace) -> list[str]:
    if arguments.step is not None:
        try:
            return [Catalog(storage).find(step=arguments.step).name]
        except PartialCheckpointError:
            return [step_name(arguments.step)]
    survey = Catalog(storage).survey()
    survey.log_unreadable(storage.url)
    found = survey.committed or sorted(survey.parts, key=lambda info: info.step)
    if not found and survey.unreadable:
        raise next(iter(survey.unreadable.values()))
    return [info.name for info in found[-1:]]


def _every_one(storage: Storage, *, strict: bool) -> Outcome:
    """Verify every checkpoint of a root; one whose marker cannot be read fails."""
    survey = Catalog(storage).survey()
    results = [_verified(storage, info.name) for info in survey.everything]
    results += [_verified(storage, info.name) for info in survey.parts]
    unreadable = survey.unreadable.keys() - {info.name for info in survey.parts}
    for name, error in sorted((name, survey.unreadable[name]) for name in unreadable):
        failures = getattr(error, "failures", ()) or [FileFailure(path=MARKER, problem=str(error))]
        results.append(_Result(name=name, failures=failures, note=" (its marker cannot be read)"))
    if not results:
        raise CheckpointNotFoundError(f"{storage.url}: no checkpoint is committed there")
    return _reported(storage, results, strict=strict)


def _stock(arguments: Namespace, digest: str | None) -> Outcome:
    storage, name = open_checkpoint(arguments.place, arguments.storage_options)
    parts = list(stock_parts(storage, name))
    total = sum(each.size_bytes for part in parts for each in storage.list(part))
    with ProgressLine(f"verifying {name}", total) as progress:
        failures = verify_stock(storage, name, seen=progress.add)
    if digest is not None:
        failures = [FileFailure(path=MANIFEST, problem="missing: stock DCP writes none"), *failures]
    result = _Result(name=name, failures=failures, note=" (stock DCP, by its CRC32s)")
    return _reported(storage, [result])


def outcome(
    storage: Storage, names: Sequence[str], *, strict: bool = False, digest: str | None = None
) -> Outcome:
    """Verify checkpoints of a root; mark the damaged and unmark the whole.

    With `strict`, what the manifest does not name is a failure, too. With `digest`, each must also have the
    manifest of that SHA-256; one that has another is not damaged.
    """
    results = [_verified(storage, name) for name in names]
    if digest is not None:
        results = [replace(each, failures=_exchanged(storage, each, digest)) for each in results]
    return _reported(storage, results, strict=strict)


def _exchanged(storage: Storage, result: _Result, digest: str) -> Sequence[FileFailure]:
    """Return the failures, with that of a manifest other than the one wanted."""
    try:
        found = Catalog(storage).marker(result.name).manifest_sha256
    except CheckpointError:
        return result.failures  # which name it
    if found == digest:
        return result.failures
    problem = f"its SHA-256 is {found}, not {digest}: it is another checkpoint than was asked for"
    return [FileFailure(path=MANIFEST, problem=problem), *result.failures]


def _verified(storage: Storage, name: str) -> _Result:
    return replace(_compared(storage, name), strangers=_strangers(storage, name))


def _strangers(storage: Storage, name: str) -> Sequence[str]:
    try:
        return strangers(storage, name)
    except CheckpointError:
        return ()  # what is wrong with its manifest is among the failures


def _compared(storage: Storage, name: str) -> _Result:
    catalog = Catalog(storage)
    if (part := _part(storage, name)) is not None:
        return part
    try:
        with ProgressLine(f"verifying {name}", _size_of(catalog, name)) as progress:
            failures = verify(storage, name, seen=progress.add)
    except ArchivedError as error:
        # Not damage: no mark, and the others are verified all the same.
        return _Result(name=name, failures=[FileFailure(path=name, problem=str(error))])
    try:
        damaged = catalog.known_damage(name)
    except CheckpointError:
        return _Result(name=name, failures=failures)  # it does not count as it is, so no mark is needed
    fatal = lost(failures)
    problem = "; ".join(map(str, fatal[:_MOST_SHOWN]))
    if problem == (damaged or ""):
        return _Result(name=name, failures=failures)
    try:
        if fatal:
            catalog.mark_damaged(name, problem)
        else:
            catalog.unmark(name)
    except (CheckpointError, OSError) as error:
        # A user who may only read the root still gets the result.
        stays = f"could not be marked: {error}" if fatal else f"stays, {error}"
        return _Result(name=name, failures=failures, damaged=damaged, mark=stays)
    became = "is marked" if fatal else "was taken away"
    return _Result(name=name, failures=failures, damaged=damaged, mark=became)


def _part(storage: Storage, name: str) -> _Result | None:
    """Verify the files here of a checkpoint on the disks of several nodes.

    None if all of it is here. It is not marked: what is lacking is no damage.
    """
    catalog = Catalog(storage)
    try:
        whole_info(storage, name, catalog.marker(name))
    except PartialCheckpointError as part:
        manifest = catalog.manifest(name)
        groups = zip(manifest.files, manifest.groups, strict=True)
        files = [entry for entry, group in groups if group not in part.lacking]
        here = [entry.path for entry in files]
        with ProgressLine(f"verifying {name}", sum(entry.size_bytes for entry in files)) as progress:
            found = verify(storage, name, paths=here, seen=progress.add)
        # `.metadata` is compared with the tables of all ranks, some of which are not here.
        failures = [each for each in found if each.path in here]
        return _Result(name=name, failures=failures, note=f" ({part})")
    except CheckpointError:
        return None  # which `verify` reports
    return None


def _size_of(catalog: Catalog, name: str) -> int:
    try:
        return catalog.marker(name).info(name).size_bytes
    except (CheckpointError, OSError):
        return 0  # `verify` reports what is wrong with it


def _reported(storage: Storage, results: Sequence[_Result], *, strict: bool = False) -> Outcome:
    parts: list[str] = []
    for result in results:
        parts.append(f"{result.verdict:<8}{storage.url}/{result.name}{result.note}")
        parts += [f"  {failure}" for failure in result.failures]
        if result.verdict == _REPAIR:
            parts.append(
                "  loads take what is whole: copy that file over the damaged one; if both are, save again"
            )
        parts += [f"  {path}: in no manifest, so never read" for path in result.strangers]
        if result.mark and lost(result.failures):
            parts.append(f"  as damaged, it {result.mark}")
        elif result.mark:
            parts.append(f"  was marked as damaged: {result.damaged}; the mark {result.mark}")
    return Outcome(
        fields={"root": storage.url, "checkpoints": [result.fields for result in results]},
        parts=parts,
        exit_code=int(
            any(
                lost(result.failures) or (strict and (result.strangers or result.failures))
                for result in results
            )
        ),
    )
