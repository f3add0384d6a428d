"""The private names of others that we use: a canary, which says by name what a new version of theirs moved.

Dependencies have lower bounds only. What is public there is promised to stay; what is not is listed here, by
host, each with the parameters that we rely on. One that is not listed fails, too, so that the list is whole.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "common" / "ckpt_core", ROOT / "lightning_ckpt", ROOT / "accelerate_ckpt"]
OURS = ("ckpt_core", "lightning_ckpt", "accelerate_ckpt")

# "module:path.to.name" -> the first parameters of what is called or replaced, but `self`; None for others.
TORCH = {
    "torch:_foreach_copy_": None,
    "torch._utils:_rebuild_tensor_v2": "storage storage_offset size stride requires_grad backward_hooks",
    "torch._utils:_rebuild_tensor_v3": (
        "storage storage_offset size stride requires_grad backward_hooks dtype"
    ),
    "torch._utils:_rebuild_parameter": "data requires_grad backward_hooks",
    "torch._utils:_rebuild_qtensor": "storage",
    "torch._tensor:_rebuild_from_type_v2": "func",
    "torch.storage:_new_dtypes": "",
    "torch.storage:_dtype_to_storage_type_map": "",
    "torch.storage:_storage_type_to_dtype_map": "",
    "torch.serialization:_get_layout": "name",
    "torch.distributed._shard.sharded_tensor:Shard": None,
    "torch.distributed._shard.sharded_tensor:ShardedTensor": None,
    "torch.distributed._shard.sharded_tensor:ShardedTensor._init_from_local_shards_and_global_metadata": (
        "local_shards sharded_tensor_metadata process_group"
    ),
    "torch.distributed.checkpoint.filesystem:CURRENT_DCP_VERSION": None,
    "torch.distributed.checkpoint.filesystem:_StorageInfo": (
        "relative_path offset length transform_descriptors"
    ),
    "torch.distributed.checkpoint._traverse:set_element": "root_dict path value",
    "torch.distributed.checkpoint.filesystem:FileSystemReader._get_metadata_path": "rank",
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING": None,
    "torch.distributed.checkpoint.planner_helpers:_create_chunk_list": "tensor",
    "torch.amp.grad_scaler:GradScaler._lazy_init_scale_growth_tracker": "dev",
    "torch.distributed.distributed_c10d:PrefixStore": None,
    "torch.distributed.distributed_c10d:_get_default_store": "",
    "torch.distributed.tensor.placement_types:_StridedShard": "dim",
}
LIGHTNING = {
    "strategies.fsdp:_lazy_load": "filename",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector": None,
    "trainer.connectors.checkpoint_connector:_CheckpointConnector._select_ckpt_path": (
        "state_fn ckpt_path model_provided model_connected"
    ),
    "trainer.connectors.checkpoint_connector:_CheckpointConnector._get_loops_state_dict": "",
    "loops.fit_loop:_FitLoop._should_accumulate": "",
    "loops.fit_loop:_FitLoop._can_stop_early": None,
    "loops.fit_loop:_FitLoop._load_combined_loader_states": "",
    "loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx": "data_fetcher",
}
LIGHTNING_TRAINER = (
    "_checkpoint_connector",
    "_checkpoint_connector._user_managed",
    "_logger_connector",
    "_logger_connector._callback_metrics",
    "_signal_connector",
    "fit_loop._combined_loader",
    "fit_loop._data_fetcher",
    "strategy._checkpoint_io",
)
LIGHTNING_MODULE = ("_current_fx_name",)
ACCELERATOR = (
    "_custom_objects",
    "_dataloaders",
    "_load_model_state_pre_hook",
    "_models",
    "_optimizers",
    "_save_model_state_pre_hook",
    "_schedulers",
)
TRANSFORMERS = {
    "transformers:Trainer._get_output_dir": "trial",
    "transformers:Trainer._load_best_model": "",
    "transformers:Trainer._load_from_checkpoint": "resume_from_checkpoint model",
    "transformers:Trainer._load_optimizer_and_scheduler": "checkpoint",
    "transformers:Trainer._maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch",
    "transformers:Trainer._save": "output_dir state_dict",
    "transformers:Trainer._save_checkpoint": "model trial",
    "transformers:Trainer._save_optimizer_and_scheduler": "output_dir",
}
# Of objects that tests of their own make; and what other languages than Python's privacy means by "_".
ELSEWHERE = {
    "_drop_last": "accelerate.data_loader.DataLoaderDispatcher",
    "_scale": "torch.amp.GradScaler, set in its constructor",
    "_process_group": "torch.distributed._shard.sharded_tensor.ShardedTensor",
    "_fields": "namedtuple, public",
    "_replace": "namedtuple, public",
    "_asdict": "namedtuple, public",
}


@pytest.mark.parametrize("name", [*TORCH, *TRANSFORMERS])
def test_a_private_name_of_torch_or_transformers_is_where_we_use_it(name):
    pytest.importorskip(name.partition(":")[0].partition(".")[0])
    check("", name, {**TORCH, **TRANSFORMERS}[name])


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("name", LIGHTNING)
def test_a_private_name_of_lightning_is_where_we_use_it(package, name):
    pytest.importorskip(package)
    check(f"{package}.", name, LIGHTNING[name])


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_what_we_use_of_a_lightning_trainer_is_there(package, tmp_path):
    lightning = pytest.importorskip(package)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    connector = trainer._checkpoint_connector
    moved = [path for path in LIGHTNING_TRAINER if not path.endswith("_user_managed") and lost(trainer, path)]
    source = inspect.getsource(type(connector))
    assert moved == []
    assert "_user_managed" in source, "given up or renamed in _CheckpointConnector"
    assert [path for path in LIGHTNING_MODULE if lost(lightning.LightningModule(), path)] == []


def test_what_we_use_of_an_accelerator_is_there():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    assert [name for name in ACCELERATOR if name not in vars(accelerator)] == []


def test_stock_load_state_reads_no_more_kinds_of_files_than_we_know():
    """A new file that it unpickles would be new code that a checkpoint can run."""
    checkpointing = pytest.importorskip("accelerate.checkpointing")
    readers = (checkpointing.load_accelerator_state, checkpointing.load_custom_state)
    calls = [call for reader in readers for call in loads(inspect.getsource(reader))]
    trusting = [call for call in calls if "weights_only=False" in call]
    assert trusting == ["load(load_location, map_location='cpu', weights_only=False)"], "of custom objects"
    assert len(calls) <= 8, f"accelerate reads another file: see accelerate_ckpt/_small_files.py; {calls}"


def test_every_private_name_that_we_use_is_listed():
    listed = {name for table in (TORCH, LIGHTNING, TRANSFORMERS) for key in table for name in parts(key)}
    listed |= {
        name
        for table in (LIGHTNING_TRAINER, LIGHTNING_MODULE, ACCELERATOR)
        for key in table
        for name in parts(key)
    }
    listed |= set(ELSEWHERE)
    trees = [(path, ast.parse(path.read_text())) for path in modules()]
    own = {name for _, tree in trees for name in defined(tree)}
    used = {(name, path.name) for path, tree in trees for name in private_names(tree) if name not in own}
    assert sorted(f"{name} in {path}" for name, path in used if name not in listed) == []


def check(prefix: str, name: str, parameters: str | None) -> None:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(prefix + module)
    for part in path.split("."):
        found = (
            inspect.getattr_static(found, part, None)
            if inspect.isclass(found)
            else getattr(found, part, None)
        )
        assert found is not None, f"{prefix}{module} has no {path} any more"
    if parameters is None:
        return
    found = getattr(found, "__func__", found)
    try:
        taken = inspect.signature(found).parameters
    except ValueError:
        return  # written in C++, as some are in some versions of torch: it tells nothing of its parameters
    given = [each for each in taken if each != "self" and each != "cls"]
    assert given[: len(parameters.split())] == parameters.split(), (
        f"{prefix}{name} takes other parameters now"
    )


def loads(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    called = ("load", "torch.load", "pickle.load", "pickle.loads", "np.load")
    return [ast.unparse(call) for call in calls if ast.unparse(call.func) in called]


def lost(holder: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(holder, part):
            return True
        holder = getattr(holder, part)
    return False


def parts(key: str) -> list[str]:
    return key.replace(":", ".").split(".")


def modules() -> Iterator[Path]:
    for source in SOURCES:
        yield from (path for path in source.rglob("*.py") if "testing" not in path.parts)


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that we make ourselves: functions, classes, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(OURS):
            inside = any(map(is_private, (node.module or "").split(".")))
            yield from (each.name for each in node.names if inside or is_private(each.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"
