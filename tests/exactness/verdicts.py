"""What became of a cell: computed from three trainings of every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from tests.exactness.cells import EPOCHS, SAMPLES, Cell, limited
from tests.exactness.training import Observed

EXACT: Final = "exact"
ELASTIC: Final = "elastic-exact"
REFUSED: Final = "refused"
TOLD: Final = "told"
WRONG: Final = "wrong"

GOOD: Final = (EXACT, ELASTIC)


class Runs(NamedTuple):
    """A cell's trainings, each by rank.

    The first is empty if it was left out, and the last if nothing could be saved.
    """

    stock: list[Observed]
    saving: list[Observed]
    resumed: list[Observed]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a cell came to.

    Attributes:
        cell: the cell.
        word: `exact`, `elastic-exact`, `refused` or `told` by a message of ours, or `wrong`.
        why: what differs, or the message; "" if it is exact.
        seconds: processor time of all trainings.
    """

    cell: Cell
    word: str
    why: str = ""
    seconds: float = 0.0

    @property
    def as_expected(self) -> bool:
        """Whether it is exact, or cannot be and the user knows."""
        return self.word in GOOD or (self.word in {REFUSED, TOLD} and bool(limited(self.cell)))


def judge(cell: Cell, runs: Runs) -> Verdict:
    """Compare the trainings of all ranks."""
    word, why = _judged(cell, runs)
    seconds = sum(each.seconds for of_ranks in runs for each in of_ranks)
    return Verdict(cell=cell, word=word, why=why, seconds=seconds)


def _judged(cell: Cell, runs: Runs) -> tuple[str, str]:
    for role, of_ranks in zip(Runs._fields, runs, strict=True):
        for each in of_ranks:
            if each.error:
                word = REFUSED if each.refused and role == "resumed" else WRONG
                return word, f"{role}: {each.error.strip()}"
    differs = _perturbed(runs)
    if differs:
        return WRONG, f"saving changes the training: {differs}"
    same = cell.ranks == "same"
    differs = _resume_differs(runs) if same else _elastic_differs(cell, runs)
    if not differs:
        return EXACT if same else ELASTIC, ""
    said = [text for each in runs.resumed for text in each.warnings]
    if said:
        return TOLD, f"{differs}; said: {'; '.join(dict.fromkeys(said))}"
    return WRONG, differs


def _perturbed(runs: Runs) -> str:
    for rank, (stock, saving) in enumerate(zip(runs.stock, runs.saving, strict=bool(runs.stock))):
        if found := _first_difference(stock.rows, saving.rows, 0) or _final_differs(stock, saving):
            return f"rank {rank}: {found}"
    return ""


def _resume_differs(runs: Runs) -> str:
    for rank, (saving, resumed) in enumerate(zip(runs.saving, runs.resumed, strict=True)):
        expected = saving.rows[saving.saved_after :]
        found = _first_difference(expected, resumed.rows, saving.saved_after)
        if found := found or _final_differs(saving, resumed):
            return f"rank {rank}: {found}"
    return ""


def _first_difference(expected: list[tuple], found: list[tuple], first: int) -> str:
    for number, (one, other) in enumerate(zip(expected, found, strict=False), first + 1):
        for what, a, b in zip(("samples", "loss", "learning rate"), one, other, strict=True):
            if a != b:
                return f"{what} of batch {number}: {b} instead of {a}"
    if len(expected) != len(found):
        return f"{len(found)} batches instead of {len(expected)}"
    return ""


def _final_differs(expected: Observed, found: Observed) -> str:
    differ = [name for name, value in expected.final.items() if found.final.get(name) != value]
    return f"the final {', '.join(differ)}" if differ else ""


def _elastic_differs(cell: Cell, runs: Runs) -> str:
    """The state is the one that was saved, and every sample of each epoch is seen once, but for padding."""
    if found := _state_differs(runs):
        return found
    place, before = cell.place_of_resume, cell.place
    after = [
        each.rows
        for rank, each in enumerate(runs.resumed)
        if _sees_own_data(rank, place.world, place.replicas)
    ]
    for rank, each in enumerate(runs.resumed):
        if [row[0] for row in each.rows] != [row[0] for row in after[place.replica(rank)]]:
            return f"rank {rank} sees other samples than the ranks that must see the same"
    epoch, batches = cell.saves_after
    start = epoch * cell.batches
    seen = Counter(
        sample
        for rank, each in enumerate(runs.saving)
        if _sees_own_data(rank, before.world, before.replicas)
        for ids, *_ in each.rows[start : start + batches]
        for sample in ids
    )
    if batches == cell.batches:
        # Whatever the uninterrupted training has seen of it, that epoch is over.
        seen = Counter(range(SAMPLES))
    at, number, most = 0, epoch, max(len(rows) for rows in after)
    while at < most or number < EPOCHS:
        due = Counter(range(SAMPLES)) - seen
        count, padding = _batches_of(cell, due)
        given = Counter(s for rows in after for ids, *_ in rows[at : at + count] for s in ids)
        never, twice = (due - given).total(), (given - due).total()
        cut = _counts_steps(cell) and most < at + count
        if (never and not cut) or twice > padding:
            return f"of epoch {number + 1}, {twice} samples twice and {never} never ({padding} are padding)"
        at, number, seen = at + count, number + 1, Counter()
        if cut:
            return ""
    if number > EPOCHS and not _counts_steps(cell):
        return f"{most} batches after the resume, which are {number - epoch} epochs"
    return ""


def _batches_of(cell: Cell, due: Counter[int]) -> tuple[int, int]:
    """How many batches of every rank some samples are, and how many samples fill these up."""
    together = cell.place_of_resume.replicas * cell.place_of_resume.batch
    # Accelerate shares out what each worker reads of a stream by itself; the Trainer lets one rank read.
    streams = 2 if cell.host == "accelerate" and "stream" in cell.data and cell.workers != "0" else 1
    sizes = [sum(each for sample, each in due.items() if sample % streams == n) for n in range(streams)]
    return sum(-(-size // together) for size in sizes), sum(-size % together for size in sizes)


def _counts_steps(cell: Cell) -> bool:
    """Whether training ends after a number of steps, maybe in the middle of an epoch."""
    return cell.host == "trainer" and cell.data == "stream"


def _sees_own_data(rank: int, world: int, replicas: int) -> bool:
    return rank % (world // replicas) == 0


def _state_differs(runs: Runs) -> str:
    saved: dict[str, str] = {}
    for each in runs.saving:
        saved |= each.at_point
    for rank, each in enumerate(runs.resumed):
        differ = [name for name, value in each.at_point.items() if saved.get(name) != value]
        if differ or not each.at_point:
            return f"rank {rank}: {len(differ)} entries of the state, first {differ[:1]}"
    return ""
