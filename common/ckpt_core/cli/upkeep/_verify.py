"""`verify`: read checkpoints back and compare them with what was committed."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ckpt_core.cli._arguments import (
    find_others,
    named_checkpoint,
    none_committed,
    open_place,
    open_root,
)
from ckpt_core.cli._outcome import Outcome, ProgressLine
from ckpt_core.commit import Catalog, file_as_root, strangers, verify, verify_part
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FileFailure,
    PartialCheckpointError,
    lost,
)
from ckpt_core.hosting import root_of
from ckpt_core.names import DATA_SUFFIX, MANIFEST, MARKER, METADATA, can_count, step_name
from ckpt_core.storage import Storage, open_storage

_MOST_SHOWN: Final = 5
_NO_MANIFEST: Final = FileFailure(path=MANIFEST, problem="missing: stock DCP writes none")
_SHA256: Final = re.compile("[0-9a-f]{64}")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """The result for one checkpoint; `damaged` is its earlier mark, `mark` its change."""

    name: str
    failures: Sequence[FileFailure]
    strangers: Sequence[str] = ()
    note: str = ""
    damaged: str | None = None
    mark: str = ""


def run(arguments: Namespace) -> Outcome:
    digest, strict = _digest(arguments), arguments.strict
    one = not arguments.all and arguments.step is None
    others = find_others(arguments.place, arguments.storage_options) if one else None
    if others is not None and others[2]:
        return _reported(others[0], [_others(*others, digest)])
    if (named := _named(arguments)) is not None:
        return outcome(*named, strict=strict, digest=digest)
    storage = (open_root if arguments.all else open_place)(arguments.place, arguments.storage_options)
    found = list(_below(storage))
    roots = sorted({path.rpartition("/")[0] for path, ours in found if ours})
    if digest is not None and roots:
        raise ConfigError("--manifest-sha256 is of one checkpoint: name it")
    results = [result for root in roots for result in _of_root(arguments, root)]
    stock = [_stock(storage, path) for path, ours in found if not ours]
    if digest is not None:
        stock = [replace(each, failures=[_NO_MANIFEST, *each.failures]) for each in stock]
    if not results and not stock and others is not None:
        return _reported(others[0], [_others(*others, digest)])
    if not results and not stock:
        raise none_committed(storage)
    empty = [root for root in roots if not any(each.name.startswith(f"{root}/") for each in results)]
    reported = _reported(storage, [*results, *stock], strict=strict)
    lines = [f"nothing is committed in {storage.url}/{root}" for root in empty if root]
    return replace(reported, parts=[*reported.parts, *lines])


def _digest(arguments: Namespace) -> str | None:
    """Return the SHA-256 of the manifest that is wanted; None if any will do."""
    if arguments.all and arguments.step is not None:
        raise ConfigError("--step is of one checkpoint: it does not go with --all")
    if arguments.manifest_sha256 is None:
        return None
    digest = str(arguments.manifest_sha256).lower().removeprefix("sha256:")
    if not _SHA256.fullmatch(digest):
        raise ConfigError("--manifest-sha256 must be 64 hex digits, as `ckpt show` prints them")
    if arguments.all:
        raise ConfigError("--manifest-sha256 is of one checkpoint: it does not go with --all")
    return digest


def _named(arguments: Namespace) -> tuple[Storage, str] | None:
    """Find the one checkpoint that was named, or the newest of a root; None for many."""
    place, options = arguments.place, arguments.storage_options
    if arguments.step is not None:
        storage = open_root(place, options)
        with suppress(PartialCheckpointError):
            return storage, Catalog(storage).name_of(arguments.step)
        return storage, step_name(arguments.step)
    if arguments.all:
        return None
    if (named := named_checkpoint(place, options)) is not None:
        storage, name = named
        if not storage.list(name):
            raise CheckpointNotFoundError(f"{storage.url}/{name}: there is nothing")
        return storage, name
    storage = open_place(place, options)
    survey = Catalog(storage).survey()
    survey.log_unreadable(storage.url)
    found = survey.committed or sorted(survey.parts, key=lambda info: info.step)
    if not found and survey.unreadable:
        raise next(iter(survey.unreadable.values()))
    return (storage, found[-1].name) if found else None


def _below(storage: Storage, directory: str = "") -> Iterator[tuple[str, bool]]:
    """Yield checkpoints at or below a directory, and stock parts: path, if it is ours."""
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
    """Verify the newest, or all, of a root below; an unreadable marker is a failure."""
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
    total = sum(each.size_bytes for each in storage.list(path))
    with ProgressLine(f"verifying {path or storage.url}", total) as progress:
        failures = verify_part(storage, path, seen=progress.add)
    return _Result(name=path, failures=failures, note=" (stock DCP, by its CRC32s)")


def _others(storage: Storage, directory: str, file: str, digest: str | None) -> _Result:
    """Verify what others wrote: headers, sizes, and its checksums, if it has any."""
    from ckpt_core.loading import located, open_parts

    name = "/".join(filter(None, (directory, file)))
    failures = [] if digest is None else [_NO_MANIFEST]
    try:
        _, _, parts = open_parts(storage, directory, file=file)
        (part,), tensors = parts.values(), located(parts).values()
        summed = [each for each in tensors if each.checksums]
        with ProgressLine(f"verifying {name}", sum(each.size_bytes for each in summed)) as progress:
            for each in summed:
                each.read(progress.add)
    except CheckpointNotFoundError:
        raise (file_as_root(f"{storage.url}/{name}") if file else none_committed(storage)) from None
    except CorruptCheckpointError as error:
        found = error.failures or (FileFailure(path=file or directory, problem=str(error)),)
        return _Result(name=name, failures=[*failures, *found])
    compared = "by its checksums" if summed else "by its headers: it has no checksums"
    return _Result(name=name, failures=failures, note=f" ({part.kind}, {compared})")


def outcome(storage: Storage, name: str, *, strict: bool = False, digest: str | None = None) -> Outcome:
    """Verify a checkpoint; mark it if it is damaged, take a mark from a whole one."""
    result = _verified(storage, name)
    if digest is not None:
        result = replace(result, failures=_exchanged(storage, result, digest))
    return _reported(storage, [result], strict=strict)


def _exchanged(storage: Storage, result: _Result, digest: str) -> Sequence[FileFailure]:
    """Return the failures, with that of a manifest other than the one wanted.

    A checkpoint that has another one is not damaged.
    """
    try:
        found = Catalog(storage).marker(result.name).manifest_sha256
    except CheckpointError:
        return result.failures  # which name it
    if found == digest:
        return result.failures
    problem = f"its SHA-256 is {found}, not {digest}: it is another checkpoint than was asked for"
    return [FileFailure(path=MANIFEST, problem=problem), *result.failures]


def _verified(storage: Storage, name: str) -> _Result:
    result = _part(storage, name) or _compared(storage, name)
    try:
        return replace(result, strangers=strangers(storage, name))
    except CheckpointError:
        return result  # what is wrong with its manifest is among the failures


def _compared(storage: Storage, name: str) -> _Result:
    catalog, size = Catalog(storage), 0
    with suppress(CheckpointError, OSError):  # `verify` reports what is wrong with it
        size = catalog.marker(name).info(name).size_bytes
    try:
        with ProgressLine(f"verifying {name}", size) as progress:
            failures = verify(storage, name, seen=progress.add)
    except ArchivedError as error:
        # Not damage: no mark, and the others are verified all the same.
        return _Result(name=name, failures=[FileFailure(path=name, problem=str(error))])
    result = _Result(name=name, failures=failures)
    try:
        damaged = catalog.known_damage(name)
    except CheckpointError:
        return result  # it does not count as it is, so no mark is needed
    fatal = lost(failures)
    problem = "; ".join(map(str, fatal[:_MOST_SHOWN]))
    if problem == (damaged or ""):
        return result
    try:
        if fatal:
            catalog.mark_damaged(name, problem)
        else:
            catalog.unmark(name)
    except (CheckpointError, OSError) as error:
        # A user who may only read the root still gets the result.
        became = f"could not be marked: {error}" if fatal else f"stays, {error}"
    else:
        became = "is marked" if fatal else "was taken away"
    return replace(result, damaged=damaged, mark=became)


def _part(storage: Storage, name: str) -> _Result | None:
    """Verify the files here of a checkpoint on the disks of several nodes.

    None if all of it is here. It is not marked: what is lacking is no damage.
    """
    catalog = Catalog(storage)
    try:
        catalog.info(name)
    except PartialCheckpointError as part:
        manifest = catalog.manifest(name)
        groups = zip(manifest.files, manifest.groups, strict=True)
        files = [entry for entry, group in groups if group not in part.lacking]
        here = [entry.path for entry in files]
        with ProgressLine(f"verifying {name}", sum(entry.size_bytes for entry in files)) as progress:
            found = verify(storage, name, paths=here, seen=progress.add)
        # `.metadata` is compared with the tables of all ranks, some of which are not here.
        return _Result(name=name, failures=[each for each in found if each.path in here], note=f" ({part})")
    except CheckpointError:
        return None  # which `verify` reports
    return None


def _reported(storage: Storage, results: Sequence[_Result], *, strict: bool = False) -> Outcome:
    bad = any(lost(each.failures) or (strict and (each.strangers or each.failures)) for each in results)
    return Outcome(
        fields={"root": storage.url, "checkpoints": [_fields(each) for each in results]},
        parts=[line for each in results for line in _lines(storage, each)],
        exit_code=int(bad),
    )


def _fields(result: _Result) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": result.name,
        "ok": not lost(result.failures),
        "failures": [asdict(failure) for failure in result.failures],
        "strangers": list(result.strangers),
    }
    return fields | ({"was_marked": result.damaged, "mark": result.mark} if result.mark else {})


def _lines(storage: Storage, result: _Result) -> Iterator[str]:
    fatal = bool(lost(result.failures))
    verdict = "FAILED" if fatal else "REPAIR" if result.failures else "ok"
    yield f"{verdict:<8}{storage.url}/{result.name}".rstrip("/") + result.note
    yield from (f"  {failure}" for failure in result.failures)
    if verdict == "REPAIR":  # twins make up for the damage: it loads
        yield "  loads take what is whole: copy that file over the damaged one; if both are, save again"
    yield from (f"  {path}: in no manifest, so never read" for path in result.strangers)
    if result.mark and fatal:
        yield f"  as damaged, it {result.mark}"
    elif result.mark:
        yield f"  was marked as damaged: {result.damaged}; the mark {result.mark}"
