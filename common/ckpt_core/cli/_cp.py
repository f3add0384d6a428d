"""`cp` and `upload`: copies to another root, verified and resumable."""

from __future__ import annotations

import re
import signal
import threading
from argparse import Namespace
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, final

from ckpt_core.cli._arguments import (
    claimed,
    is_idle,
    is_left_over,
    is_local,
    none_committed,
    open_root,
    open_target,
    options_for,
    resolve,
    storage_options,
)
from ckpt_core.cli._outcome import Outcome, ProgressLine
from ckpt_core.commit import (
    Catalog,
    Lease,
    Owner,
    Survey,
    abandon,
    known_pins,
    note_measured,
    plain_storage,
    read_notes,
    working_name,
)
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FileFailure,
    NoRoomError,
    RootBusyError,
    first_of,
)
from ckpt_core.formats.frames import require_zstandard
from ckpt_core.hosting import root_of
from ckpt_core.journal import unread
from ckpt_core.names import SIGNATURE, TIERS, WEIGHTS_SUFFIX, is_own_file, parse_step_name, run_name
from ckpt_core.options import bytes_text
from ckpt_core.storage import Storage, Throttle, open_storage
from ckpt_core.tiers import (
    CopyTerms,
    TierRecord,
    copy_checkpoint,
    read_tiers,
)
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import parse_size

_logger = logger_of(__name__)

_MOST_LISTED: Final = 5
_OF_HOSTS: Final = re.compile(r"(?:checkpoint|epoch|step)[-_=][0-9]+|[A-Za-z0-9][ -.0-~]*\.ckpt")
"""What Accelerate, the Trainer and Lightning call checkpoints; no program takes it for something else."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _CopySource:
    """Checkpoints of one root that are to be copied, in this order.

    Attributes:
        relatives: everything in the root: what belongs to the same run.
        is_run: whether the run was named, not a checkpoint.
        named: whether the user wrote the name of the checkpoint.
        renames: whether a copy whose name is taken gets one of its lineage, as by a job.
        unreadable: problems of directories that may be checkpoints.
    """

    source: Storage
    infos: Sequence[CheckpointInfo]
    relatives: Sequence[CheckpointInfo]
    is_run: bool = False
    named: bool = False
    renames: bool = False
    unreadable: Sequence[str] = ()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _CopyResult:
    """`copied`; `there`: the target had it; `gone`: pruned meanwhile; or `FAILED`."""

    info: CheckpointInfo
    source: str
    state: str
    problem: str = ""
    failures: Sequence[FileFailure] = ()


def run(arguments: Namespace) -> Outcome:
    terms = _terms_of(arguments, arguments.compress)
    selections = [_select(place, arguments) for place in arguments.sources]
    if terms.compress not in {None, "none"}:
        require_zstandard()
        for storage, name in ((each.source, info.name) for each in selections for info in each.infos):
            if storage.exists(f"{name}/{SIGNATURE}"):
                raise ConfigError(
                    f"{storage.url}/{name} is signed, and this command cannot sign the manifest of a "
                    "compressed copy: nothing was copied; copy it without --compress"
                )
    options = options_for(arguments.target, arguments)
    if arguments.to_storage_option and not is_local(arguments.target):
        options = storage_options(arguments.to_storage_option, "")
    target = open_target(arguments.target, options)
    if any(selection.source.url == target.url for selection in selections):
        raise ConfigError(f"{target.url} is source and target: name another root to copy to")
    survey = Catalog(target).survey()
    _refuse_conflicts(selections, target, survey)
    if not arguments.mixed:
        _refuse_other_runs(selections, target, survey)
    claim = partial(claimed, target, "ckpt cp", take_over=arguments.take_over)
    results = _copy_all(selections, target, survey, terms=terms, claim=claim, mixed=arguments.mixed)
    return _outcome(target, results, [text for each in selections for text in each.unreadable])


def upload(arguments: Namespace) -> Outcome:
    terms = _terms_of(arguments)
    storage = open_root(arguments.root, arguments.storage_options)
    records = read_tiers(storage)
    if arguments.to is None:
        named = ", ".join(each.url for each in records) or "no place"
        raise ConfigError(
            f"name the place to upload to: --to URL. {TIERS} of {storage.url} names {named}; "
            "the writer of that root chose it"
        )
    options = options_for(arguments.to, arguments)
    url = open_storage(root_of(arguments.to), options).url.rstrip("/")
    record = next((each for each in records if each.url.rstrip("/") == url), None)
    has_ended = _judge_of_owners(storage, is_tier=record is not None)
    survey = Catalog(storage).survey()
    if not survey.committed:
        nothing = CheckpointNotFoundError(f"{storage.url}: no checkpoint is committed there")
        raise next(iter(survey.unreadable.values()), nothing)
    target = open_target(arguments.to, options)
    if target.url == storage.url:
        raise ConfigError(f"{target.url} is the root itself: name another place to upload to")
    there = Catalog(target).survey()
    infos = survey.committed if arguments.all else _due(record or TierRecord(url=url), survey, there)
    names = {info.save_id: info.name for info in there.everything}
    selection = _CopySource(
        source=storage,
        # What the tier has by another name, because its own was taken, is not sent again.
        infos=[info for info in infos[::-1] if names.get(info.save_id, info.name) == info.name],
        relatives=survey.everything,
        is_run=True,
        renames=True,
    )
    claim = partial(claimed, target, "ckpt upload", take_over=arguments.take_over, has_ended=has_ended)
    sent = _outcome(target, _copy_all([selection], target, there, terms=terms, claim=claim), ())
    return replace(sent, fields={"root": storage.url, "tiers": [sent.fields]})


def _judge_of_owners(storage: Storage, *, is_tier: bool) -> Callable[[Owner], bool]:
    """Return what tells whether a tier's owner has ended; refuse if its job lives."""
    last, idle = Owner.of(storage), is_idle(storage)
    if idle is False and is_tier:
        raise RootBusyError(
            f"{storage.url} belongs to a live job ({Owner.of(storage) or 'of unknown name'}), which uploads "
            "by itself: wait until it ends, or name another place: --to URL"
        )

    def has_ended(owner: Owner) -> bool:
        died_here = last is not None and (owner.host, owner.pid) == (last.host, last.pid)
        return bool(idle and owner.pid) and (owner.has_ended or died_here)

    return has_ended


