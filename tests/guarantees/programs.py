"""Training scripts that are interrupted, ended and preempted, each in a process that ends as scripts do.

Usage: programs.py FOLDER: forks one child per program, to import torch once for all; what each prints is in
`FOLDER/<name>.out` and `.err`, and their exit codes, as JSON, on standard output.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, OnPreemption, TrainState
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage, Operation
from tests.frozen import freeze
from tests.support.system_calls import SystemCalls


def training_state() -> TrainState:
    return TrainState(model=nn.Linear(4, 3))


def say(word: str) -> None:
    print(word, flush=True)


def signals_itself(number: int, ready: threading.Event) -> Callable[[Operation], None]:
    """As a fault: the signal arrives, once all is ready, while the save is at this operation."""

    def send(_operation: Operation) -> None:
        ready.wait(60)
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # long enough for the main thread to act on the signal, and to act wrongly

    return send


def interrupted(root: str) -> None:
    """Ctrl-C while step 2 is being written."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
    begun = threading.Event()
    fault = Fault(method="close", key="*step-000000002*.distcp", before=signals_itself(signal.SIGINT, begun))
    with CheckpointManager(FaultyStorage(LocalStorage(root), [fault])) as checkpoints:
        state = training_state()
        checkpoints.save(1, state)
        checkpoints.save(2, state)
        say("training")
        begun.set()
        time.sleep(60)
        say("not interrupted")


def exits_without_closing(root: str) -> None:
    """The last line of the script comes while step 2 is being written."""
    slow = Fault(method="close", key="*step-000000002*.distcp", before=lambda _operation: time.sleep(0.3))
    checkpoints = CheckpointManager(FaultyStorage(LocalStorage(root), [slow]))
    checkpoints.save(1, training_state())
    checkpoints.save(2, training_state())
    say("end")


def raises_without_closing(root: str) -> None:
    exits_without_closing(root)
    raise RuntimeError("the training broke")


def exits_before_the_last_prune(root: str) -> None:
    """The interpreter has begun to end before anything of step 2 is written."""
    ending = threading.Event()
    threading._register_atexit(ending.set)  # type: ignore[attr-defined]
    slow = Fault(method="create", key="*step-000000002*", before=lambda _operation: ending.wait(60))
    checkpoints = CheckpointManager(FaultyStorage(LocalStorage(root), [slow]), keep=KeepLatest(1))
    checkpoints.save(1, training_state())
    checkpoints.save(2, training_state())
    say("end")


def exits_where_no_thread_begins_any_more(root: str) -> None:
    """As Python 3.12 and later: once the interpreter ends, no thread can be started."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading._register_atexit(lambda: setattr(threading.Thread, "start", refuse))  # type: ignore[attr-defined]
    exits_before_the_last_prune(root)


def preempted(root: str) -> None:
    """The scheduler asks to leave in the middle of step 3; nothing else is due until step 100."""
    with CheckpointManager(root, save=EverySteps(100) | OnPreemption()) as checkpoints:
        state = training_state()
        for step in range(1, 50):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            handle = checkpoints.maybe_save(step, state)
            say(f"step {step} {'saved' if handle is not None else 'not saved'}")
            if checkpoints.preempted and step >= 5:
                break
    say("stopped" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else "handler left behind")


def hangs_in_a_write(root: str) -> None:
    """The script ends though one write of its save never does."""
    hang = Fault(method="write", key="*.distcp", before=lambda _operation: threading.Event().wait())
    SystemCalls(Path(root), [hang]).__enter__()
    CheckpointManager(root, deadline_seconds=1.0).save(1, {"w": torch.zeros(4096)})


PROGRAMS = {
    program.__name__: program
    for program in (
        interrupted,
        exits_without_closing,
        raises_without_closing,
        exits_before_the_last_prune,
        exits_where_no_thread_begins_any_more,
        preempted,
        hangs_in_a_write,
    )
}


def main(folder: Path) -> None:
    """Start every program; in a child this returns, and the interpreter ends by itself."""
    torch.set_num_threads(1)
    freeze()
    children: dict[int, str] = {}
    for name, program in PROGRAMS.items():
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(100, exit=True)
            for stream, end in ((sys.stdout, "out"), (sys.stderr, "err")):
                os.dup2(os.open(folder / f"{name}.{end}", os.O_CREAT | os.O_WRONLY), stream.fileno())
            program(str(folder / name))
            return
        children[child] = name
    codes: dict[str, int] = {}
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
    say(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
