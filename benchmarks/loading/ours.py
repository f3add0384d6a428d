"""ckpt-suite among the loaders, on its own checkpoints and on those of stock DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, final

from typing_extensions import override

from benchmarks.contenders import Kind, NotRunError, Tensors
from benchmarks.loading.loader import Loader, LoadTask
from benchmarks.loading.stock import write_dcp
from ckpt_core import CheckpointManager
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions

# What the words of `verify` were called when it was yes or no.
_YES_OR_NO = {"full": True, "off": False}


class _Ours(Loader):
    """`CheckpointManager.load` of a mapping; the manager is kept, as a training keeps it."""

    kind: ClassVar[Kind] = "ours"
    format: ClassVar[str] = "ours"
    verify: ClassVar[str | None] = None

    def __init__(self, task: LoadTask) -> None:
        super().__init__(task)
        self._options = options(verify=self.verify)
        self._manager: CheckpointManager | None = None

    @classmethod
    @override
    def write(cls, directory: Path, tensors: Tensors) -> None:
        with CheckpointManager(directory) as manager:
            manager.save(0, {"model": dict(tensors)})

    @override
    def prepare(self) -> None:
        super().prepare()
        self._manager = CheckpointManager(self.manager_root, options=self._options)

    @property
    def manager_root(self) -> Path:
        """The root that the manager is given."""
        return self.directory

    @override
    def load(self) -> None:
        self.manager.load({"model": dict(self.task.tensors)}, step=0)

    @property
    def manager(self) -> CheckpointManager:
        """The manager, once it has been prepared."""
        if self._manager is None:
            raise RuntimeError(f"{self.key} loads before it was prepared")
        return self._manager

    @override
    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


@final
class OursFull(_Ours):
    """Every byte of the checkpoint is verified."""

    key = "ours-full"
    name = 'ckpt-suite, verify="full"'
    verify = "full"


@final
class OursRead(_Ours):
    """Every byte that is used is verified."""

    key = "ours-read"
    name = 'ckpt-suite, verify="read"'
    verify = "read"


@final
class OursOff(_Ours):
    """Nothing is verified."""

    key = "ours-off"
    name = 'ckpt-suite, verify="off"'
    verify = "off"


@final
class OursOnStock(_Ours):
    """A directory that `dcp.save` wrote, verified by the checksums in its zips."""

    key = "ours-on-dcp"
    name = "ckpt-suite, on a dcp.save"
    format = "dcp"
    verify = "full"

    @classmethod
    @override
    def write(cls, directory: Path, tensors: Tensors) -> None:
        write_dcp(directory, tensors)

    @property
    @override
    def manager_root(self) -> Path:
        return self.task.root

    @override
    def load(self) -> None:
        self.manager.load({"model": dict(self.task.tensors)}, name=self.format)


@final
class OursReadOnce(_Ours):
    """Among ranks: what several need is read by one and passed on."""

    key = "ours-once"
    name = "ckpt-suite, read once"


@final
class OursReadOnceUnverified(_Ours):
    """The same without verification, which reads everything a second time, mostly from the page cache."""

    key = "ours-once-off"
    name = 'ckpt-suite, read once, verify="off"'
    verify = "off"


def options(*, verify: str | None) -> CheckpointOptions:
    """The options that are asked for; None is the default.

    Raises:
        NotRunError: this version of ckpt-suite does not have them.
    """
    chosen: dict[str, Any] = {}
    if verify is not None:
        chosen["verify"] = _verify_option(verify)
    return CheckpointOptions.from_mapping(chosen)


def _verify_option(verify: str) -> str | bool:
    try:
        CheckpointOptions.from_mapping({"verify": verify})
    except ConfigError as error:
        if verify not in _YES_OR_NO:
            raise NotRunError(f"this version has no verify={verify!r}") from error
        return _YES_OR_NO[verify]
    return verify
