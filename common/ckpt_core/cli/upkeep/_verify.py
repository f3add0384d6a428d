"""`verify`: read checkpoints back and compare them with what was committed."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ckpt_core.cli._arguments import (
    ROOT_OR_CHECKPOINT,
    Commands,
    named_checkpoint,
    none_committed,
    nothing_at,
    open_place,
    open_root,
)
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.commit import Catalog, strangers, verify, verify_part, whole_info
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    ConfigError,
    FileFailure,
    PartialCheckpointError,
    lost,
)
from ckpt_core.hosting import root_of
from ckpt_core.names import DATA_SUFFIX, MANIFEST, MARKER, METADATA, can_count, step_name
from ckpt_core.storage import Storage, open_storage

_MOST_SHOWN: Final = 5
_REPAIR: Final = "REPAIR"
"""The state of a checkpoint with damage for which twins make up: it loads."""
_NO_MANIFEST: Final = FileFailure(path=MANIFEST, problem="missing: stock DCP writes none")
_SHA256: Final = re.compile("[0-9a-f]{64}")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """The result for one checkpoint."""

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
        description="Verifies a checkpoint, the newest of a root, a directory written by stock DCP, or what "
        "lies below a directory: the newest of each run, and all that stock DCP wrote. One that is damaged "
        "is marked, so that no resume relies on it; one that verifies loses its mark.",
    )
    command.add_argument("place", **ROOT_OR_CHECKPOINT)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="verify this step of the root")
    which.add_argument("--all", action="store_true", help="verify every checkpoint that lies there")
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
    """Verify a checkpoint, chosen ones of a root, or all that lie below a directory."""
    digest, options, strict = _digest(arguments), arguments.storage_options, arguments.strict
    if arguments.step is not None:
        storage = open_root(arguments.place, options)
        return outcome(storage, [_name_of(storage, arguments.step)], strict=strict, digest=digest)
    named = None if arguments.all else named_checkpoint(arguments.place, options)
    if named is not None:
        storage, name = named
        if not storage.list(name):
            raise nothing_at(f"{storage.url}/{name}")
        return outcome(storage, [name], strict=strict, digest=digest)
    storage = (open_root if arguments.all else open_place)(arguments.place, options)
    if not arguments.all and (newest := _newest(storage)):
        return outcome(storage, newest, strict=strict, digest=digest)
    found = list(_below(storage))
    roots = sorted({path.rpartition("/")[0] for path, ours in found if ours})
    if digest is not None and roots:
        raise ConfigError("--manifest-sha256 is of one checkpoint: name it")
    results = [result for root in roots for result in _of_root(arguments, root)]
    stock = [_stock(storage, path) for path, ours in found if not ours]
    if digest is not None:
        stock = [replace(each, failures=[_NO_MANIFEST, *each.failures]) for each in stock]
    if not results and not stock:
        raise none_committed(storage)
    empty = [root for root in roots if not any(each.name.startswith(f"{root}/") for each in results)]
    reported = _reported(storage, [*results, *stock], strict=strict)
    lines = [f"nothing is committed in {storage.url}/{root}" for root in empty if root]
    return replace(reported, parts=[*reported.parts, *lines])


def _digest(arguments: Namespace) -> str | None:
    """Return the SHA-256 of the manifest that is wanted; None if any will do."""
    if arguments.manifest_sha256 is None:
        return None
    digest = str(arguments.manifest_sha256).lower().removeprefix("sha256:")
    if not _SHA256.fullmatch(digest):
        raise ConfigError("--manifest-sha256 must be 64 hex digits, as `ckpt show` prints them")
    if arguments.all:
        raise ConfigError("--manifest-sha256 is of one checkpoint: it does not go with --all")
    return digest


def _name_of(storage: Storage, step: int) -> str:
    try:
        return Catalog(storage).name_of(step)
    except PartialCheckpointError:
        return step_name(step)


def _newest(storage: Storage) -> list[str]:
    """Return the name of the newest checkpoint of a root; none of what is no root."""
    survey = Catalog(storage).survey()
    survey.log_unreadable(storage.url)
    found = survey.committed or sorted(survey.parts, key=lambda info: info.step)
    if not found and survey.unreadable:
        raise next(iter(survey.unreadable.values()))
    return [info.name for info in found[-1:]]


def _below(storage: Storage, directory: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the checkpoints at or below a directory, and parts by stock DCP.

    Each as its path, and whether it is one of ours.
    """
    children = storage.list(directory)
    files = {child.name for child in children if not child.is_directory}
    if directory and files & {MARKER, MANIFEST}:
        yield directory, True
        return
    if METADATA in files or any(file.endswith(DATA_SUFFIX) for file in files):
        yield directory, False
    for child in children:
        if child.is_directory and not child.is_link and can_count(child.name):
            yield from _below(storage, f"{directory}/{child.name}".lstrip("/"))


def _of_root(arguments: Namespace, path: str) -> Iterator[_Result]:
    """Verify a root below the place: its newest checkpoint, or all of them.

    One whose marker cannot be read fails.
    """
    place = root_of(arguments.place).rstrip("/")
    storage = open_storage(f"{place}/{path}".rstrip("/"), arguments.storage_options)
    survey = Catalog(storage).survey()
    every = [*survey.everything, *survey.parts]
    unreadable = survey.unreadable.keys() - {info.name for info in survey.parts}
    if not arguments.all:
        every, unreadable = (survey.committed or every)[-1:], unreadable if not every else set()
    results = [_verified(storage, info.name) for info in every]
    for name, error in sorted((name, survey.unreadable[name]) for name in unreadable):
        failures = getattr(error, "failures", ()) or [FileFailure(path=MARKER, problem=str(error))]
        results.append(_Result(name=name, failures=failures, note=" (its marker cannot be read)"))
    for result in results:
        yield replace(result, name=f"{path}/{result.name}".strip("/"))


def _stock(storage: Storage, path: str) -> _Result:
    """Verify one directory that stock DCP wrote."""
    total = sum(each.size_bytes for each in storage.list(path))
    with ProgressLine(f"verifying {path or storage.url}", total) as progress:
        failures = verify_part(storage, path, seen=progress.add)
    return _Result(name=path, failures=failures, note=" (stock DCP, by its CRC32s)")


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
        parts.append(f"{result.verdict:<8}{storage.url}/{result.name}".rstrip("/") + result.note)
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
