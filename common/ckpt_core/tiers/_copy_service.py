"""What the process of a `CopyProcess` does: it copies files of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from ckpt_core import messages
from ckpt_core.storage import Throttle, open_storage
from ckpt_core.tiers._compressing import ShareTerms, compress_share, view_again
from ckpt_core.tiers._copy import CheckpointCopy, CopyTerms


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRoute:
    """Where copies come from and go to.

    Attributes:
        source: directory of a root.
        target: directory or URL of another one.
        storage_options: of the target.
        deadline_seconds: by which the target is opened; see `open_storage`.
    """

    source: str
    target: str
    storage_options: Mapping[str, object]
    deadline_seconds: float


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTask:
    """Files of a checkpoint to copy.

    Attributes:
        source_name: of the checkpoint at the source.
        name: of the checkpoint at the target, which is prepared.
        content: of its manifest.
        paths: the files, as in the manifest.
        bytes_per_second: the cap; None for none.
        small: of a compressed copy, as `CheckpointCopy.small`.
    """

    source_name: str
    name: str
    content: bytes
    paths: Sequence[str]
    bytes_per_second: int | None
    small: Mapping[str, bytes]


CompressTask: TypeAlias = tuple[str, ShareTerms]
"""Name at the source of a checkpoint to compress, and which files, and how; the answer is `Rows`."""


def copying(route: CopyRoute) -> Callable[[CopyTask | CompressTask, Callable[[Any], None]], None]:
    """Open both places; return what copies and compresses; see `serve`."""
    source = open_storage(route.source)
    target = open_storage(route.target, route.storage_options, deadline_seconds=route.deadline_seconds)

    def copy(task: CopyTask | CompressTask, progress: Callable[[Any], None]) -> None:
        if not isinstance(task, CopyTask):
            progress(compress_share(source, target, *task, stop=lambda: None))  # what is to stop is killed
            return
        seen = view_again(source, task.source_name, task.small)
        made = CheckpointCopy(seen, target, task.source_name, task.content, as_name=task.name)
        wanted, rate = set(task.paths), task.bytes_per_second
        entries = [entry for entry in made.manifest.files if entry.path in wanted]
        made.copy_files(entries, CopyTerms(pace=None if rate is None else Throttle(rate), progress=progress))

    return copy
