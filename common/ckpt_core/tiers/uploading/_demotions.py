"""What makes weights of checkpoints: a process, where it can open the root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from ckpt_core.crew import give_way
from ckpt_core.options import SignManifest
from ckpt_core.root import Demoter
from ckpt_core.storage import LocalStorage, Storage, is_in_bucket
from ckpt_core.tiers import DemotionTerms, WorkProcess
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import imported

_WRITER: Final = "ckpt_core.convert:write_weights"
_SIZER: Final = "ckpt_core.convert:weights_bytes"


def demoter_of(
    storage: Storage,
    options: Mapping[str, object],
    sign: SignManifest | None = None,
    *,
    beside: bool = True,
) -> Demoter:
    """Return what makes weights in a root, with the options of its storage.

    If it works `beside` a training, it gives way to that.
    """
    own = storage.own
    write: Callable[[Storage, CheckpointInfo, str | None], None] = imported("keep", _WRITER)
    size: Callable[[Storage, CheckpointInfo, str | None], int] = imported("keep", _SIZER)
    local = isinstance(own, LocalStorage)
    terms = DemotionTerms(source=own.url, options={} if local else options, writer=_WRITER)
    # Another URL may name something of this process, such as `memory://`.
    reached = beside and (local or is_in_bucket(own.url)) and WorkProcess.can_do(terms)
    process = WorkProcess("ckpt_core.tiers._export_service:demoting", terms) if reached else None

    def draft(info: CheckpointInfo, dtype: str | None, stop: Callable[[], None]) -> None:
        if beside:
            give_way()
        if process is None:
            write(storage, info, dtype)
        else:
            process.do((info, dtype), stop)

    close = (lambda: None) if process is None else process.close
    return Demoter(storage, draft=draft, size=partial(size, storage), close=close, sign=sign)