def _due(record: TierRecord, survey: Survey, there: Survey) -> list[CheckpointInfo]:
    """Return what was due, and the newest if the tier has none as new; oldest first."""

    def age(info: CheckpointInfo) -> tuple[int, int]:
        return info.lineage.number, info.step

    have = {info.save_id for info in there.everything}
    due = {*record.due, *([] if record.uploading is None else [record.uploading.name])}
    usable = [info for info in survey.committed if info.usable]
    newest = max((age(info) for info in there.everything if info.usable), default=(-1, -1))
    return [
        info
        for info in usable
        if info.save_id not in have and (info.name in due or (info is usable[-1] and age(info) > newest))
    ]


def _terms_of(arguments: Namespace, compress: str | None = None) -> CopyTerms:
    rate = parse_size("--bandwidth", arguments.bandwidth, rate=True)
    if rate is not None and rate <= 0:
        raise ConfigError("--bandwidth must be more than 0 bytes per second")
    return CopyTerms(pace=None if rate is None else Throttle(rate), bytes_per_second=rate, compress=compress)


def _select(place: str, arguments: Namespace) -> _CopySource:
    """Find what a source names: a step or name of a root, or all of it."""
    options = options_for(place, arguments)
    found = resolve(place, options)
    storage = open_root(place, options) if found is None else found[0]
    catalog, survey = Catalog(storage), Catalog(storage).survey()
    if found is not None:
        which = found[1]
        info = catalog.find(step=which) if isinstance(which, int) else catalog.find(name=which)
        # Under its own name, if a link is what was named.
        same = [each for each in survey.everything if each.manifest_sha256 == info.manifest_sha256]
        own = next((each for each in same if each.name == info.name), None) or next(iter(same), info)
        return _CopySource(source=storage, infos=[own], relatives=survey.everything, named=which == own.name)
    if not survey.everything and not survey.unreadable:
        raise none_committed(storage)
    infos = [info for info in survey.everything if arguments.all or not info.abandoned]
    return _CopySource(
        source=storage,
        infos=infos[::-1],  # the newest first
        relatives=survey.everything,
        is_run=True,
        unreadable=[f"{storage.url}/{name}: {error}" for name, error in survey.unreadable.items()],
    )


def _refuse_conflicts(selections: Sequence[_CopySource], target: Storage, survey: Survey) -> None:
    there = {info.name: info for info in survey.everything}
    taken: list[str] = []
    for info in (info for selection in selections for info in selection.infos):
        other = there.setdefault(info.name, info)
        if other.content_sha256 != info.content_sha256 or info.name in survey.unreadable:
            taken.append(info.name)
    if taken:
        raise CheckpointExistsError(
            f"{target.url} has another checkpoint named {first_of(taken, _MOST_LISTED)}, or two are "
            "to be copied under one name; nothing was copied: checkpoints are never overwritten, so copy to "
            "another root"
        )


