"""Runs a script with every `Accelerator` and `Trainer` that it makes enabled.

The script makes its Trainers itself, and transformers takes seconds to import: so their class is changed when
its module is imported, if it ever is.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, final

from accelerate import Accelerator

from accelerate_ckpt._checkpoints import enable_implicitly
from accelerate_ckpt._roots import PREFIX
from ckpt_core import ConfigError
from ckpt_core.state import Override

_MODULE = "transformers.trainer"
_OVERRIDE = "--override"
_making: list[object] = []
_USAGE = """\
usage: python -m accelerate_ckpt [-h] [--override NAME=VALUE]… {-m MODULE | SCRIPT} [ARGUMENTS …]

Runs a training script with the checkpoints of every Accelerator and Trainer in it made by ckpt-suite.
Settings come from CKPT_SUITE_… in the environment, e.g. CKPT_SUITE_SAVE='{every_steps: 500}', or from the
YAML or TOML file that CKPT_SUITE_CONFIG names.
--override lr=1e-4 changes hyperparameters where the script resumes, once for all restarts.
A script that is preempted ends after its last checkpoint, with exit code 143."""


def main(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in {"-h", "--help"}:
        print(_USAGE)  # noqa: T201 - it was asked for
        return
    arguments = _with_overrides(arguments)
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise SystemExit(_USAGE)
    if arguments[0] != "-m" and not Path(arguments[0]).exists():
        raise SystemExit(f"accelerate_ckpt: there is no script {arguments[0]!r}\n{_USAGE}")
    _enable_every_accelerator()
    enable_every_trainer()
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[1:] if is_module else arguments)
    if not sys.flags.safe_path:
        # As `python` does; what `python -m` put there is gone, see `__main__`.
        sys.path.insert(0, str(Path.cwd() if is_module else Path(arguments[0]).resolve().parent))
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _with_overrides(arguments: Sequence[str]) -> Sequence[str]:
    given: list[str] = []
    while arguments and arguments[0].partition("=")[0] == _OVERRIDE:
        _, equals, value = arguments[0].partition("=")
        given += [value] if equals else arguments[1:2]
        arguments = arguments[1 if equals else 2 :]
    if given:
        try:
            os.environ[f"{PREFIX}OVERRIDE"] = json.dumps(Override.parsed(given).values)
        except ConfigError as error:
            raise SystemExit(f"accelerate_ckpt: {error}\n{_USAGE}") from None
    return arguments


def _enable_every_accelerator() -> None:
    stock = Accelerator.__init__

    @functools.wraps(stock)
    def initialise(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if not _making:  # a Trainer makes it, which needs no `save_state`
            enable_implicitly(self)

    # The script makes its accelerators itself: the class is the only place to reach them.
    Accelerator.__init__ = initialise  # type: ignore[method-assign]


def enable_every_trainer() -> None:
    module = sys.modules.get(_MODULE)
    if module is not None:
        _change(module)
    else:
        sys.meta_path.insert(0, _Watch())


def _change(module: ModuleType) -> None:
    trainer: Any = module.Trainer
    stock_init, stock_create = trainer.__init__, trainer.create_accelerator_and_postprocess

    @functools.wraps(stock_init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        from accelerate_ckpt.trainer._checkpoints import enable_trainer_implicitly

        enable_trainer_implicitly(self)

    @functools.wraps(stock_create)
    def create(self: Any) -> None:
        _making.append(self)
        try:
            stock_create(self)
        finally:
            _making.pop()

    trainer.__init__, trainer.create_accelerator_and_postprocess = initialise, create


@final
class _Watch(MetaPathFinder):
    """Waits for the import of the Trainer's module; finds nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _change(module)

            loader.exec_module = exec_module
        return spec
