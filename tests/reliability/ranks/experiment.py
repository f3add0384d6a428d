"""Break one thing on a job of a few ranks, and ask of every case the same.

Nobody waits beyond the deadline, all who live are told what is promised, a fresh job finds what was
acknowledged, and if the ranks come back so do the saves.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome, seen, tried
from tests.reliability.ranks.life import AGAIN, FIRST, Case, Life, is_exact, manager, prepare, state_of

_ROOM_SECONDS: Final = 12.0
"""For a machine that is busy, beyond what we promise."""

_IDLE: Final = "nothing went wrong: the case tried nothing"
_LIMIT_SECONDS: Final = 100.0
_JOBS: Final = 8


def experiments(choice: Choice, cases: Iterable[Case], folder: Path) -> Iterator[Outcome]:
    """Try the chosen cases, several at once: they mostly wait for a deadline."""
    forks.answer(lambda: prepare(folder / "template"))
    chosen = choice.of(cases)
    yield from tried((partial(_tried, case, folder, number) for number, case in enumerate(chosen)), _JOBS)


def _tried(case: Case, folder: Path, number: int) -> list[Outcome]:
    """What the case came to; a machine too busy to get as far as the fault gets a second chance."""
    found = _try(case, folder, f"{number}")
    return [_try(case, folder, f"{number}-again") if _IDLE in found.problem else found]


def _try(case: Case, folder: Path, name: str) -> Outcome:
    root = folder / f"case-{name}"
    shutil.copytree(folder / "template", root)
    children, broken = _Job(case, root, folder / f"store-{name}").run()
    told = [message for child in children for message in child.told if isinstance(message, dict)]
    acknowledged = max((each["committed"] for each in told if "committed" in each), default=FIRST)
    broken += _complaints(case, children, str(root))
    resumed, lost = seen(partial(inspect, root, acknowledged))
    shutil.rmtree(root)
    return Outcome(
        sweep=case.sweep,
        point=case.point,
        kills=len(case.dying),
        acknowledged=acknowledged,
        resumed=resumed,
        problem="; ".join(filter(None, [*broken, lost])),
    )


class _Job:
    """The ranks of one case, the store they meet at, and the one who breaks things."""

    def __init__(self, case: Case, root: Path, store_file: Path) -> None:
        self._case = case
        self._root = root
        self._store_file = store_file
        self._begin, self._end = forks.Gate(), forks.Gate()

    def run(self) -> tuple[list[forks.Child], list[str]]:
        """The ranks, when they have ended, and who did not."""
        case = self._case
        by_file = case.store_fault == "is removed"
        with ExitStack() as stack:
            server = None if case.world_size == 1 or by_file else stack.enter_context(forks.StoreServer())
            children = stack.enter_context(
                forks.ranks(case.world_size, self._be, server=server, join=not by_file)
            )
            awaited = [child for rank, child in enumerate(children) if rank not in case.silent]
            forks.wait_for_word(awaited, ("loaded", "waits"), _LIMIT_SECONDS)
            match case.store_fault:
                case "is killed":
                    server.signal(signal.SIGKILL)
                case "is stopped":
                    server.signal(signal.SIGSTOP)
                case "is removed":
                    self._store_file.unlink()
            self._begin.open()
            forks.wait_for_word(awaited, ("waits",), _LIMIT_SECONDS)
            if case.store_fault == "is stopped":
                server.signal(signal.SIGCONT)
            for child in (children[rank] for rank in case.silent):
                if child.status is None:
                    os.kill(child.pid, signal.SIGCONT)
            self._end.open()
            late = forks.gather(children, _LIMIT_SECONDS)
        return children, [f"rank {rank} never ended" for rank in late]

    def _be(self, rank: int, tell: forks.Tell) -> None:
        if self._case.store_fault == "is removed":
            self._join_by_file(rank)
        Life(self._case, rank, self._root, begin=self._begin, end=self._end, tell=tell).live()

    def _join_by_file(self, rank: int) -> None:
        import torch.distributed as dist

        store = dist.FileStore(str(self._store_file), self._case.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self._case.world_size)


def _complaints(case: Case, children: Sequence[forks.Child], root: str) -> list[str]:
    """What was promised of this case, and does not hold."""
    found: list[str] = []
    if case.strikes and not any("struck" in each for child in children for each in child.told):
        found.append(_IDLE)
    for rank, child in enumerate(children):
        if rank in case.dying:
            if not child.killed:
                found.append(f"rank {rank} did not die")
            continue
        crashes = [each["error"] for each in child.told if "error" in each and "what" not in each]
        found += [f"rank {rank} broke: {text.strip().rpartition(chr(10))[2]}" for text in crashes]
        told = [each for each in child.told if "what" in each]
        found += [
            f"rank {rank}: {text}" for text in (*_common(case, told), *case.complaints(rank, told, root))
        ]
    return found


def _common(case: Case, told: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What every case promises to every rank that lives on."""
    bound = 4 * case.deadline_seconds + _ROOM_SECONDS
    yield from (f"{each['what']} took {each['seconds']:.1f} s" for each in told if each["seconds"] > bound)
    again = [each for each in told if each["what"] == "again"]
    if not (case.lasts or case.closes_at_once) and (not again or "error" in again[-1]):
        yield f"could not save again: {again[-1]['text'] if again else 'it never tried'}"
    if not any(each["what"] == "close" for each in told):
        yield "did not come to close its manager"


def inspect(root: Path, acknowledged: int) -> int:
    """What a fresh job finds: the newest is whole and exact, what is torn is collected, and saves go on."""
    storage = LocalStorage(root)
    infos = Catalog(storage).committed()
    broken = [info.name for info in infos if verify(storage, info.name)]
    state = state_of(0)
    with manager(root, deadline_seconds=60.0) as checkpoints:
        step = checkpoints.resume(state)
        assert step is not None, "nothing to resume from"
        assert not broken, f"committed and damaged: {broken}"
        assert step >= acknowledged, f"step {acknowledged} was acknowledged, {step} was resumed"
        assert step == max(info.step for info in infos), f"step {step} is not the newest"
        assert is_exact(state, step), f"step {step} holds other values"
        torn = Catalog(storage).torn()
        assert not torn, f"not collected: {torn}"
        checkpoints.save(AGAIN + step, state_of(AGAIN + step)).result()
    return step