def _refuse_other_runs(selections: Sequence[_CopySource], target: Storage, survey: Survey) -> None:
    """Refuse to mix runs in one root: but for the last, they count as abandoned."""
    theirs = _lines(survey.everything)
    for selection in selections:
        ours = _lines([*selection.relatives, *selection.infos])
        if theirs and not theirs & ours:
            raise ConfigError(
                f"{target.url} holds another run than {selection.source.url}: in one root, the run begun "
                "last counts as the present one, and the other as abandoned. Nothing was copied: name an "
                "empty root, or add --mixed if nothing is to be resumed there"
            )
        theirs |= ours


def _lines(infos: Iterable[CheckpointInfo]) -> set[str]:
    """Return the ids of the lineages of checkpoints, and of those that they continue."""
    return {each for info in infos for each in info.lineage.limits()}


def _copy_all(
    selections: Sequence[_CopySource],
    target: Storage,
    survey: Survey,
    *,
    terms: CopyTerms,
    claim: Callable[[], AbstractContextManager[Lease]],
    mixed: bool = False,
) -> list[_CopyResult]:
    """Copy checkpoints, except those that the target has; damage stops only its own.

    The target is claimed if there is something to copy or to clear away. One of mixed runs gets no journal.
    """
    results: list[_CopyResult] = []
    there = {info.name: info for info in survey.everything}
    todo: list[tuple[_CopySource, CheckpointInfo]] = []
    for selection, info in ((each, info) for each in selections for info in each.infos):
        found = there.get(info.name)
        if found is None or (selection.renames and found.content_sha256 != info.content_sha256):
            todo.append((selection, info))
        else:
            results.append(_found(selection, info, found, target))
    _refuse_places(todo, target, there)
    runs = [] if mixed else [each.source for each in selections if each.is_run and each.infos]
    journal = _unread(runs, target)
    if not todo and not is_left_over(Owner.of(target)):
        if journal:
            with suppress(RootBusyError), claim():  # a live job there has a journal of its own
                _carry_journal(journal, target)
        return results
    todo = [(selection, _as_copied(selection, info, terms)) for selection, info in todo]
    _refuse_without_room(target, [info for _, info in todo])
    what, total = f"copying to {target.url}", sum(info.size_bytes for _, info in todo)
    with claim() as lease, interruptible() as stop, ProgressLine(what, total, plain=True) as line:
        for result in results if target.supports_rename else ():
            abandon(target, working_name(target, result.info.name, result.info.save_id))
        terms = replace(terms, progress=line.add, stop=stop)
        results += [_copied(selection, info, target, terms=terms, lease=lease) for selection, info in todo]
        _carry_journal(journal, target)
    return results


def _refuse_places(
    todo: Sequence[tuple[_CopySource, CheckpointInfo]], target: Storage, there: Container[str]
) -> None:
    """Refuse names with a meaning elsewhere, and to join what is no checkpoint.

    The writer of the source chose its names: `.git` or `src` would be the user's own.
    """
    for selection, info in todo:
        name, shown = info.name, f"{selection.source.url}/{info.name}"
        whole = name.removesuffix(WEIGHTS_SUFFIX)
        usual = parse_step_name(whole) is not None or _OF_HOSTS.fullmatch(whole) is not None
        if name.startswith(".") or not (usual or selection.named):
            advice = "" if name.startswith(".") else f"; if it is, `ckpt cp {shown} DST`"
            raise ConfigError(
                f"{shown} is not called as checkpoints are, and may mean something "
                f"else in {target.url}: nothing was copied{advice}"
            )
        if target.supports_rename and name not in there and target.entry(name) is not None:
            raise CheckpointExistsError(
                f"{target.url}/{name} is no checkpoint, and was not touched: move it, or copy to another "
                "root; nothing was copied"
            )


def _as_copied(selection: _CopySource, info: CheckpointInfo, terms: CopyTerms) -> CheckpointInfo:
    """Return the checkpoint with the size of its copy, or the most that it may have."""
    if terms.compress is None or not info.plain_sha256:
        return info
    plain = Catalog(plain_storage(selection.source, info.name)).manifest(info.name)
    return replace(info, size_bytes=plain.size_bytes)


def _refuse_without_room(target: Storage, infos: Sequence[CheckpointInfo]) -> None:
    """Refuse copies that do not fit; what an earlier copy has left there is continued."""
    free, needed = target.space().free_bytes, 0
    if free is None:
        return
    for info in infos:
        working = working_name(target, info.name, info.save_id)
        entry = target.entry(working)
        begun = target.list(working) if entry is not None and entry.is_directory else ()
        needed += max(0, info.size_bytes - sum(each.size_bytes for each in begun if not each.is_directory))
    if needed > free:
        raise NoRoomError(
            f"{target.url} has {bytes_text(free)} free, and the {len(infos)} checkpoint(s) to copy need "
            f"{bytes_text(needed)}; nothing was copied: free space, or copy single checkpoints (ROOT@STEP)",
            needed_bytes=needed,
            free_bytes=free,
        )


