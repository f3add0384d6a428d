"""Runs a training script that knows nothing of us, with every `Accelerator` it makes enabled."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accelerate_ckpt._patch import enable_implicitly
from ckpt_core import ConfigError

_USAGE = "usage: python -m accelerate_ckpt [-m MODULE | SCRIPT] [ARGUMENTS …]"


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module as `python` would, with checkpoints.

    Raises:
        ConfigError: there is nothing to run.
    """
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise ConfigError(_USAGE)
    _enable_every_accelerator()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    # As `python script.py` does: modules beside the script can be imported.
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


def _enable_every_accelerator() -> None:
    stock = Accelerator.__init__

    @functools.wraps(stock)
    def initialise(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        enable_implicitly(self)

    # The script makes its accelerators itself: the class is the only place to reach them.
    Accelerator.__init__ = initialise  # type: ignore[method-assign]
