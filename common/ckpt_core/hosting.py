"""What every host needs: one rule for paths, managers by root, a close at exit.

The adapters and the command line share it, so that a path means the same checkpoint in each of them.
"""

from __future__ import annotations

import atexit
import os
import re
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, final

from ckpt_core.commit import Occupant, content_of
from ckpt_core.disclosure import logger_of, public_url
from ckpt_core.errors import CheckpointError, ConfigError
from ckpt_core.messages import message
from ckpt_core.names import is_incomplete, is_trash
from ckpt_core.policies import RetentionPolicy, leaves
from ckpt_core.retention import KeepBest
from ckpt_core.storage import Storage, open_storage
from ckpt_core.validation import location, require

if TYPE_CHECKING:  # the command line runs without torch
    from ckpt_core.coordination import Coordinator
    from ckpt_core.manager import CheckpointManager

T = TypeVar("T")

_ATTACHED: Final = "_ckpt_suite"
_MOST_DIGITS: Final = 18
_LOCAL_URL: Final = re.compile(r"(?:file|local)://(?P<path>.*)", re.DOTALL)
_logger = logger_of(__name__)


def root_of(path: str | os.PathLike[str]) -> str:
    """Return the one spelling of a root, in whatever way it was written.

    A local path, also as `file://…`, becomes absolute; `~` is expanded and every symbolic link is resolved. A
    URL of an object store loses its trailing slashes. Two spellings of one directory must be one root: a
    second manager would be refused its lock, and lineage and removal go by the root. It is resolved when it
    is given, so that neither a `chdir` nor a link that is changed later splits a run. Errors as by
    `open_storage`.
    """
    text = _without_local_scheme(path)
    scheme, separator, rest = text.partition("://")
    return f"{scheme}://{rest.rstrip('/')}" if separator else os.path.realpath(open_storage(text).url)


def number_in(text: str) -> int | None:
    """Return the number that digits from 0 to 9 write; None for other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def step_in(place: str) -> tuple[str, int] | None:
    """Split ROOT@STEP into root and step; None for any other place."""
    root, _, text = place.rpartition("@")
    step = number_in(text)
    return None if not root or step is None else (root, step)


@final
@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A checkpoint as root and name, in the spelling that all hosts share.

    The directory that it is in is spelled by `root_of`. Its own name is taken as written: a symbolic link of
    that name, such as `latest`, is followed by loads, within the root, and by no save. The name is "" for the
    root as a whole.
    """

    root: str
    name: str = ""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self:
        """Split the path or URL of a checkpoint; ConfigError if it can only be a root."""
        require("the path of a checkpoint", location("it", path))
        text = os.path.expanduser(_without_local_scheme(path)).rstrip("/")  # noqa: PTH111 - may be a URL
        if text.rpartition("/")[2] in {".", ".."}:  # not names
            text = root_of(text)
        parent, slash, name = text.rpartition("/")
        if not name or ("://" in text and not parent.partition("://")[2]):
            raise ConfigError(
                f"{public_url(os.fspath(path))} can only be a root: a checkpoint is a directory below one"
            )
        return cls(root_of(parent or slash or "."), name)

    def __str__(self) -> str:
        separator = "" if not self.name or self.root.endswith("/") else "/"
        return f"{self.root}{separator}{self.name}"


@final
@dataclass(frozen=True, slots=True, repr=False)  # a URL may hold credentials
class RunRoot:
    """The root of a host, spelled by `root_of`; the storage, if it was given as one."""

    path: str
    storage: Storage | None = None

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Storage) -> Self:
        """Resolve what a user gave as the root; ConfigError if it cannot be one."""
        return cls(root_of(given.url), given) if isinstance(given, Storage) else cls(root_of(given))

    def opens(self, root: str) -> str | Storage:
        """Return what to open for a root: the storage that was given, or the root itself."""
        return self.storage if self.storage is not None and root == self.path else root


message(Occupant)


def kind_of(storage: Storage, name: str) -> Occupant:
    """Return the kind of a directory of a root, as hosts tell them apart.

    A damaged marker makes a checkpoint, too; files of the user's alone are nothing.

    NotADirectoryError if it is a file.
    """
    found = Occupant.TORN if is_incomplete(name) or is_trash(name) else content_of(storage, name)
    return {Occupant.UNREADABLE: Occupant.COMMITTED, Occupant.FILES: Occupant.NOTHING}.get(found, found)


def is_torn(storage: Storage, name: str) -> bool:
    """Return whether a directory of a root is left of a save that was interrupted."""
    return kind_of(storage, name) is Occupant.TORN


