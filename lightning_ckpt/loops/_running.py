"""What training changes besides weights: metrics, switches, held gradients.

Lightning saves none of it. Its own restart begins an epoch's means with the batches after the save, without
the metrics from before it, and with every parameter and accumulation window as the script has set them up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, final
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_core.disclosure import logger_of
from ckpt_core.state import unwrap_optimizer
from lightning_ckpt.loops._measured import Measured
from lightning_ckpt.loops._steps import Following, TrainingLoops

_SWITCHES: Final = ("training", "track_running_stats")
_TRAINABLE: Final = "requires_grad"
_COUNTS: Final = ("_update_count", "_computed", "_forward_cache")
_OPTIONS: Final = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_NAMES: Final = ("fx", "name", "dataloader_idx", "metric_attribute")
_REDUCTIONS: Final = {
    f"{each.__module__ or 'torch'}.{each.__name__}": each
    for each in (torch.mean, torch.sum, torch.min, torch.max, sum, min, max)
}
_MOST_BYTES: Final = 8 << 20

_logger = logger_of(__name__)
_warned: Final = set[str]()


def _capture_metrics(trainer: Any, following: Following | None) -> dict[str, Any]:
    connector = trainer._logger_connector
    found = {"callback": {name: _plain(value) for name, value in trainer.callback_metrics.items()}}
    if following is None:
        return found
    results, module = trainer.fit_loop.epoch_loop._results, trainer.lightning_module
    return {
        **found,
        "results": {key: entry for key, each in results.items() if (entry := _of_result(each)) is not None},
        "metrics": {name: _of_metric(each) for name, each in _metrics(module) if _is_storable(name, each)},
        "hook": connector._current_fx,
        "first_batch": connector._first_loop_iter,
    }


def _load_metrics(trainer: Any, saved: Mapping[str, Any], *, same_ranks: bool) -> None:
    connector, module = trainer._logger_connector, trainer.lightning_module
    connector._callback_metrics.update(_moved(saved["callback"], module.device))
    if not same_ranks or "results" not in saved:
        return
    metrics = dict(_metrics(module))
    for name, state in saved["metrics"].items():
        if name in metrics:
            for key, value in _moved(state, metrics[name].device).items():
                setattr(metrics[name], key, value)
    results = trainer.fit_loop.epoch_loop._results
    for key, entry in saved["results"].items():
        if entry["tensor"] or entry["names"]["metric_attribute"] in metrics:
            results[key] = _as_result(results, trainer, entry, metrics)
    connector._current_fx, connector._first_loop_iter = saved["hook"], saved["first_batch"]


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics of a module by name."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        yield from (
            (name, each) for name, each in module.named_modules() if isinstance(each, torchmetrics.Metric)
        )


def _is_storable(name: str, metric: Any) -> bool:
    """Return whether the state of a metric is plain and small; warn once if not."""
    state = [getattr(metric, each) for each in (*metric._defaults, *_COUNTS)]
    size = _plain_bytes(state)
    if size is not None and size <= _MOST_BYTES:
        return True
    if name not in _warned:
        _warned.add(name)
        why = "is not plain" if size is None else f"has {size >> 20} MiB"
        _logger.warning(
            "the state of metric %s %s and is not saved: after a resume in the middle of an epoch its value "
            "covers the batches after the save only",
            name, why,
        )  # fmt: skip
    return False


def _plain_bytes(value: Any) -> int | None:
    """Return the bytes of the tensors in a plain value; None if it is not plain."""
    if isinstance(value, list | tuple | dict):
        sizes = [_plain_bytes(each) for each in (value.values() if isinstance(value, dict) else value)]
        return None if None in sizes else sum(size or 0 for size in sizes)
    if type(value) in {torch.Tensor, torch.nn.Parameter}:
        return int(value.nbytes)
    return 0 if value is None or isinstance(value, bool | int | float | str) else None


def _of_metric(metric: Any) -> dict[str, Any]:
    return {name: _plain(getattr(metric, name)) for name in (*metric._defaults, *_COUNTS)}


def _of_result(result: Any) -> dict[str, Any] | None:
    """Return one running mean, or None if it cannot be stored.

    A metric that some ranks share has a group of processes, which is of this process only.
    """
    meta = result.meta
    names = (*_COUNTS, *result._defaults) if result.is_tensor else _COUNTS
    state = {name: _plain(getattr(result, name)) for name in names}
    if meta.sync.group is not None or _plain_bytes(state) is None:
        return None
    return {
        "tensor": result.is_tensor,
        "reset": result.has_reset,
        "state": state,
        "names": {name: getattr(meta, name) for name in _NAMES},
        "options": {name: getattr(meta, name) for name in _OPTIONS},
        "reduce": next(name for name, each in _REDUCTIONS.items() if each is meta.reduce_fx),
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
    }


def _as_result(results: Any, trainer: Any, entry: Mapping[str, Any], metrics: Mapping[str, Any]) -> Any:
    """Make a running mean as `LightningModule.log` makes it at its first call."""
    lightning = sys.modules[type(results).__module__]
    meta = lightning._Metadata(**entry["names"], **entry["options"], reduce_fx=_REDUCTIONS[entry["reduce"]])
    meta.sync = lightning._Sync(fn=trainer.strategy.reduce, **entry["sync"])
    result = lightning._ResultMetric(meta, entry["tensor"])
    result.to(trainer.lightning_module.device)
    for name, value in _moved(entry["state"], trainer.lightning_module.device).items():
        setattr(result, name, value)
    if not entry["tensor"]:
        result.value = metrics[entry["names"]["metric_attribute"]]
    result.has_reset = entry["reset"]
    return result


def _plain(value: Any) -> Any:
    """Copy tensors, which may be part of a graph or be changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return {key: _moved(each, device) for key, each in value.items()} if isinstance(value, dict) else value


