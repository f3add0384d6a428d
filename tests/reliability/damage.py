"""How much damage is found: every kind of it, at random places of every file, and what a load makes of it.

A load must either refuse the checkpoint, with everything live as it was, or bring exactly what was saved.
Anything else is a problem: the table says how often which damage was found, or was harmless.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointError, CheckpointManager, Counters, TrainState
from tests.reliability.outcome import Choice, Outcome

TRIALS: Final = 10_000
STEP: Final = 1
OURS: Final = f"step-{STEP:09d}"
STOCK: Final = "stock"
FOUND: Final = "found"
HARMLESS: Final = "harmless"
_HOLE_BYTES: Final = 65536

Damage = Callable[[bytearray, random.Random], bytearray]


def _flip(content: bytearray, chance: random.Random) -> bytearray:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def _hole(content: bytearray, chance: random.Random) -> bytearray:
    size = min(_HOLE_BYTES, len(content))
    start = chance.randrange(len(content) - size + 1)
    content[start : start + size] = bytes(size)
    return content


def _cut(content: bytearray, chance: random.Random) -> bytearray:
    return content[: chance.randrange(len(content))]


def _swap(content: bytearray, chance: random.Random) -> bytearray:
    size = max(1, min(4096, len(content) // 4))
    first, second = sorted(chance.randrange(len(content) - size + 1) for _ in range(2))
    if second - first >= size:
        moved = content[first : first + size]
        content[first : first + size] = content[second : second + size]
        content[second : second + size] = moved
    return content


def _append(content: bytearray, chance: random.Random) -> bytearray:
    return content + chance.randbytes(chance.randrange(1, 5000))


DAMAGES: Final[Mapping[str, Damage]] = {
    "bit flip": _flip,
    "hole": _hole,
    "truncation": _cut,
    "swap": _swap,
    "appended": _append,
}


@final
class Subject:
    """A small training state with tensors of every size and kind, and what a load has to bring back."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(700, 800), torch.nn.BatchNorm1d(800), torch.nn.Linear(800, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed / 100)
        self.counters = Counters(epoch=seed, name=f"run {seed}")
        for _ in range(2):
            self.model(torch.randn(4, 700)).square().mean().backward()
            self.optimizer.step()
        self.state = TrainState(model=self.model, optimizer=self.optimizer, counters=self.counters)
        self.mapping: dict[str, Any] = {
            "large": torch.randn(600, 1000),
            "small": torch.arange(5.0) + seed,
            "turned": torch.randn(9, 7).t(),
            "flag": torch.tensor(bool(seed % 2)),
            "number": seed,
        }

    def values(self) -> bytes:
        """Everything, bit for bit."""
        tensors = [*self.model.state_dict().values()]
        tensors += [each for state in self.optimizer.state.values() for each in state.values()]
        tensors += [value for value in self.mapping.values() if isinstance(value, torch.Tensor)]
        plain = [
            [{**group, "params": 0} for group in self.optimizer.param_groups],
            vars(self.counters),
            self.mapping["number"],
        ]
        generator = torch.get_rng_state().numpy().tobytes()
        return (
            b"".join(each.contiguous().numpy().tobytes() for each in tensors)
            + repr(plain).encode()
            + generator
        )


def prepare(root: Path) -> tuple[bytes, bytes]:
    """Save one checkpoint of ours and one of stock DCP; what loads of them bring, bit for bit."""
    subject = Subject(1)
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(STEP, subject.state)
    dcp.save(subject.mapping, checkpoint_id=root / STOCK, no_dist=True)
    expected = []
    for directory in (OURS, STOCK):
        loaded = Subject(2)
        _load(root, directory, loaded)
        expected.append(loaded.values())
    return expected[0], expected[1]


def _load(root: Path, directory: str, subject: Subject) -> None:
    state = subject.state if directory == OURS else subject.mapping
    with CheckpointManager(root) as checkpoints:
        checkpoints.load(state, name=directory)


@final
class Live:
    """The state that is loaded into, from checkpoints in `root`; a fresh one after a load that changed it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.subject = Subject(2)
        self.untouched = self.subject.values()

    def renew(self) -> None:
        """Make it as it was."""
        self.subject = Subject(2)


def attempt(live: Live, directory: str, expected: bytes, chance: random.Random) -> Outcome:
    """Damage one file, load, and put the file back."""
    root = live.root
    path = chance.choice(sorted(each for each in (root / directory).iterdir() if each.is_file()))
    name = chance.choices(list(DAMAGES), weights=[20, 1, 1, 1, 1])[0]
    before = path.read_bytes()
    after = bytes(DAMAGES[name](bytearray(before), chance))
    path.write_bytes(after)
    became, problem = HARMLESS, ""
    try:
        _load(root, directory, live.subject)
        if live.subject.values() != expected:
            problem = "wrong values were loaded"
        live.renew()
    except CheckpointError as error:
        became = FOUND
        if live.subject.values() != live.untouched:
            problem = f"refused, but the live state was touched: {error}"
            live.renew()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        path.write_bytes(before)
    return Outcome(sweep=f"damage, {directory}, {name}: {became}", point=path.name, problem=problem)


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Damage both checkpoints in turns, ten thousand times or as often as is chosen."""
    chance = random.Random(choice.seed)
    expected = dict(zip((OURS, STOCK), prepare(folder), strict=True))
    live = Live(folder)
    for number in range(choice.least(TRIALS)):
        directory = (OURS, STOCK)[number % 2]
        yield attempt(live, directory, expected[directory], chance)
