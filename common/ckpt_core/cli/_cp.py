"""`cp`: copy checkpoints or a run to another root, verified and resumable."""

from __future__ import annotations

import re
import signal
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ckpt_core.cli._arguments import (
    Commands,
    claimed,
    find_root,
    is_left_over,
    is_local,
    open_checkpoint,
    open_root,
    open_target,
    step_in,
    storage_options,
)
from ckpt_core.cli._carried_journals import carry_journal, joined_journal
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.commit import Catalog, Lease, Owner, Survey, abandon, working_name
from ckpt_core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FileFailure,
    NoRoomError,
    RootBusyError,
)
from ckpt_core.names import MARKER, is_own_file, parse_step_name, run_name
from ckpt_core.options import bytes_text, parse_size
from ckpt_core.storage import Storage, Throttle
from ckpt_core.tiers import CopyTerms, copy_checkpoint
from ckpt_core.types import CheckpointInfo

_MOST_LISTED: Final = 5
_OF_HOSTS: Final = re.compile(r"(?:checkpoint|epoch|step)[-_=][0-9]+|[A-Za-z0-9][ -.0-~]*\.ckpt")
"""What Accelerate, the Trainer and Lightning call checkpoints; no program takes it for something else."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopySource:
    """Checkpoints of one root that are to be copied."""

    source: Storage
    infos: Sequence[CheckpointInfo]
    relatives: Sequence[CheckpointInfo]
    is_run: bool = False
    named: bool = False
    renames: bool = False
    unreadable: Sequence[str] = ()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyResult:
    """The result for one checkpoint."""

    info: CheckpointInfo
    source: str
    state: str
    problem: str = ""
    failures: Sequence[FileFailure] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields for `--json`."""
        return {
            "source": self.source,
            "name": self.info.name,
            "step": self.info.step,
            "size_bytes": self.info.size_bytes,
            "state": self.state,
            "problem": self.problem or None,
            "failures": [asdict(failure) for failure in self.failures],
        }


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the command to those of `ckpt`."""
    command = commands.add_parser(
        "cp",
        parents=[shared],
        help="copy checkpoints or a run to another root",
        description="Copies checkpoints as they are, between any two places, and compares every byte with "
        "their manifests before it commits them. After an interruption the same command continues: what is "
        "there is not sent again. Files that a manifest does not list are not copied.",
    )
    command.add_argument(
        "sources",
        nargs="+",
        metavar="SRC",
        help="ROOT@STEP, a CHECKPOINT, or a ROOT: all committed ones of its present lineage",
    )
    command.add_argument("target", metavar="DST", help="path or URL of the root to copy to")
    command.add_argument("--all", action="store_true", help="of a root also the abandoned checkpoints")
    command.add_argument(
        "--to-storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the filesystem behind DST, if others than for SRC are needed; may be repeated",
    )
    command.add_argument(
        "--mixed", action="store_true", help="copy into a root that holds another run; nothing resumes there"
    )
    add_copy_options(command)
    command.set_defaults(command=run)


def add_copy_options(command: ArgumentParser) -> None:
    """Add the options of `cp` and `upload`."""
    command.add_argument(
        "--bandwidth", metavar="RATE", help='the most bytes per second to send, such as "100 MB/s"'
    )
    command.add_argument(
        "--take-over",
        action="store_true",
        help="copy although writer.json names a job there, where no lock shows whether it is alive",
    )


def run(arguments: Namespace) -> Outcome:
    """Copy what was named to the target root."""
    pace = pace_of(arguments)
    selections = [_select(place, arguments) for place in arguments.sources]
    target = open_target(arguments.target, _options_of_target(arguments))
    if any(selection.source.url == target.url for selection in selections):
        raise ConfigError(f"{target.url} is source and target: name another root to copy to")
    survey = Catalog(target).survey()
    refuse_conflicts(selections, target, survey)
    if not arguments.mixed:
        _refuse_other_runs(selections, target, survey)
    results = copy_all(
        selections,
        target,
        survey,
        pace=pace,
        claim=lambda: claimed(target, "ckpt cp", take_over=arguments.take_over),
        mixed=arguments.mixed,
    )
    return outcome(target, results, [text for each in selections for text in each.unreadable])


def pace_of(arguments: Namespace) -> Throttle | None:
    """Return the limit of the rate that `--bandwidth` sets."""
    rate = parse_size("--bandwidth", arguments.bandwidth, rate=True)
    if rate is not None and rate <= 0:
        raise ConfigError("--bandwidth must be more than 0 bytes per second")
    return None if rate is None else Throttle(rate)


def refuse_conflicts(selections: Sequence[CopySource], target: Storage, survey: Survey) -> None:
    """Refuse, before anything is sent, what cannot be copied under its name."""
    there = {info.name: info for info in survey.everything}
    taken: list[str] = []
    for info in (info for selection in selections for info in selection.infos):
        other = there.setdefault(info.name, info)
        if other.manifest_sha256 != info.manifest_sha256 or info.name in survey.unreadable:
            taken.append(info.name)
    if taken:
        more = f" and {len(taken) - _MOST_LISTED} more" if len(taken) > _MOST_LISTED else ""
        raise CheckpointExistsError(
            f"{target.url} has another checkpoint named {', '.join(taken[:_MOST_LISTED])}{more}, or two are "
            "to be copied under one name; nothing was copied: checkpoints are never overwritten, so copy to "
            "another root"
        )


def copy_all(
    selections: Sequence[CopySource],
    target: Storage,
    survey: Survey,
    *,
    pace: Throttle | None,
    claim: Callable[[], AbstractContextManager[Lease]],
    mixed: bool = False,
) -> list[CopyResult]:
    """Copy checkpoints, except those that the target has.

    What is damaged does not stop the others.
    """
    results: list[CopyResult] = []
    there = {info.name: info for info in survey.everything}
    todo: list[tuple[CopySource, CheckpointInfo]] = []
    for selection, info in ((each, info) for each in selections for info in each.infos):
        found = there.get(info.name)
        if found is None or (selection.renames and found.manifest_sha256 != info.manifest_sha256):
            todo.append((selection, info))
        else:
            results.append(_found(selection, info, found, target))
    _refuse_places(todo, target, survey)
    runs = [] if mixed else [each.source for each in selections if each.is_run and each.infos]
    journal = joined_journal(runs, target)
    if not todo and not is_left_over(Owner.of(target)):
        if journal is not None:
            with suppress(RootBusyError), claim():  # a live job there has a journal of its own
                carry_journal(journal)
        return results
    total = sum(info.size_bytes for _, info in todo)
    _refuse_without_room(target, [info for _, info in todo])
    with (
        claim() as lease,
        interruptible() as stop,
        ProgressLine(f"copying to {target.url}", total, plain=True) as line,
    ):
        for result in results if target.supports_rename else ():
            abandon(target, working_name(target, result.info.name, result.info.save_id))
        terms = CopyTerms(pace=pace, progress=line.add, stop=stop)
        results += [_copied(selection, info, target, terms=terms, lease=lease) for selection, info in todo]
        if journal is not None:
            carry_journal(journal)
    return results


def outcome(target: Storage, results: Sequence[CopyResult], unreadable: Sequence[str]) -> Outcome:
    """Report copies."""
    copied = [each for each in results if each.state == "copied"]
    size = bytes_text(sum(each.info.size_bytes for each in copied))
    parts = [f"{each.state:<8}{target.url}/{each.info.name}" for each in results]
    for each in results:
        parts += [f"  {each.info.name}: {each.problem}"] if each.problem else []
    return Outcome(
        fields={
            "target": target.url,
            "checkpoints": [each.fields for each in results],
            "unreadable": list(unreadable),
        },
        parts=[
            *parts,
            *(f"not copied, its marker cannot be read: {text}" for text in unreadable),
            f"{len(copied)} copied to {target.url}, {size}",
        ],
        exit_code=int(bool(unreadable) or any(each.state == "FAILED" for each in results)),
    )


def _refuse_places(
    todo: Sequence[tuple[CopySource, CheckpointInfo]], target: Storage, survey: Survey
) -> None:
    """Refuse names with a meaning elsewhere, and to join what is no checkpoint.

    The writer of the source chose its names: `.git` or `src` would be the user's own.
    """
    for selection, info in todo:
        name = info.name
        usual = parse_step_name(name) is not None or _OF_HOSTS.fullmatch(name) is not None
        if name.startswith(".") or not (usual or selection.named):
            advice = (
                "" if name.startswith(".") else f"; if it is, `ckpt cp {selection.source.url}/{name} DST`"
            )
            raise ConfigError(
                f"{selection.source.url}/{name} is not called as checkpoints are, and may mean something "
                f"else in {target.url}: nothing was copied{advice}"
            )
        there = name in {each.name for each in survey.everything}
        if target.supports_rename and not there and target.entry(name) is not None:
            raise CheckpointExistsError(
                f"{target.url}/{name} is no checkpoint, and was not touched: move it, or copy to another "
                "root; nothing was copied"
            )


def _hidden_files(source: Storage, info: CheckpointInfo) -> list[str]:
    """Return the files of others with a hidden name, such as `.git/config`."""
    paths = [entry.path for entry in Catalog(source).manifest(info.name).files]
    hidden = [path for path in paths if any(part.startswith(".") for part in path.split("/"))]
    return [path for path in hidden if "/" in path or not is_own_file(path)]


def _refuse_without_room(target: Storage, infos: Sequence[CheckpointInfo]) -> None:
    """Refuse copies that do not fit, before anything is sent."""
    free = target.free_bytes()
    if free is None or not infos:
        return
    needed = sum(max(0, info.size_bytes - _sent_bytes(target, info)) for info in infos)
    if needed > free:
        raise NoRoomError(
            f"{target.url} has {bytes_text(free)} free, and the {len(infos)} checkpoint(s) to copy need "
            f"{bytes_text(needed)}; nothing was copied: free space, or copy single checkpoints (ROOT@STEP)",
            needed_bytes=needed,
            free_bytes=free,
        )


def _sent_bytes(target: Storage, info: CheckpointInfo) -> int:
    """Return the size of what an earlier copy has left there, and this one continues."""
    working = working_name(target, info.name, info.save_id)
    entry = target.entry(working)
    if entry is None or not entry.is_directory:
        return 0
    return sum(each.size_bytes for each in target.list(working) if not each.is_directory)


def _options_of_target(arguments: Namespace) -> dict[str, Any]:
    if arguments.to_storage_option and not is_local(arguments.target):
        return storage_options(arguments.to_storage_option, "")
    return _options_of(arguments.target, arguments)


def _options_of(place: str, arguments: Namespace) -> dict[str, Any]:
    """Return the options for a place: those of the command are for its URLs."""
    return {} if is_local(place) else dict(arguments.storage_options)


def _select(place: str, arguments: Namespace) -> CopySource:
    """Find what a source names: a step or name of a root, or all of it."""
    options = _options_of(place, arguments)
    found = step_in(place)
    with suppress(ConfigError):  # a bucket has no parent; any other error is raised when it is a root
        storage, name = open_checkpoint(place, options)
        if storage.exists(f"{name}/{MARKER}"):
            return _one(storage, Catalog(storage).find(name=name), named=name)
        found = None if storage.entry(name) is not None else found
    if found is not None:
        storage = open_root(found[0], options)
        return _one(storage, Catalog(storage).find(step=found[1]))
    storage, survey = find_root(place, options)
    infos = survey.everything if arguments.all else survey.committed
    return CopySource(
        source=storage,
        infos=infos[::-1],  # the newest first
        relatives=survey.everything,
        is_run=True,
        unreadable=[f"{storage.url}/{name}: {error}" for name, error in survey.unreadable.items()],
    )


def _one(storage: Storage, info: CheckpointInfo, *, named: str = "") -> CopySource:
    """Select a checkpoint, under its own name if a link is what was named."""
    everything = Catalog(storage).survey().everything
    same = [each for each in everything if each.manifest_sha256 == info.manifest_sha256]
    own = next((each for each in same if each.name == info.name), None) or next(iter(same), info)
    return CopySource(source=storage, infos=[own], relatives=everything, named=named == own.name)


def _refuse_other_runs(selections: Sequence[CopySource], target: Storage, survey: Survey) -> None:
    """Refuse to mix runs in one root.

    The run begun last would count as the present one, and the other as abandoned.
    """
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


def _found(selection: CopySource, info: CheckpointInfo, found: CheckpointInfo, target: Storage) -> CopyResult:
    if found.damaged is not None:
        problem = (
            f"it is there, and marked as damaged ({found.damaged}): look at it with `ckpt verify`; after "
            f"`ckpt prune {target.url} --damaged` it can be copied again"
        )
        return CopyResult(info=info, source=selection.source.url, state="FAILED", problem=problem)
    _carry_marks(selection, info, found, target)
    return CopyResult(info=info, source=selection.source.url, state="there")


def _copied(
    selection: CopySource, info: CheckpointInfo, target: Storage, *, terms: CopyTerms, lease: Lease
) -> CopyResult:
    source = selection.source
    try:
        if hidden := _hidden_files(source, info):
            problem = (
                f"it has hidden files, which other programs may read: {', '.join(hidden[:_MOST_LISTED])}"
            )
            return CopyResult(info=info, source=source.url, state="FAILED", problem=problem)
        otherwise = run_name(info.name, info.lineage.id) if selection.renames and info.lineage.id else ""
        found = copy_checkpoint(source, target, info.name, terms, check=lease.check, otherwise=otherwise)
    except CorruptCheckpointError as error:
        return CopyResult(
            info=info,
            source=source.url,
            state="FAILED",
            problem=f"the source is damaged, so that nothing was committed: {error}",
            failures=error.failures,
        )
    except CheckpointNotFoundError:
        if not selection.is_run:
            raise
        return CopyResult(info=info, source=source.url, state="gone")
    _carry_marks(selection, info, found, target)
    return CopyResult(info=replace(info, name=found.name), source=source.url, state="copied")


def _carry_marks(selection: CopySource, info: CheckpointInfo, found: CheckpointInfo, target: Storage) -> None:
    """Mark what is bad, and pin what a run has pinned; damage is of one place."""
    if info.bad is not None and found.bad is None:
        Catalog(target).mark_bad(found.name, info.bad)
    if selection.is_run and info.pinned is not None and found.pinned is None:
        Catalog(target).pin(info.step, info.pinned)


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
