"""The private names of others that we use: a canary, which says by name what a new version of theirs moved.

Dependencies have lower bounds only. What is public there is promised to stay; what is not is listed here, by
host, each with the parameters that we rely on. One that is not listed fails, too, so that the list is whole.
Listed, too, is what is public and replaced: it must still be there, and be called where we expect it. These
are the rows of the table of seams in docs/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "common" / "ckpt_core", ROOT / "lightning_ckpt", ROOT / "accelerate_ckpt"]
OURS = ("ckpt_core", "lightning_ckpt", "accelerate_ckpt")

# "module:path.to.name" -> the first parameters of what is called or replaced, but `self`; None for others.
TORCH = {
    "torch:Tensor._version": None,
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
    "torch.nn:Module._load_from_state_dict": (
        "state_dict prefix local_metadata strict missing_keys unexpected_keys error_msgs"
    ),
    "torch.amp.grad_scaler:GradScaler._lazy_init_scale_growth_tracker": "dev",
    "torch.distributed.distributed_c10d:PrefixStore": None,
    "torch.distributed.distributed_c10d:_get_default_store": "",
    "torch.distributed.tensor:DTensor._local_tensor": None,
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass": "t",
    "torch._utils:_rebuild_wrapper_subclass": None,
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": "",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": None,
    "torch.utils.data:DataLoader._get_iterator": "",
    "torch.utils.data.dataloader:_BaseDataLoaderIter": None,
    "torch.utils.data.dataloader:_BaseDataLoaderIter._reset": "loader first_iter",
}
LIGHTNING = {
    "strategies.fsdp:_lazy_load": "filename",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start": "checkpoint_path",
    "callbacks:ModelCheckpoint._find_last_checkpoints": "trainer",
    "callbacks:ModelCheckpoint.file_exists": "filepath trainer",
    "loops.fit_loop:_FitLoop._should_accumulate": "",
    "loops.fit_loop:_FitLoop._can_stop_early": None,
    "loops.fit_loop:_FitLoop._load_combined_loader_states": "",
    "loops.fit_loop:_FitLoop.on_advance_end": "",
    "loops.fit_loop:_FitLoop.reset": "",
    "loops.training_epoch_loop:_TrainingEpochLoop._num_ready_batches_reached": "",
    "loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx": "data_fetcher",
    "loops.training_epoch_loop:_TrainingEpochLoop.on_advance_end": "data_fetcher",
    "loops.training_epoch_loop:_TrainingEpochLoop.on_run_start": "data_fetcher",
    "loops.training_epoch_loop:_TrainingEpochLoop.reset": "",
    "loops.evaluation_loop:_EvaluationLoop.run": "",
    "loops.evaluation_loop:_EvaluationLoop.setup_data": "",
    "trainer.connectors.logger_connector.result:_ResultCollection.log": "fx name value",
    "utilities.combined_loader:_SUPPORTED_MODES": None,
    "loops.fetchers:_PrefetchDataFetcher": None,
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.dump_checkpoint": "weights_only",
    "trainer.connectors.signal_connector:_SignalConnector.register_signal_handlers": "",
    "trainer.connectors.signal_connector:_SignalConnector.teardown": "",
    "core.saving:pl_load": "path_or_url map_location weights_only",
}
# What the generated subclass of a strategy overrides; see `lightning_ckpt._hooks`.
LIGHTNING_STRATEGY = {
    "launcher": None,
    "lightning_restore_optimizer": None,
    "lightning_module_state_dict": "",
    "optimizer_state": "optimizer",
    "save_checkpoint": "checkpoint filepath storage_options",
    "load_checkpoint": "checkpoint_path weights_only",
    "load_model_state_dict": "checkpoint strict",
    "load_optimizer_state_dict": "checkpoint",
    "remove_checkpoint": "filepath",
    "on_train_start": "",
    "teardown": "",
}
FABRIC = {
    "wrappers:_unwrap_objects": "collection",
    "fabric:Fabric.save": "path state filter",
    "fabric:Fabric.load": "path state strict weights_only",
    "fabric:Fabric.load_raw": "path obj strict weights_only",
    "fabric:Fabric.setup_dataloaders": None,
}
LIGHTNING_TRAINER = (
    "_checkpoint_connector",
    "_logger_connector",
    "_logger_connector._callback_metrics",
    "_signal_connector",
    "_logger_connector._current_fx",
    "_logger_connector._first_loop_iter",
    "_val_check_time_interval",
    "fit_loop._combined_loader",
    "fit_loop._last_train_dl_reload_epoch",
    "fit_loop._loaded_from_state_dict",
    "fit_loop._restart_stage",
    "fit_loop._restarting",
    "fit_loop._resuming_from_checkpoint",
    "fit_loop._data_fetcher",
    "strategy._checkpoint_io",
    "fit_loop.epoch_progress.current.processed",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop.batch_progress.current.completed",
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
    "fit_loop.epoch_loop.val_loop._combined_loader",
)
LIGHTNING_SET = (
    "sanity_checking",
    "should_stop",
    "training",
    "fit_loop.min_epochs",
    "fit_loop.epoch_loop.min_steps",
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
    "scaler",
)
ACCELERATE = {
    "accelerate:Accelerator.save_state": "output_dir safe_serialization",
    "accelerate:Accelerator.load_state": "input_dir load_kwargs",
    "accelerate:Accelerator.end_training": "",
    "accelerate:Accelerator.free_memory": "objects",
    "accelerate:Accelerator.log": None,  # decorated, which hides its parameters
    "accelerate:Accelerator.prepare_optimizer": "optimizer",
    "accelerate:Accelerator.prepare_data_loader": "data_loader",
    "accelerate.data_loader:DataLoaderStateMixin.begin": "",
    "accelerate.data_loader:DataLoaderStateMixin.end": "",
    "accelerate.data_loader:BatchSamplerShard": None,
    "accelerate.data_loader:IterableDatasetShard": None,
    "accelerate.data_loader:SkipBatchSampler": "batch_sampler skip_batches",
    "accelerate.state:GradientState._add_dataloader": "dataloader",
    "accelerate.state:GradientState._remove_dataloader": "dataloader",
    "accelerate.utils.other:TORCH_SAFE_GLOBALS": None,
}
TRANSFORMERS = {
    "transformers:Trainer.create_accelerator_and_postprocess": "",
    "transformers:Trainer.get_batch_samples": "epoch_iterator num_batches",
    "transformers:Trainer.get_eval_dataloader": "eval_dataset",
    "transformers:Trainer.save_model": "output_dir _internal_call",
    "transformers:Trainer.set_initial_training_values": "args dataloader",
    "transformers:Trainer.store_flos": "",
    "transformers:Trainer.train": "resume_from_checkpoint trial",
    "transformers:Trainer._get_output_dir": "trial",
    "transformers:Trainer._init_training_state": "",
    "transformers:Trainer._load_best_model": "",
    "transformers:Trainer._load_from_checkpoint": "resume_from_checkpoint model",
    "transformers:Trainer._load_optimizer_and_scheduler": "checkpoint",
    "transformers:Trainer._load_rng_state": "checkpoint",
    "transformers:Trainer._maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch",
    "transformers:Trainer._run_epoch": "",
    "transformers:Trainer._save": "output_dir state_dict",
    "transformers:Trainer._save_checkpoint": "model trial",
    "transformers:Trainer._save_rng_state": "output_dir",
    "transformers:Trainer._save_optimizer_and_scheduler": "output_dir",
}
# Set by `_inner_training_loop`, and by `_get_dataloader`.
TRAINER = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_eval_dataloaders")
FSSPEC = {
    "fsspec.asyn:AsyncFileSystem": None,
    "fsspec.asyn:sync": "loop func args timeout",
    "fsspec.spec:AbstractBufferedFile.closed": None,
}
# Of objects that tests of their own make; and what other languages than Python's privacy means by "_".
ELSEWHERE = {
    "_exit": "os, documented: the end of a process without cleaning up",
    "_defaults": "torchmetrics.Metric",
    "_last_val_time": "set by Lightning's fit loop if validation is by time",
    "_mode": "lightning.pytorch.utilities.combined_loader.CombinedLoader",
    "_scheduler_state": "lightning.pytorch.callbacks.StochasticWeightAveraging",
    "_drop_last": "accelerate.data_loader.DataLoaderDispatcher",
    "_index_sampler": "a loader's iterator, set in its constructor: see tests/unit/data",
    "_iterator": "torch.utils.data.DataLoader, set in its constructor: the same",
    "_num_yielded": "a loader's iterator: the same",
    "_sampler_iter": "the same",
    "_num_workers": "the same",
    "_prefetch_factor": "the same",
    "_try_put_index": "the same",
    "_worker_queue_idx_cycle": "the same",
    "_dataloader": "a loader of Fabric: see tests/adapters/test_fabric.py",
    "_consumed": "lightning's CombinedLoader: see tests/adapters/test_lightning_data.py",
    "_sampler_iter_yielded": "torchdata's iterator: the same",
    "_finished": "the same",
    "_load_state_dict_pre_hooks": "torch.nn.Module, set in its constructor: see tests/unit/state",
    "_scale": "torch.amp.GradScaler, set in its constructor",
    "_process_group": "torch.distributed._shard.sharded_tensor.ShardedTensor",
    "_fsdp_param_group": "FSDP2's state of a module: see tests/distributed/test_gradients_of_ranks.py",
    "_partial_reduce_output": "the same",
    "_unsharded_param": "the same",
    "_getframe": "sys, documented: who asks a plugin; see tests/adapters/test_lightning_words.py",
    "_accelerator_connector": "lightning's Trainer: see tests/adapters/test_lightning_requeue.py",
    "_checkpoint_name": "lightning's WandbLogger: see tests/adapters/test_lightning_loggers.py",
    "_log_model": "lightning's WandbLogger and MLFlowLogger: the same",
    "_actions": "argparse.ArgumentParser: see tests/unit/cli",
    "_fields": "namedtuple, public",
    "_replace": "namedtuple, public",
    "_asdict": "namedtuple, public",
}


@pytest.mark.parametrize("name", [*TORCH, *ACCELERATE, *TRANSFORMERS, *FSSPEC])
def test_a_name_of_torch_or_of_a_host_is_where_we_use_it(name):
    pytest.importorskip(name.partition(":")[0].partition(".")[0])
    check("", name, {**TORCH, **ACCELERATE, **TRANSFORMERS, **FSSPEC}[name])


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
    assert [path for path in LIGHTNING_TRAINER if lost(trainer, path)] == []
    assert [path for path in LIGHTNING_MODULE if lost(lightning.LightningModule(), path)] == []


@pytest.mark.parametrize("name", LIGHTNING_STRATEGY)
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_what_an_attached_strategy_overrides_is_there(package, name):
    pytest.importorskip(package)
    check(f"{package}.", f"strategies:Strategy.{name}", LIGHTNING_STRATEGY[name])


def test_every_override_of_an_attached_strategy_is_listed():
    strategy = pytest.importorskip("lightning_ckpt._hooks")
    assert strategy._OVERRIDES.keys() - {"__reduce_ex__"} == LIGHTNING_STRATEGY.keys()


@pytest.mark.parametrize(
    ("package", "fabric"),
    [("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")],
)
@pytest.mark.parametrize("name", FABRIC)
def test_a_name_of_fabric_is_where_we_use_it(package, fabric, name):
    pytest.importorskip(package)
    check(f"{fabric}.", name, FABRIC[name])


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_what_we_set_on_a_loader_of_fabric_counts_its_iterations(package):
    fabric = pytest.importorskip(package).Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(range(2)))
    assert loader._num_iter_calls == 0
    list(loader)
    assert loader._num_iter_calls == 1


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_what_we_set_on_a_lightning_trainer_may_be_set(package, tmp_path):
    lightning = pytest.importorskip(package)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    for path in LIGHTNING_SET:
        holder, _, name = path.rpartition(".")
        found = functools.reduce(getattr, filter(None, holder.split(".")), trainer)
        setattr(found, name, getattr(found, name))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_batches_that_lightning_drew_ahead_are_where_we_look_for_them(package):
    fetchers = pytest.importorskip(f"{package}.loops.fetchers")
    assert fetchers._PrefetchDataFetcher().batches == []


def test_loaders_of_accelerate_call_what_we_replace_for_every_epoch_and_batch():
    loaders = pytest.importorskip("accelerate.data_loader")
    seams = {
        loaders.DataLoaderShard: ("self.begin()", "self.base_dataloader.__iter__()", "next(", "self.end()"),
        loaders.DataLoaderDispatcher: ("self.begin()", "self.base_dataloader.__iter__()", "self.end()"),
    }
    for loader, called in seams.items():
        source = inspect.getsource(loader.__iter__)
        places = [source.find(each) for each in called]
        assert places == sorted(places), loader.__name__
        assert min(places) >= 0, loader.__name__
    shards = (loaders.BatchSamplerShard, loaders.IterableDatasetShard)
    for shard in shards:
        assert {"split_batches", "num_processes", "process_index"} <= inspect.signature(
            shard
        ).parameters.keys()
    for method, called in (("begin", "_add_dataloader(self)"), ("end", "_remove_dataloader(self)")):
        source = inspect.getsource(getattr(loaders.DataLoaderStateMixin, method))
        assert f"self.gradient_state.{called}" in source


def test_the_trainer_saves_through_the_methods_that_we_redirect():
    transformers = pytest.importorskip("transformers")
    source = inspect.getsource(transformers.Trainer._save_checkpoint)
    replaced = ("store_flos(", "_get_output_dir(", "save_model(", "_save_optimizer_and_scheduler(")
    assert [each for each in replaced if f"self.{each}" not in source] == []


def test_the_trainer_runs_epochs_as_we_follow_them():
    """From the numbers that it computes first, with the arguments that we change."""
    transformers = pytest.importorskip("transformers")
    loop = inspect.getsource(transformers.Trainer._inner_training_loop)
    loaders = inspect.getsource(transformers.Trainer._get_dataloader)
    assert [name for name in TRAINER if f"self.{name} =" not in loop + loaders] == []
    used = (
        "epoch train_dataloader steps_in_epoch num_update_steps_per_epoch resume_from_checkpoint "
        "epochs_trained steps_trained_in_current_epoch"
    )
    assert [name for name in used.split() if f"{name}={name}," not in loop] == []
    assert "range(epochs_trained, num_train_epochs)" in loop
    unpacked = "num_train_epochs, num_update_steps_per_epoch, num_examples, num_train_samples, "
    unpacked += "total_train_batch_size, steps_in_epoch, max_steps, ) = self.set_initial_training_values("
    assert unpacked in " ".join(loop.split())
    epoch = inspect.getsource(transformers.Trainer._run_epoch)
    skipping, loading, fetching = "skip_first_batches(", "_load_rng_state(resume", "get_batch_samples("
    assert "skip_first_batches" in vars(transformers.trainer)
    assert epoch.index(skipping) < epoch.index(fetching) < epoch.rindex(loading)


def test_a_loader_keeps_its_dataset_where_we_replace_it():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(range(4), batch_size=2)
    assert {"dataset", "batch_sampler", "sampler"} <= vars(loader).keys()


def test_what_we_set_on_arguments_and_state_of_a_trainer_is_there():
    transformers = pytest.importorskip("transformers")
    arguments = inspect.signature(transformers.TrainingArguments).parameters
    assert {"save_total_limit", "save_strategy", "hub_token"} <= arguments.keys()
    state = inspect.signature(transformers.TrainerState).parameters
    assert {"best_global_step", "best_model_checkpoint", "log_history"} <= state.keys()


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
    tables = (TORCH, LIGHTNING, LIGHTNING_STRATEGY, FABRIC, ACCELERATE, TRANSFORMERS, FSSPEC)
    listed = {name for table in tables for key in table for name in parts(key)}
    listed |= {
        name
        for table in (LIGHTNING_TRAINER, LIGHTNING_MODULE, ACCELERATOR, TRAINER)
        for key in table
        for name in parts(key)
    }
    listed |= set(ELSEWHERE)
    own = {name for path in modules() for name in defined(nodes(path))}
    used = {(name, path.name) for path in modules() for name in private_names(nodes(path)) if name not in own}
    assert sorted(f"{name} in {path}" for name, path in used if name not in listed) == []


def test_the_core_uses_private_names_of_torch_in_one_module_only():
    ours = {name for key in TORCH for name in parts(key) if is_private(name)}
    core = [path for path in modules() if "ckpt_core" in path.parts]
    used = {f"{name} in {path.name}" for path in core for name in private_names(nodes(path)) if name in ours}
    assert sorted(each for each in used if not each.endswith(" in _torch_internals.py")) == []


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


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The nodes of a module that define or use a name; the rest is nine tenths of them."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute, ast.ImportFrom)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def defined(found: list[ast.AST]) -> Iterator[str]:
    """Names that we make ourselves: functions, classes, variables, fields."""
    for node in found:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if isinstance(node.value, ast.Name) and node.value.id == "self" else []


def private_names(found: list[ast.AST]) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(OURS):
            inside = any(map(is_private, (node.module or "").split(".")))
            yield from (each.name for each in node.names if inside or is_private(each.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"