class ManagersByRoot:
    """Opens one manager for each root in use, all with one coordinator.

    `origin` is the manager that has loaded the whole live state. Main thread; making a manager and closing
    are collective.
    """

    def __init__(
        self,
        make: Callable[[str, Coordinator], CheckpointManager],
        *,
        deadline_seconds: float,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._make = make
        self._deadline_seconds = deadline_seconds
        self._managers: dict[str, CheckpointManager] = {}
        self._coordinator = coordinator
        self.origin: CheckpointManager | None = None

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the job; a new one after `close`."""
        if self._coordinator is None:
            from ckpt_core.coordination import coordinator_for_job

            self._coordinator = coordinator_for_job(deadline_seconds=self._deadline_seconds)
        return self._coordinator

    def at(self, root: str) -> CheckpointManager:
        """Return the manager of a root, spelled as by `root_of`; make it at its first use."""
        if root not in self._managers:
            self._managers[root] = self._make(root, self.coordinator)
            if self.origin is not None:
                self._managers[root].begin_from(self.origin)
        return self._managers[root]

    def get(self, root: str) -> CheckpointManager | None:
        """Return the manager of a root that is in use."""
        return self._managers.get(root)

    def loaded(self, manager: CheckpointManager) -> None:
        """Note that the whole live state was loaded by one of the managers.

        The next save into another root names what was loaded as its parent.
        """
        self.origin = manager
        for other in self._managers.values():
            if other is not manager:
                other.begin_from(manager)

    def once(self, decide: Callable[[], T]) -> T:
        """Return on every rank what the coordinator alone decides; collective."""
        return self.coordinator.run_on_coordinator(decide)

    @property
    def preempted(self) -> bool:
        """Whether a preemption that stops training was announced to any rank."""
        return any(manager.preempted for manager in self)

    @property
    def roots(self) -> list[str]:
        """The roots in use."""
        return list(self._managers)

    def __iter__(self) -> Iterator[CheckpointManager]:
        return iter(self._managers.values())

    def wait(self, *, but: CheckpointManager | None = None) -> None:
        """Wait for every save in flight, but for those of one manager.

        Before that saves: the coordinator's background channel serves one save at a time. It also bounds the
        memory of copies.

        Raises:
            SaveError: one failed.
        """
        for manager in self:
            if manager is not but:
                manager.wait()

    def close_managers(self, *, wait_for_uploads: bool = True) -> None:
        """Close every manager, even if one fails; see `CheckpointManager.close`."""
        managers, self._managers, self.origin = self._managers, {}, None
        with ExitStack() as closing:
            for manager in managers.values():
                closing.callback(manager.close, wait_for_uploads=wait_for_uploads)

    def close(self, *, farewell: bool = True) -> None:
        """Close every manager and the coordinator, also if a save failed; may be repeated.

        With `farewell` the other ranks close, too, so that the coordinator, and uploads, may be waited for.
        """
        coordinator, self._coordinator = self._coordinator, None
        with ExitStack() as closing:
            if coordinator is not None and farewell:
                closing.callback(coordinator.close)
            self.close_managers(wait_for_uploads=farewell)


def close_at_exit(closable: Any) -> None:
    """Close something when the interpreter exits, if it is alive then.

    For scripts that end without closing it: their saves have ended by then, but the roots are still claimed.
    A failure is logged.
    """
    reference = weakref.ref(closable)

    def close() -> None:
        try:
            if (alive := reference()) is not None:
                alive.close()
        except CheckpointError as error:
            _logger.error("%s", error)  # noqa: TRY400 - the message is all there is to say

    atexit.register(close)


def by_number(optimizers: Iterable[T]) -> dict[str, T]:
    """Return what belongs to optimizers under their names in a checkpoint."""
    found = list(optimizers)
    return {"" if len(found) == 1 else str(number): each for number, each in enumerate(found)}


def ranking(policy: RetentionPolicy | None) -> list[KeepBest]:
    """Return the policies that rank checkpoints by a metric."""
    return [each for each in leaves(policy) if isinstance(each, KeepBest)]


@final
class Shadow:
    """A method of ours on a host's object, whose copies have the host's own again.

    `stock` is what the object itself had of that name; None if only its class has it.
    """

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        update_wrapper(self, call)
        self.stock = vars(owner).get(name)
        self._owner, self._name, self._call = weakref.ref(owner), name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ours."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A bound method pickles like this; what `stock` is may not.
        return (getattr, (self._owner(), self._name)) if self.stock is None else (partial, (self.stock,))


def shadow(owner: object, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Put methods of ours, by name, on a host's object."""
    vars(owner).update({name: Shadow(owner, name, call) for name, call in methods.items()})


@final
class _Attached:
    """What is attached to a host's object. Copies of that are stock's."""

    def __init__(self, ours: Any, names: Iterable[str]) -> None:
        self.ours, self.names = ours, tuple(names)

    def __reduce__(self) -> Any:
        return type(None), ()


def attach(owner: object, ours: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Replace methods of a host's object by ours, until `detach`; close ours at exit."""
    shadow(owner, methods)
    vars(owner)[_ATTACHED] = _Attached(ours, methods)
    close_at_exit(ours)


def attached_to(owner: object) -> Any:
    """Return what was attached to a host's object, or None."""
    found: _Attached | None = vars(owner).get(_ATTACHED)
    return None if found is None else found.ours


def detach(owner: object) -> Any:
    """Give a host's object its own methods back; return what was attached, or None."""
    found: _Attached | None = vars(owner).pop(_ATTACHED, None)
    if found is None:
        return None
    for name in found.names:
        ours = vars(owner).pop(name, None)
        if isinstance(ours, Shadow) and ours.stock is not None:
            vars(owner)[name] = ours.stock
    return found.ours


@contextmanager
def replaced(owner: object, **values: Any) -> Generator[None]:
    """Replace attributes of an object for a while, also those that its class has."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)


def _without_local_scheme(path: str | os.PathLike[str]) -> str:
    """Return a local path, also of `file://…`, or the URL of an object store."""
    text = os.fspath(path)
    local = _LOCAL_URL.fullmatch(text)
    return text if local is None else local["path"]
