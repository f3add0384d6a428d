"""Lightning's callback hooks, turned into calls of the session; free of either Lightning package."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ckpt_core.commit import Catalog
from ckpt_core.errors import ConfigError
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._options import Configured, Settings
from lightning_ckpt._session import Session
from lightning_ckpt._strategy import attach


class LifeCycle:
    """The hooks of a callback; a namespace module adds Lightning's own base class behind it.

    Attributes:
        trainer_type: the Trainer of that namespace.
        module_name: where its users import from.
        selected_path: what the current run of the Trainer loads; noted before `setup`.
    """

    trainer_type: ClassVar[type[Any]]
    module_name: ClassVar[str]
    selected_path: str | None = None
    _session: Session | None = None

    @abstractmethod
    def settings_for(self, trainer: Any) -> Settings | None:
        """What to do in `trainer`, or None to stay out of it."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach to the strategy, before Lightning loads anything.

        Raises:
            ConfigError: the Trainer, its strategy or its other callbacks do not go together with this.
        """
        del pl_module
        settings = self.settings_for(trainer)
        if settings is None:
            return
        self._refuse_strangers(trainer)
        if self._session is None or self._session.trainer is not trainer:
            self._session = Session(trainer, settings)
        attach(trainer.strategy, self._session)
        self._session.start(stage, self.selected_path)

    def _refuse_strangers(self, trainer: Any) -> None:
        if not isinstance(trainer, self.trainer_type):
            package = type(trainer).__module__.partition(".")[0]
            raise ConfigError(
                f"this ShardedCheckpoint was imported from {self.module_name}, but the Trainer is from the "
                f"package {package}: import it from lightning_ckpt.{package}"
            )
        active = [each for each in life_cycles(trainer) if each.settings_for(trainer) is not None]
        if len(active) > 1:
            raise ConfigError(
                "one ShardedCheckpoint or one ShardedCheckpointIO per Trainer, not several: join their "
                "policies with |, e.g. save=EverySteps(500) | OnPreemption()"
            )

    def on_train_batch_end(  # noqa: PLR0917 - Lightning's signature
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time."""
        del trainer, pl_module, outputs, batch, batch_idx
        if self._session is not None and self._session.pacing is not None:
            self._session.pacing.after_batch()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Averaging callbacks exchange the weights for a validation: let a copy in the making end first."""
        del pl_module
        if self._session is not None:
            self._session.settle()
            if self._session.pacing is not None and trainer.state.fn == "fit":
                self._session.pacing.before_validation()

    def on_validation_batch_end(  # noqa: PLR0917 - Lightning's signature
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leave the validation if a preemption was announced."""
        del pl_module, outputs, batch, batch_idx, dataloader_idx
        if self._session is not None and self._session.pacing is not None and trainer.state.fn == "fit":
            self._session.pacing.validation.after_batch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is time."""
        del pl_module
        if self._session is not None and self._session.pacing is not None and trainer.state.fn == "fit":
            self._session.pacing.after_validation()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is time; averaging callbacks may change the weights from now on."""
        del trainer, pl_module
        if self._session is not None:
            if self._session.pacing is not None:
                self._session.pacing.after_epoch()
            self._session.settle()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step."""
        del trainer, pl_module
        if self._session is not None and self._session.pacing is not None:
            self._session.pacing.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Start no save: the other ranks may be anywhere. What is in flight is waited for in teardown."""
        del trainer, pl_module
        if self._session is not None:
            self._session.failed(exception)

    @property
    def preempted(self) -> bool:
        """Whether a preemption was announced during the last fit, to whichever rank, that was to stop it."""
        return self._session is not None and self._session.preempted


class CheckpointHooks(LifeCycle, Configured):
    """The hooks of a callback with options of its own, and what Lightning asks a checkpoint callback."""

    def settings_for(self, trainer: Any) -> Settings | None:
        """The callback's own options."""
        del trainer
        return self.settings

    @property
    def best_model_path(self) -> str:
        """Path of the committed checkpoint that is best by the `KeepBest` metric; "" if there is none."""
        return path_of_best(self.settings)

    @best_model_path.setter
    def best_model_path(self, value: str) -> None:
        """Lightning's spawn launcher hands over what the ranks found; storage tells the same."""

    @property
    def best_model_score(self) -> float | None:
        """The metric of the best checkpoint."""
        best = best_of(self.settings)
        return None if best is None or self.settings.best is None else best.metrics[self.settings.best.metric]

    @property
    def last_model_path(self) -> str:
        """Path of the newest committed checkpoint; "" if there is none."""
        committed = committed_of(self.settings)
        return f"{self.settings.root}/{committed[-1].name}" if committed else ""


def life_cycles(trainer: Any) -> list[LifeCycle]:
    """Our callbacks of a Trainer."""
    return [callback for callback in trainer.callbacks if isinstance(callback, LifeCycle)]


def committed_of(settings: Settings) -> Sequence[CheckpointInfo]:
    """The committed checkpoints of the run's own root, oldest first."""
    if settings.root is None:
        return []
    return Catalog(settings.storage_at(settings.root)).committed()


def best_of(settings: Settings) -> CheckpointInfo | None:
    """The best committed checkpoint; of equals the newer, as retention has it."""
    policy = settings.best
    if policy is None:
        return None
    committed = committed_of(settings)
    steps = policy.keep(committed, 0.0)
    sign = 1 if policy.mode == "min" else -1
    # Of one step there may be several, of which some were saved before the metric was measured.
    ranked = [info for info in committed if info.step in steps and policy.metric in info.metrics]
    return min(ranked, key=lambda info: (sign * info.metrics[policy.metric], -info.step), default=None)


def path_of_best(settings: Settings) -> str:
    """Path of the best committed checkpoint, or ""."""
    best = best_of(settings)
    return "" if best is None else f"{settings.root}/{best.name}"
