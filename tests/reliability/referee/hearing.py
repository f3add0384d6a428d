"""`ckpt-chaos`, which is not ours, kills trainings of every kind at file events and judges what resumes.

It starts every training as a command. That command asks this process, which has imported all frameworks, to
fork the training, arm the referee in it as its own start-up hook would, and pass on how it ended.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.referee.jobs import JOBS

ALL_POINTS: Final = 1000
_CLIENT: Final = Path(__file__).with_name("client.py")


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill a training of every kind at every file event, or at a sample of them."""
    import accelerate  # noqa: F401 - before the first fork, so that no training has to
    import lightning  # noqa: F401
    import transformers.trainer  # noqa: F401

    for kind in [each for each in JOBS if not choice.named or each in choice.named]:
        yield from _hearing(kind, choice.least(ALL_POINTS), folder / kind)


def _hearing(kind: str, points: int, folder: Path) -> Iterator[Outcome]:
    """All that the referee finds of one kind of training."""
    folder.mkdir()
    # Elsewhere: the name of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as short:
        yield from _heard(kind, points, folder, f"{short}/socket")


def _heard(kind: str, points: int, folder: Path, address: str) -> Iterator[Outcome]:
    command = [
        sys.executable, "-m", "ckpt_chaos", "run",
        "--work", str(folder / "work"),
        "--max-points", str(points),
        "--modes", "before",
        "--step-regex", r"resumed from step (\d+)",
        "--result-file", "{out}/final.bin",
        "--checkpoint-glob", "{out}/run/*[0-9]",
        "--ckpt-ignore-size",
        "--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK",
        "--timeout", "120",
        "--", sys.executable, str(_CLIENT), address, kind, "{out}",
    ]  # fmt: skip
    with socket.socket(socket.AF_UNIX) as listener, open(folder / "verdicts.txt", "w+b") as verdicts:
        listener.bind(address)
        listener.listen()
        referee = subprocess.Popen(command, stdout=verdicts, stderr=verdicts)
        with open(os.pidfd_open(referee.pid)) as ended:
            while listener in select.select([listener, ended], [], [])[0]:
                _serve(listener)
        referee.wait()
        told = (folder / "verdicts.txt").read_text()
    found = sorted((folder / "work").glob("pt_*/result.json"))
    records = [record for path in found if "point" in (record := json.loads(path.read_text()))]
    if not records:
        raise RuntimeError(f"the referee tried nothing: {told[-2000:]}")
    yield from (_outcome(kind, record, told if referee.returncode else "") for record in records)


def _outcome(kind: str, record: dict[str, Any], told: str) -> Outcome:
    outcome = record["outcome"]
    problem = told or ("" if record["crashed"] else "it was not killed")
    return Outcome(
        sweep=f"outside referee, {kind}",
        point=record["label"],
        kills=int(record["crashed"]),
        acknowledged=outcome["newest_complete_step"],
        resumed=outcome["resumed_from_step"],
        problem=problem,
    )


def _serve(listener: socket.socket) -> None:
    """Fork the training that a client asks for, and tell it how that ended."""
    connection, _ = listener.accept()
    with connection:
        request, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        wanted = json.loads(request)
        child = forks.fork(lambda _tell: _train(wanted, descriptors[0]))
        os.close(descriptors[0])
        forks.gather([child])
        connection.sendall(str(child.exit_code).encode())


def _train(wanted: dict[str, Any], output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(wanted["environment"])
    if "CKPT_CHAOS_WATCH" in os.environ:
        from ckpt_chaos.targets.common import arm_from_env

        arm_from_env(0, lazy=True)
    JOBS[wanted["kind"]](Path(wanted["folder"]))
    sys.stdout.flush()
    sys.stderr.flush()
