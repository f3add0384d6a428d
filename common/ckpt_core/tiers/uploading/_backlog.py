"""What an earlier run has committed to the root and not uploaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from ckpt_core.commit import Catalog
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.options import Upload
from ckpt_core.storage import Storage
from ckpt_core.tiers import read_tiers
from ckpt_core.tiers.uploading._due import DueRule, SaveNumber
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)


@final
class Backlog:
    """The checkpoints of a root that may still be due. Coordinator only.

    Args:
        storage: the root.
        rule: of the run.
        uploads: of the run.
    """

    def __init__(self, storage: Storage, rule: DueRule, uploads: Sequence[Upload]) -> None:
        self._catalog = Catalog(storage)
        self._rule = rule
        self._present = [info for info in self._catalog.committed() if info.usable]
        self._begun = _begun(storage)
        self._warn_of_others(storage, {upload.url for upload in uploads})

    def due(self, upload: Upload, there: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return what is due for a tier and newer than everything there, the oldest first.

        What is older was overtaken, or pruned there. Where a newer one overtakes, only the newest is due.

        Args:
            upload: the option.
            there: the checkpoints in the tier.
        """
        newest = max(map(_age, there), default=(-1, -1))
        have = {info.save_id for info in there}
        found = [
            info
            for info in self._present
            if _age(info) > newest and info.save_id not in have and self._is_due(info, upload)
        ]
        return found[-1:] if upload.when_busy == "overtake" else found

    def _warn_of_others(self, storage: Storage, urls: Collection[str]) -> None:
        """Say what is due for tiers that this run does not upload to."""
        steps: dict[str, list[str]] = {}
        for info in self._present:
            for url in sorted(url for url, name in self._begun if name == info.name and url not in urls):
                steps.setdefault(url, []).append(str(info.step))
        for url, found in steps.items():
            _logger.warning(
                "step(s) %s were due for %s, where this run uploads nothing: `ckpt upload %s --to %s --all` "
                "sends what is not there",
                ", ".join(found),
                url,
                storage.url,
                url,
            )

    def _is_due(self, info: CheckpointInfo, upload: Upload) -> bool:
        if (upload.url, info.name) in self._begun:
            return True
        try:
            annotations = self._catalog.manifest(info.name).annotations
        except CheckpointError as error:
            _logger.warning("%s is not uploaded: %s", info.name, error)
            return False
        return self._rule.is_due(info.step, SaveNumber.read(annotations), upload.every)


def _age(info: CheckpointInfo) -> tuple[int, int]:
    return info.lineage.number, info.step


def _begun(storage: Storage) -> set[tuple[str, str]]:
    """Return the uploads that were left: URL of the tier and name."""
    try:
        records = read_tiers(storage)
    except (OSError, CorruptCheckpointError, IncompatibleCheckpointError) as error:
        _logger.warning("%s: which uploads were left is not known: %s", storage.url, error)
        return set()
    return {(each.url, name) for each in records for name in each.due}
