"""What Lightning hears of a save that was accepted is true, also while the save is in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import lightning as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO, load_from_checkpoint

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = 2


class Scored(pl.LightningModule):
    """Its weights count the steps, so that a checkpoint shows when it was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return -self.steps.sum()

    def on_train_epoch_end(self) -> None:
        self.log("score", float(SCORES[self.current_epoch % len(SCORES)]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


SCORES = [1, 6, 3, 2, 5, 4]


def trainer_of(callbacks: list[Any], **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **{"max_epochs": len(SCORES), **options},
    )


def data() -> Any:
    return DataLoader(torch.zeros(BATCHES, 1), batch_size=1)


def ours(way: str, root: Path) -> dict[str, Any]:
    if way == "plugin":
        return {"plugins": [ShardedCheckpointIO()]}
    return {} if way == "stock" else {"extra": ShardedCheckpoint(root / "own", save_last=False)}


def told(way: str, root: Path, dirpath: str, *options: dict[str, Any], fits: int = 1, **more: Any) -> Any:
    """Return what each ModelCheckpoint believes, and the steps in each file that is there."""
    given = ours(way, root)
    extra = [given.pop("extra")] if "extra" in given else []
    callbacks = [ModelCheckpoint(dirpath, **each) for each in options]
    trainer = trainer_of([*callbacks, *extra], **given, **more)
    for number in range(fits):
        trainer.fit_loop.max_epochs = len(SCORES) * (number + 1)
        trainer.fit(Scored(), data())
    beliefs = [
        {
            "best": name_of(each.best_model_path),
            "last": name_of(each.last_model_path),
            "ranked": {name_of(path): float(score) for path, score in each.best_k_models.items()},
        }
        for each in callbacks
    ]
    return beliefs, {name: steps_in(f"{dirpath}/{name}") for name in names_in(dirpath)}


def name_of(path: str) -> str:
    return path.rpartition("/")[2]


def names_in(dirpath: str) -> list[str]:
    fs, place = fsspec.core.url_to_fs(dirpath)
    fs.invalidate_cache()
    return sorted(name for name in map(name_of, fs.ls(place, detail=False)) if name.endswith(".ckpt"))


def steps_in(path: str) -> int:
    return int(load_from_checkpoint(Scored, path).steps.item())


FIXED = {"filename": "test", "monitor": "score", "save_on_train_epoch_end": True}
CASES = {
    "all of one name": ([{**FIXED, "save_top_k": -1}], {}),
    "the two best of one name": ([{**FIXED, "save_top_k": 2, "mode": "max"}], {}),
    "the best and the last": ([{**FIXED, "mode": "max", "save_last": True}], {}),
    "the best and a link to the last": ([{**FIXED, "save_top_k": 2, "mode": "max", "save_last": "link"}], {}),
    "every step of one name": (
        [{"filename": "test", "every_n_train_steps": 1, "save_top_k": -1}],
        {"max_epochs": 3},
    ),
    "two callbacks of one name": (
        [
            {"filename": "test", "every_n_train_steps": 1, "save_top_k": -1},
            {"filename": "test", "every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": True},
        ],
        {"max_epochs": 3},
    ),
    "two links to the last": (
        [
            {"every_n_train_steps": 1, "save_last": "link"},
            {"every_n_epochs": 1, "save_last": "link", "save_on_train_epoch_end": True},
        ],
        {"max_epochs": 2},
    ),
    "a trainer that fits again": ([{**FIXED, "save_top_k": -1}], {"fits": 2}),
    "names that come back": (
        [{"filename": "{score:.0f}", "monitor": "score", "mode": "max", "save_on_train_epoch_end": True}],
        {"fits": 2},
    ),
}


@pytest.mark.parametrize(
    ("case", "way"), [*((case, "plugin") for case in CASES), ("all of one name", "callback")]
)
def test_a_model_checkpoint_saves_and_believes_what_it_would_without_us(tmp_path, case, way):
    options, more = CASES[case]
    expected = told("stock", tmp_path, f"{tmp_path}/stock", *options, **more)
    found = told(way, tmp_path, f"{tmp_path}/run", *options, **more)
    assert found == expected


def test_in_a_bucket_too_where_listings_are_cached(tmp_path):
    options, more = CASES["all of one name"]
    expected = told("stock", tmp_path, f"{tmp_path}/stock", *options, **more)
    found = told("plugin", tmp_path, "memory://accepted/run", *options, **more)
    assert found == expected


class ReturnsNothing(Scored):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        self.found = super().load_state_dict(state_dict, strict=strict)


class AnySignature(Scored):
    def load_state_dict(self, state_dict: Any, *more: Any, **options: Any) -> Any:
        self.found = {**state_dict}
        return super().load_state_dict(state_dict, *more, **options)


class AddsMissing(Scored):
    def load_state_dict(self, given: Any, strict: bool = True) -> Any:
        self.found = given
        return super().load_state_dict({**self.state_dict(), **given}, strict)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [Scored, ReturnsNothing, AnySignature, AddsMissing])
def test_a_modules_own_load_state_dict_is_called_whatever_its_signature(tmp_path, kind, strict):
    saver = trainer_of(
        [ModelCheckpoint(tmp_path, save_last=True)], plugins=[ShardedCheckpointIO()], max_epochs=1
    )
    saver.fit(kind(), data())
    module = kind()
    module.strict_loading = strict
    trainer = trainer_of([], plugins=[ShardedCheckpointIO()], max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(module, data(), ckpt_path=tmp_path / "last.ckpt")
    assert float(module.steps) == 2 * BATCHES
    assert kind is Scored or hasattr(module, "found")
