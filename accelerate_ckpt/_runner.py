"""Runs a script that knows nothing of us, with every `Accelerator` and `Trainer` it makes enabled."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accelerate_ckpt._patch import enable_implicitly
from accelerate_ckpt._trainer_runner import enable_every_trainer, made_by_trainer

_USAGE = """\
usage: python -m accelerate_ckpt [-h] {-m MODULE | SCRIPT} [ARGUMENTS …]

Runs a training script with the checkpoints of every Accelerator and Trainer in it made by ckpt-suite.
Settings come from CKPT_SUITE_… in the environment, e.g. CKPT_SUITE_SAVE='{every_steps: 500}', from the file
that CKPT_SUITE_CONFIG names, or from fsdp_config: {ckpt: …} in the accelerate configuration.
A script that is preempted ends after its last checkpoint, with exit code 143."""


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module as `python` would, with checkpoints.

    Raises:
        SystemExit: there is nothing to run.
    """
    if arguments and arguments[0] in {"-h", "--help"}:
        print(_USAGE)  # noqa: T201 - it was asked for
        return
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise SystemExit(_USAGE)
    if arguments[0] != "-m" and not Path(arguments[0]).exists():
        raise SystemExit(f"accelerate_ckpt: there is no script {arguments[0]!r}\n{_USAGE}")
    _enable_every_accelerator()
    enable_every_trainer()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        # As `python script.py` does; what `python -m` put there is gone, see `__main__`.
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


def _enable_every_accelerator() -> None:
    stock = Accelerator.__init__

    @functools.wraps(stock)
    def initialise(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if not made_by_trainer():
            enable_implicitly(self)

    # The script makes its accelerators itself: the class is the only place to reach them.
    Accelerator.__init__ = initialise  # type: ignore[method-assign]