def _found(
    selection: _CopySource, info: CheckpointInfo, found: CheckpointInfo, target: Storage
) -> _CopyResult:
    if found.damaged is not None:
        problem = (
            f"it is there, and marked as damaged ({found.damaged}): look at it with `ckpt verify`; after "
            f"`ckpt prune {target.url} --damaged` it can be copied again"
        )
        return _CopyResult(info=info, source=selection.source.url, state="FAILED", problem=problem)
    _carry_marks(selection, info, found, target)
    return _CopyResult(info=info, source=selection.source.url, state="there")


def _copied(
    selection: _CopySource, info: CheckpointInfo, target: Storage, *, terms: CopyTerms, lease: Lease
) -> _CopyResult:
    source = selection.source
    failed = _CopyResult(info=info, source=source.url, state="FAILED")
    try:
        # Files of others with a hidden name, such as `.git/config`.
        paths = [entry.path for entry in Catalog(source).manifest(info.name).files]
        hidden = [path for path in paths if any(part.startswith(".") for part in path.split("/"))]
        if hidden := [path for path in hidden if "/" in path or not is_own_file(path)]:
            named = ", ".join(hidden[:_MOST_LISTED])
            return replace(failed, problem=f"it has hidden files, which other programs may read: {named}")
        otherwise = run_name(info.name, info.lineage.id) if selection.renames and info.lineage.id else ""
        found = copy_checkpoint(source, target, info.name, terms, check=lease.check, otherwise=otherwise)
    except CorruptCheckpointError as error:
        problem = f"the source is damaged, so that nothing was committed: {error}"
        return replace(failed, problem=problem, failures=error.failures)
    except CheckpointNotFoundError:
        if not selection.is_run:
            raise
        return replace(failed, state="gone")
    _carry_marks(selection, info, found, target)
    return replace(failed, info=replace(info, name=found.name, size_bytes=found.size_bytes), state="copied")


def _carry_marks(
    selection: _CopySource, info: CheckpointInfo, found: CheckpointInfo, target: Storage
) -> None:
    """Mark what is bad, note what was measured, and pin what a run has pinned.

    Damage, and who uses a checkpoint, is of one place.
    """
    measured = read_notes(selection.source).measured(info.save_id)
    if measured != read_notes(target).measured(found.save_id):
        note_measured(target, found.save_id, measured)
    if info.bad is not None and found.bad is None:
        Catalog(target).mark_bad(found.name, info.bad)
    reason = (known_pins(selection.source) or {}).get(info.step)
    if selection.is_run and reason is not None and found.pinned is None:
        Catalog(target).pin(info.step, reason)


def _unread(runs: Sequence[Storage], target: Storage) -> dict[str, bytes]:
    """Return what the target lacks of journals; one that cannot be read is a warning."""
    files = dict[str, bytes]()
    try:
        for source in runs:
            owner = Owner.of(source)
            may_live = owner is not None and not owner.has_ended and not is_idle(source)
            files |= unread(source, target, is_alive=may_live)
    except OSError as error:
        _logger.warning("the journal cannot be read, and is not copied: %s", error)
    return files


def _carry_journal(files: Mapping[str, bytes], target: Storage) -> None:
    """Write to the target, whose lease is held; a failure is a warning."""
    try:
        for key, content in files.items():
            target.replace(key, content)
    except OSError as error:
        _logger.warning("the checkpoints were copied, and their journal was not: %s", error)


def _outcome(target: Storage, results: Sequence[_CopyResult], unreadable: Sequence[str]) -> Outcome:
    copied = [each for each in results if each.state == "copied"]
    size = bytes_text(sum(each.info.size_bytes for each in copied))
    return Outcome(
        fields={
            "target": target.url,
            "checkpoints": [_fields(each) for each in results],
            "unreadable": list(unreadable),
        },
        parts=[
            *(f"{each.state:<8}{target.url}/{each.info.name}" for each in results),
            *(f"  {each.info.name}: {each.problem}" for each in results if each.problem),
            *(f"not copied, its marker cannot be read: {text}" for text in unreadable),
            f"{len(copied)} copied to {target.url}, {size}",
        ],
        exit_code=int(bool(unreadable) or any(each.state == "FAILED" for each in results)),
    )


def _fields(each: _CopyResult) -> dict[str, Any]:
    return {
        "source": each.source,
        "name": each.info.name,
        "step": each.info.step,
        "size_bytes": each.info.size_bytes,
        "state": each.state,
        "problem": each.problem or None,
        "failures": [asdict(failure) for failure in each.failures],
    }


@contextmanager
def interruptible() -> Generator[Callable[[], None]]:
    """Let Ctrl-C end the threads of a copy, too; yields what they call."""
    interrupted = threading.Event()

    def stop() -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    def interrupt(_number: int, _frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
