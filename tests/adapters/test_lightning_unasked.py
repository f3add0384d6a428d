"""A Trainer that was given nothing of ours is the same with and without the package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROGRAM = """
import importlib, shutil, sys, torch
from pathlib import Path
pl = importlib.import_module(sys.argv[1])
importlib.import_module(sys.argv[1] + ".demos.boring_classes")
Boring = sys.modules[sys.argv[1] + ".demos.boring_classes"].BoringModel
HOSTS = ("lightning", "pytorch_lightning", "lightning_fabric", "torch.utils.data", "torch.optim")

def state():
    # Every class, function and constant of the hosts, by where it is.
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(HOSTS):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}:{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}:{key}.{inner}": id(each) for inner, each in list(vars(value).items())}
    return found

def train(*callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, callbacks=list(callbacks), **quiet, **options)
    held = [type(each).__name__ for each in trainer.callbacks]
    trainer.fit(Boring())
    return held, [type(each).__name__ for each in trainer.callbacks], type(trainer.strategy).__mro__

def changed(before):
    after = state()
    return sorted(key for key in before if after.get(key) != before[key] and "_abc" not in key)

without = train()
before = state()
import lightning_ckpt
lightning_ckpt.setup_fabric
ours = importlib.import_module("lightning_ckpt." + sys.argv[1].partition(".")[0])
checkpoint, plugin = ours.ShardedCheckpoint("run"), ours.ShardedCheckpointIO("run")
assert train() == without, train()
print("imported and made:", changed(before))
callbacks = [pl.callbacks.LambdaCallback()]
for number in range(2):
    plugin = ours.ShardedCheckpointIO(f"plugin{number}")
    quiet = {"logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, callbacks=callbacks, plugins=[plugin], **quiet)
    for _ in range(2):
        trainer.fit(Boring())
    assert not any("ckpt" in type(each).__module__ for each in callbacks), callbacks
# What a plugin put into one Trainer serves no other one, which has no plugin, or another.
left = [each for each in trainer.callbacks if "ckpt" in type(each).__module__]
assert left and sorted(path.name for path in Path().glob("plugin*")) == ["plugin0", "plugin1"]
shutil.rmtree("plugin1")
train(*left)
train(*left, plugins=[ours.ShardedCheckpointIO("plugin2")])
assert sorted(path.name for path in Path().glob("plugin*")) == ["plugin0", "plugin2"]
train(checkpoint)
assert train() == without, train()
print("trained with:", changed(before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_that_was_given_nothing_of_ours_is_stocks(tmp_path, package):
    pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, package],
        check=False, capture_output=True, text=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "imported and made: []" in done.stdout
    assert f"trained with: ['{package}.core.saving:pl_load']" in done.stdout


def test_the_package_registers_nothing_with_a_host():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "entry-points" not in project
