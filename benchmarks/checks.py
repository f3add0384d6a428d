"""What it costs to check at a save that it can be loaded, and that ranks do not differ.

`python -m benchmarks.checks --tensors 1000`. First saves are of a fresh manager into a fresh root each; later
ones of the same manager. With and without the checks by turns, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias, final
from unittest import mock

import torch
from torch import nn

from ckpt_core import CheckpointManager, TrainState

_TENSORS_PER_PARAMETER: Final = 3
"""The parameter, and what AdamW keeps of it; its step count is a fourth, of four bytes."""
_LATER_SAVES: Final = 20

Sample: TypeAlias = tuple[float, float, float]
_NOTHING: Final[Callable[..., None]] = lambda *_, **__: None  # noqa: E731 - stands for any function
CHECKS: Final[Sequence[tuple[str, str, Callable[..., Any]]]] = (
    ("ckpt_core.dcp._leaves", "is_expanded", _NOTHING),
    ("ckpt_core.saving._reports", "_check_loadable", _NOTHING),
    ("ckpt_core.saving._checks", "LoadNotes.log", _NOTHING),
    ("ckpt_core.state._optimizer", "packed_state", lambda _, inner: inner.state_dict()),
)
"""Module, name and stand-in of each check: there is no option that leaves them out."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Medians in milliseconds.

    Attributes:
        stall_ms: until `save` returned.
        durable_ms: until the checkpoint was committed.
        cpu_ms: of all threads meanwhile, which a busy machine disturbs least.
    """

    stall_ms: float
    durable_ms: float
    cpu_ms: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Cost:
        """The medians of what was measured in seconds."""
        stall, durable, cpu = (1e3 * statistics.median(each) for each in zip(*samples, strict=True))
        return cls(stall_ms=stall, durable_ms=durable, cpu_ms=cpu)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Saves with the checks and without."""

    checked: Cost
    unchecked: Cost

    @property
    def stall_difference_ms(self) -> float:
        """What the checks add to the stall."""
        return self.checked.stall_ms - self.unchecked.stall_ms

    @property
    def share(self) -> float:
        """What the checks add to a save, in parts of the whole."""
        return self.checked.durable_ms / self.unchecked.durable_ms - 1


@contextmanager
def unchecked() -> Generator[None]:
    """Leave every check out."""
    patches = []
    for module, path, stand_in in CHECKS:
        owner: Any = import_module(module)
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        patches.append(mock.patch.object(owner, name, stand_in))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def checked() -> Generator[None]:
    """Leave everything as it is."""
    yield


def training_state(tensors: int, width: int) -> TrainState:
    """A model and AdamW after one step, with about so many tensors."""
    model = nn.ParameterList(torch.randn(width) for _ in range(max(1, tensors // _TENSORS_PER_PARAMETER)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


def timed_save(checkpoints: CheckpointManager, step: int, state: TrainState) -> Sample:
    """Seconds until the save returned and until it was committed, and of CPU."""
    cpu, start = time.process_time(), time.perf_counter()
    checkpoints.save(step, state)
    stalled = time.perf_counter()
    checkpoints.wait()
    return stalled - start, time.perf_counter() - start, time.process_time() - cpu


def measure(state: TrainState, root: Path, rounds: int) -> dict[str, Comparison]:
    """First saves and later ones, with the checks and without by turns."""
    modes = {"checked": checked, "unchecked": unchecked}
    samples: dict[str, dict[str, list[Sample]]] = {
        kind: {mode: [] for mode in modes} for kind in ("first", "later")
    }
    for number in range(-1, rounds):  # the first round warms up
        order = list(modes.items())
        for mode, switch in order if number % 2 else reversed(order):
            with switch(), CheckpointManager(root / f"{mode}-{number}") as checkpoints:
                first = timed_save(checkpoints, 0, state)
                later = [timed_save(checkpoints, step, state) for step in range(1, _LATER_SAVES + 1)]
            if number >= 0:
                samples["first"][mode].append(first)
                samples["later"][mode] += later
    return {
        kind: Comparison(**{mode: Cost.of(found) for mode, found in of_kind.items()})
        for kind, of_kind in samples.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=__doc__)
    parser.add_argument("--tensors", type=int, default=1000, help="about so many (default 1000)")
    parser.add_argument("--width", type=int, default=4096, help="elements of each (default 4096)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    parser.add_argument(
        "--root", type=Path, help="directory on the disk to measure (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, help="write what was measured there")
    options = parser.parse_args(arguments)
    state = training_state(options.tensors, options.width)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.root) as directory:
        found = measure(state, Path(directory), options.rounds)
    for kind, comparison in found.items():
        print(
            f"{kind} save, {options.tensors} tensors: durable {comparison.checked.durable_ms:.1f} ms, "
            f"{comparison.unchecked.durable_ms:.1f} unchecked ({comparison.share:+.1%}); "
            f"stall {comparison.checked.stall_ms:.2f} ms ({comparison.stall_difference_ms:+.2f} ms); "
            f"CPU {comparison.checked.cpu_ms:.1f} ms "
            f"({comparison.checked.cpu_ms - comparison.unchecked.cpu_ms:+.2f} ms)"
        )
    if options.json:
        content = {kind: asdict(comparison) for kind, comparison in found.items()}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
