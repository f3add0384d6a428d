"""Enables the Trainers of a script that knows nothing of us.

The script makes them itself, and transformers takes seconds to import: so the class is changed when its
module is imported, if it ever is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, final

_MODULE = "transformers.trainer"
_making: list[object] = []


def enable_every_trainer() -> None:
    """Have every Trainer enabled that is made from now on."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _change(module)
    else:
        sys.meta_path.insert(0, _Watch())


def made_by_trainer() -> bool:
    """Whether a Trainer is making its own accelerator, whose `save_state` it never calls."""
    return bool(_making)


def _change(module: ModuleType) -> None:
    trainer: Any = module.Trainer
    stock_init, stock_create = trainer.__init__, trainer.create_accelerator_and_postprocess

    @functools.wraps(stock_init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        from accelerate_ckpt._trainer import enable_trainer_implicitly

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
        """Find the module as others would, but with a loader that changes it."""
        del path, target
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader)
        return spec


@final
class _ChangingLoader(Loader):
    """Loads a module as the loader it is given, then changes it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as the loader would."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then change it."""
        self._loader.exec_module(module)
        _change(module)
