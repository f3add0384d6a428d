"""Stock Lightning checkpoints with something planted in them, loaded on ranks with our callback."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_ckpt import ShardedCheckpoint
from tests.adapters.lightning_jobs import Model, digest, loader_of, strategy_named
from tests.support.canary import Canary, raw, zipped

PLANTED = ("meta", "metadata", "rank_metadata", "value")


def loads_on_ranks(root: str, strategy: str) -> dict[str, str]:
    """What became of each load on this rank: the weights' digest, or the error's name and text."""
    place = Path(root)
    saved = _stock_fit(place, strategy)
    outcomes = {"saved": saved}
    for name in ("sharded", *PLANTED, "full", "full_planted"):
        if dist.get_rank() == 0:
            _plant(place, name)
        dist.barrier()
        outcomes[name] = _load(place / name, strategy)
        dist.barrier()
    outcomes["trusted"] = _load(place / "meta", strategy, allow_pickle=True)
    return outcomes


def _stock_fit(place: Path, strategy: str) -> str:
    """Train without us, and write a sharded directory and a single file of weights."""
    torch.manual_seed(5)
    trainer = _trainer(strategy, 2)
    trainer.fit(_module(strategy), loader_of("plain"))
    trainer.save_checkpoint(place / "sharded")
    weights = get_model_state_dict(trainer.strategy.model, options=StateDictOptions(full_state_dict=True))
    content = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
    if dist.get_rank() == 0:
        torch.save({**content, "state_dict": weights}, place / "full")
    return digest(trainer)


def _load(path: Path, strategy: str, **options: Any) -> str:
    torch.manual_seed(6)
    trainer = _trainer(strategy, 2, ShardedCheckpoint(path.parent / "run", save_last=False, **options))
    run = trainer.validate if path.is_file() else trainer.fit
    try:
        run(_module(strategy), loader_of("plain"), ckpt_path=str(path))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return digest(trainer)


def _module(strategy: str) -> Model:
    return Model(fsdp2=strategy == "fsdp2")


def _trainer(strategy: str, max_steps: int, *callbacks: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_named(strategy, 2),
        max_steps=max_steps,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def _plant(place: Path, name: str) -> None:
    """Make a copy of what stock wrote, with a canary in one place that stock reads."""
    canary = Canary(place / "traces", name)
    if name == "full_planted":
        content = torch.load(place / "full", weights_only=True)
        torch.save({**content, "planted": canary}, place / name)
    if name not in PLANTED:
        return
    shutil.copytree(place / "sharded", place / name)
    metadata = dcp.FileSystemReader(place / name).read_metadata()
    if name == "meta":
        content = torch.load(place / name / "meta.pt", weights_only=True)
        torch.save({**content, "planted": canary}, place / name / "meta.pt")
    elif name == "metadata":
        metadata.planner_data = {**(metadata.planner_data or {}), "planted": canary}
    elif name == "rank_metadata":
        for rank in range(2):
            (place / name / f"__{rank}.metadata").write_bytes(raw(canary))
    else:
        _make_a_value(place / name, metadata, zipped(canary))
    (place / name / ".metadata").write_bytes(pickle.dumps(metadata))
    if name == "rank_metadata":
        (place / name / ".metadata").unlink()


def _make_a_value(folder: Path, metadata: Any, content: bytes) -> None:
    """Say of a weight that it is a value: stock unpickles what `.metadata` calls one."""
    (folder / "planted.distcp").write_bytes(content)
    key = next(each for each in metadata.state_dict_metadata if each.endswith("0.weight"))
    places = [index for index in metadata.storage_data if index.fqn == key]
    info = metadata.storage_data[places[0]]
    for index in places:
        del metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "planted.distcp", 0, len(content)
    metadata.storage_data[MetadataIndex(key)] = info
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