@final
class Switches:
    """What hooks have changed of a model and a Trainer since the fit was set up.

    Callbacks unfreeze layers and widen accumulation windows in hooks of an epoch's start, which a resume
    within the epoch does not call. What the script sets up itself is its own to change between two runs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._window = trainer.accumulate_grad_batches
        self._initial = dict(self._present())

    def changed(self) -> dict[str, Any]:
        """Return what differs now from the beginning."""
        flags = [
            [*key, value] for key, value in self._present() if self._initial.get(key, not value) is not value
        ]
        window = self._trainer.accumulate_grad_batches
        return {"flags": flags} | ({} if window == self._window else {"window": window})

    def load(self, changed: Mapping[str, Any]) -> None:
        module = self._trainer.lightning_module
        holders: dict[str, Any] = {**dict(module.named_modules()), **dict(module.named_parameters())}
        for name, switch, value in changed["flags"]:
            if hasattr(holders.get(name), switch):
                setattr(holders[name], switch, value)
        self._trainer.accumulate_grad_batches = changed.get("window", self._trainer.accumulate_grad_batches)

    def _present(self) -> Iterator[tuple[tuple[str, str], bool]]:
        module = self._trainer.lightning_module
        for name, each in module.named_modules():
            for switch in _SWITCHES:
                if (value := getattr(each, switch, None)) is not None:
                    yield (name, switch), bool(value)
        for name, each in module.named_parameters():
            yield (name, _TRAINABLE), each.requires_grad


def _set_up_averaging(trainer: Any) -> None:
    """Have `StochasticWeightAveraging` make its scheduler within an epoch.

    It does so at the start of an epoch, where it finds its state loaded and this epoch averaged already.
    """
    for callback in trainer.callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "StochasticWeightAveraging" not in names or callback._scheduler_state is None:
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            groups = trainer.optimizers[0].param_groups
            saved = [dict(group) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, values in zip(groups, saved, strict=True):
                group.update(values)  # a new scheduler begins with a step of its own


@final
class HeldGradients:
    """Tells gradients that a later step of the script's will use from used ones.

    Each optimizer has a window of its own, which may last over several batches; what a step has used stays in
    memory until it is zeroed.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._used: dict[Optimizer, list[tuple[ref[Tensor], int]]] = {}
        self._hooks: list[Any] = []

    @property
    def _optimizers(self) -> list[Any]:
        """Those that the script steps; none in automatic optimization."""
        by_script = not self._trainer.lightning_module.automatic_optimization
        return [unwrap_optimizer(each) for each in self._trainer.strategy.optimizers if by_script]

    def begin(self) -> None:
        """Watch the steps that the script makes."""
        watched = [each for each in self._optimizers if isinstance(each, Optimizer)]
        self._hooks = [each.register_step_post_hook(self._note) for each in watched]

    def release(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def holders(self) -> list[Any]:
        """Return the optimizers whose gradients are to be saved; collective."""
        on_any_rank = self._trainer.strategy.reduce_boolean_decision
        return [each for each in self._optimizers if on_any_rank(self._holds(each), all=False)]

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self._used[optimizer] = [(ref(grad), grad._version) for grad in _gradients(optimizer)]

    def _holds(self, optimizer: Optimizer) -> bool:
        noted = self._used.get(optimizer, ())
        used = {id(grad): version for each, version in noted if (grad := each()) is not None}
        new = (grad for grad in _gradients(optimizer) if used.get(id(grad)) != grad._version)
        return any(bool(grad.any()) for grad in new)


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (each.grad for each in group["params"] if each.grad is not None)


@final
class Running:
    """What a save adds to Lightning's dictionary, and a resume takes from it.

    Concurrency: the thread that trains.

    Attributes:
        loops: of the Trainer, for the position of a save.
        measured: the metrics, by the step at which they were measured.
        left: whether training is left after the save, because of a preemption.
        untold: the kinds of loaders that were named for hiding their position.
        tokens: tokens trained on, of all ranks together.
    """

    def __init__(self, trainer: Any) -> None:
        self.loops = TrainingLoops(trainer)
        self.measured = Measured()
        self.left = False
        self.untold: set[str] = set()
        self.tokens = 0
        self._held = HeldGradients(trainer)
        self._trainer = trainer
        self._switches: Switches | None = None

    def resume(self, saved: Mapping[str, Any], *, ended_epoch: bool) -> None:
        """Continue with what followed a save; perhaps nothing, as training was to end."""
        deciding = saved["stops"]
        # Without the callback that has decided it, the script is to train on.
        present = {each.state_key for each in self._trainer.callbacks}
        stops = deciding is not None and present.issuperset(deciding)
        if saved["following"] is not None:
            following, validates = Following(saved["following"]), bool(saved["validates"])
            left = stops or bool(saved["left"])
            self.loops.resume(following, ended_epoch=ended_epoch, left=left, validates=validates)
        elif ended_epoch:
            self.loops.hold_iterators()
        if not stops:
            return
        self._trainer.should_stop = True
        if self._trainer.is_global_zero:
            _logger.warning(
                "this training had decided to end at the saved step, by early stopping or another use of "
                "trainer.should_stop: the decision holds. To train on, leave out the callback that made it, "
                "or give the Trainer min_epochs= or min_steps="
            )

    def begin(self, saved: Mapping[str, Any] | None, *, same_ranks: bool) -> None:
        self._switches = Switches(self._trainer)
        self._held.begin()
        if saved is None:
            return
        if saved["switches"] is not None:
            self._switches.load(saved["switches"])
        _load_metrics(self._trainer, saved["metrics"], same_ranks=same_ranks)
        self.measured.resume(saved["measured"], self._trainer._logger_connector._callback_metrics)
        self.tokens = saved["tokens"]
        if saved["following"] == Following.BATCH:
            _set_up_averaging(self._trainer)

    def _deciding(self) -> list[str] | None:
        """Return the callbacks that may have decided to end training; None if nothing has.

        Not a `Timer`, which looks again at the start of each fit, and may have been given more time.
        """
        found = {each: {cls.__name__ for cls in type(each).__mro__} for each in self._trainer.callbacks}
        remaining = [each.time_remaining() for each, names in found.items() if "Timer" in names]
        late = any(seconds is not None and seconds <= 0 for seconds in remaining)
        if late or not self.loops.stops:
            return None
        return [each.state_key for each, names in found.items() if "EarlyStopping" in names]

    def holders(self) -> list[Any]:
        """Return the optimizers whose gradients are to be saved, the same on every rank."""
        return [] if self.loops.following is None else self._held.holders()

    def capture(self) -> dict[str, Any] | None:
        """Return the state; None before training has begun."""
        if self._switches is None:
            return None
        following = self.loops.following
        return {
            "following": None if following is None else following.value,
            "validates": self.loops.validation_is_due,
            "left": self.left,
            "stops": self._deciding(),
            # In a validation, for one, Lightning has all modules in evaluation mode.
            "switches": None if following is None else self._switches.changed(),
            "metrics": _capture_metrics(self._trainer, following),
            "measured": dict(self.measured.steps),
            "tokens": self.tokens,
        }

    def release(self) -> None:
        self._held.release()
        self.loops.release()
