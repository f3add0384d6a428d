"""What training changes besides weights and counters: metrics and switches.

Lightning saves none of it. Its own restart begins an epoch's means with the batches after the save, without
the metrics from before it, and with every parameter and accumulation window as the script has set them up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import torch

from ckpt_core.disclosure import logger_of
from ckpt_core.state import rng_state
from lightning_ckpt.loops._evaluation import Measured
from lightning_ckpt.loops._held import HeldGradients
from lightning_ckpt.loops._steps import BETWEEN, Following, TrainingLoops

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


def capture_metrics(trainer: Any, *, first_batch: bool | None) -> dict[str, Any]:
    """Return the metrics of callbacks, and the running means of the epoch.

    Args:
        trainer: the Trainer.
        first_batch: whether the last batch was the first, if a validation runs, which forgets it.
    """
    connector, module = trainer._logger_connector, trainer.lightning_module
    results = trainer.fit_loop.epoch_loop._results
    return {
        "callback": {name: _plain(value) for name, value in trainer.callback_metrics.items()},
        "results": {key: entry for key, each in results.items() if (entry := _of_result(each)) is not None},
        "metrics": {name: _of_metric(each) for name, each in _metrics(module) if _is_storable(name, each)},
        "hook": connector._current_fx,
        "first_batch": first_batch if trainer.validating else connector._first_loop_iter,
    }


def load_metrics(trainer: Any, saved: Mapping[str, Any], *, same_ranks: bool) -> None:
    """Load the metrics; running means only on as many ranks as saved them."""
    connector, module = trainer._logger_connector, trainer.lightning_module
    connector._callback_metrics.update(_moved(saved["callback"], module.device))
    if not same_ranks:
        return
    metrics = dict(_metrics(module))
    for name, state in saved["metrics"].items():
        if name in metrics:
            _load_metric(metrics[name], _moved(state, metrics[name].device))
    results = trainer.fit_loop.epoch_loop._results
    for key, entry in saved["results"].items():
        if entry["tensor"] or entry["names"]["metric_attribute"] in metrics:
            results[key] = _as_result(results, trainer, entry, metrics)
    connector._current_fx, connector._first_loop_iter = saved["hook"], saved["first_batch"]


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics of a module by name."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        yield from ((name, each) for name, each in module.named_modules() if _is_metric(each, torchmetrics))


def _is_metric(module: Any, torchmetrics: Any) -> bool:
    return isinstance(module, torchmetrics.Metric)


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


_warned: set[str] = set()


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


def _load_metric(metric: Any, state: Mapping[str, Any]) -> None:
    for name in (*metric._defaults, *_COUNTS):
        if name in state:
            setattr(metric, name, state[name])


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

    Concurrency: the thread that trains.
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
        """Change the same."""
        module = self._trainer.lightning_module
        holders: dict[str, Any] = {**dict(module.named_modules()), **dict(module.named_parameters())}
        for name, switch, value in changed["flags"]:
            if hasattr(holders.get(name), switch):
                setattr(holders[name], switch, value)
        self._trainer.accumulate_grad_batches = changed.get("window", self._trainer.accumulate_grad_batches)

    def _present(self) -> Iterator[tuple[tuple[str, str], bool]]:
        module = self._trainer.lightning_module
        # In a validation Lightning has all modules in evaluation mode, and remembers their own.
        validation = self._trainer.fit_loop.epoch_loop.val_loop
        modes = validation._module_mode.mode if self._trainer.validating else {}
        for name, each in module.named_modules():
            for switch in _SWITCHES:
                if (value := getattr(each, switch, None)) is not None:
                    yield (name, switch), bool(modes.get(name, value) if switch == "training" else value)
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
class Running:
    """What a save adds to Lightning's dictionary, and a resume takes from it.

    Concurrency: the thread that trains.

    Attributes:
        loops: of the Trainer, for the position of a save.
        measured: the metrics, by the step at which they were measured.
        held: tells which gradients wait for a step.
        repeats_validation: whether the validation that ends now was cut short: a resume repeats it.
        left: whether training is left after the save, because of a preemption.
        untold: the kinds of loaders that were named for hiding their position.
        tokens: tokens trained on, of all ranks together.
    """

    def __init__(self, trainer: Any) -> None:
        self.loops = TrainingLoops(trainer)
        self.measured = Measured()
        self.held = HeldGradients(self.loops)
        self.loops.before_validation = self._remember
        self.repeats_validation = self.left = False
        self.untold: set[str] = set()
        self.tokens = 0
        self._told: set[str | None] = set()
        self._trainer = trainer
        self._switches: Switches | None = None
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None

    def resume(self, saved: Mapping[str, Any], *, ended_epoch: bool) -> None:
        """Continue with what followed a save; perhaps nothing, as training was to end."""
        following, left = Following(saved["following"]), bool(saved.get("left"))
        self.loops.resume(following, ended_epoch=ended_epoch, left=left)
        deciding = saved.get("stops")
        # Without the callback that has decided it, the script is to train on.
        if deciding is None or not {each.state_key for each in self._trainer.callbacks}.issuperset(deciding):
            return
        self._trainer.should_stop = True
        if self._trainer.is_global_zero:
            _logger.warning(
                "this training had decided to end at the saved step, by early stopping or another use of "
                "trainer.should_stop: the decision holds. To train on, leave out the callback that made it, "
                "or give the Trainer min_epochs= or min_steps="
            )

    def begin(self, saved: Mapping[str, Any] | None, *, same_ranks: bool) -> None:
        """Begin training, if `saved` is given from there."""
        self._switches = Switches(self._trainer)
        self.held.begin()
        if saved is None:
            return
        self._switches.load(saved["switches"])
        load_metrics(self._trainer, saved["metrics"], same_ranks=same_ranks)
        self.measured.resume(saved["measured"], self._trainer._logger_connector._callback_metrics)
        self.tokens = saved.get("tokens", 0)
        self.loops.catch_up()
        if Following(saved["following"]) not in {Following.EPOCH, Following.EPOCH_UPDATE}:
            _set_up_averaging(self._trainer)

    def tell_of_moment(self) -> None:
        """Warn, once for each hook, of a save in it that cannot be resumed exactly."""
        loops, hook = self.loops, self.loops.hook
        if hook in BETWEEN or (loops.following is not None and not loops.holds_batch):
            return
        what = "what Lightning has still to do there is not made up for"
        if loops.at_batch_start and loops.in_hand:
            return
        if batches := loops.in_hand:
            what = f"the last {batches} batch(es) are trained on and logged again, with new random numbers"
        elif loops.holds_batch:
            what = "its loader cannot draw the batch in hand again, which is never trained on"
        if self._switches is not None and hook not in self._told and self._trainer.is_global_zero:
            self._told.add(hook)
            _logger.warning(
                "trainer.save_checkpoint() in %s: after a resume from it %s. Exact are on_train_batch_end, "
                "on_validation_end, on_train_epoch_end, and what save= saves between steps",
                hook, what,
            )  # fmt: skip

    def _remember(self) -> None:
        """Remember the present as what a save in the coming validation goes back to."""
        self._before = rng_state(), self._capture_metrics()

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

    def _capture_metrics(self) -> dict[str, Any]:
        return capture_metrics(self._trainer, first_batch=self.loops.first_batch)

    def capture(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the state, None where it could not be resumed, and the generators."""
        following = Following.VALIDATION if self.repeats_validation else self.loops.following
        again = following is Following.VALIDATION and self._trainer.validating
        rng, metrics = self._before if again and self._before else (rng_state(), {})
        if following is None or self._switches is None:
            return None, rng
        state = {
            "following": following.value,
            "left": self.left,
            "stops": self._deciding(),
            "switches": self._switches.changed(),
            "metrics": metrics or self._capture_metrics(),
            "measured": dict(self.measured.steps),
            "tokens": self.tokens,
        }
        return state, rng
