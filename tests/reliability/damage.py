"""How much damage is found: every kind of it, at random places of every file, and what a load makes of it.

A load must either refuse the checkpoint, with everything live as it was, or bring exactly what was saved.
Anything else is counted as wrong. Run as `python -m benchmarks.damage --trials 10000 --json out.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointError, CheckpointManager, Counters, TrainState

STEP: Final = 1
OURS: Final = f"step-{STEP:09d}"
STOCK: Final = "stock"
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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One damage and what became of it: `found`, `harmless`, `wrong`, or `crash` with another error."""

    directory: str
    file: str
    damage: str
    outcome: str
    detail: str = ""


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
    """The state that is loaded into, from checkpoints in `root`; made anew when a load has changed it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.subject = Subject(2)
        self.untouched = self.subject.values()

    def renew(self) -> None:
        """Make it as it was."""
        self.subject = Subject(2)


def attempt(live: Live, directory: str, expected: bytes, chance: random.Random) -> Trial:
    """Damage one file, load, and put the file back."""
    root = live.root
    path = chance.choice(sorted(each for each in (root / directory).iterdir() if each.is_file()))
    name = chance.choices(list(DAMAGES), weights=[20, 1, 1, 1, 1])[0]
    before = path.read_bytes()
    after = bytes(DAMAGES[name](bytearray(before), chance))
    path.write_bytes(after)
    outcome, detail = "harmless", ""
    try:
        _load(root, directory, live.subject)
        if live.subject.values() != expected:
            outcome = "wrong"
        live.renew()
    except CheckpointError as error:
        outcome = "found"
        if live.subject.values() != live.untouched:
            outcome, detail = "wrong", f"touched: {error}"
            live.renew()
    except Exception as error:  # noqa: BLE001 - that is what is being counted
        outcome, detail = "crash", f"{type(error).__name__}: {error}"
    finally:
        path.write_bytes(before)
    return Trial(directory=directory, file=path.name, damage=name, outcome=outcome, detail=detail)


def run(trials: int, seed: int, root: Path) -> list[Trial]:
    """Damage both checkpoints in turns."""
    chance = random.Random(seed)
    ours, stock = prepare(root)
    live = Live(root)
    return [
        attempt(live, directory, expected, chance)
        for _ in range(-(-trials // 2))
        for directory, expected in ((OURS, ours), (STOCK, stock))
    ][:trials]


def table(trials: Sequence[Trial]) -> str:
    """Outcomes by directory, file and damage."""
    counts = Counter((each.directory, each.file, each.damage, each.outcome) for each in trials)
    rows = sorted({key[:3] for key in counts})
    lines = [f"{'':44}{'found':>8}{'harmless':>10}{'wrong':>8}{'crash':>8}"]
    for row in rows:
        found = [counts[(*row, outcome)] for outcome in ("found", "harmless", "wrong", "crash")]
        lines.append(f"{' '.join(row):44}{found[0]:8}{found[1]:10}{found[2]:8}{found[3]:8}")
    total = Counter(each.outcome for each in trials)
    lines.append(f"{len(trials)} trials: {dict(total)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if a wrong value was loaded or a load ended otherwise than it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.damage", description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every trial there")
    chosen = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="damage-"))
    try:
        trials = run(chosen.trials, chosen.seed, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(table(trials))
    bad = [each for each in trials if each.outcome in {"wrong", "crash"}]
    for each in bad[:20]:
        print(each)
    if chosen.json is not None:
        rows = [[t.directory, t.file, t.damage, t.outcome, t.detail] for t in trials]
        chosen.json.write_text(json.dumps({"trials": len(trials), "seed": chosen.seed, "rows": rows}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
