"""Models that transformers shards itself, in a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {"fsdp_size": 2},
    "HSDP": {"fsdp_size": 1, "dp_replicate_size": 2},
    "tensor parallel": {"tp_size": 2},
    "experts": {"ep_size": 2, "fsdp_size": 2},
}
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def save_base(root: Path, layout: str) -> None:
    """Write the model that every training begins from."""
    import transformers as hf

    torch.manual_seed(0)
    if layout == "experts":
        config = hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        model: Any = hf.MixtralForCausalLM(config)
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    model.save_pretrained(root / layout / "base")


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) * (index + 1)) % SIZES["vocab_size"]
        return {"input_ids": ids, "labels": ids}


def weights(folder: Path, layout: str = "") -> Any:
    """Load a model from its directory, sharded as the layout says."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    sharded = {"distributed_config": DistributedConfig(**LAYOUTS[layout])} if layout else {}
    return AutoModelForCausalLM.from_pretrained(folder, **sharded)


def train(model: Any, root: Path, resume: Path | None, steps: int) -> dict[str, torch.Tensor]:
    """Train to a step and return the weights in full."""
    from transformers import Trainer, TrainingArguments

    import accelerate_ckpt
    from ckpt_core import EverySteps

    arguments = TrainingArguments(
        output_dir=str(root),
        max_steps=steps,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    accelerate_ckpt.enable_trainer(trainer, save=EverySteps(3))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    found = full_weights(trainer.model)
    accelerate_ckpt.disable_trainer(trainer)
    return found


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def resumed_alike(root: str) -> dict[str, list[str]]:
    """Return, of each layout, the weights that differ after a resume on the same ranks, and on."""
    from accelerate.parallelism_config import ParallelismConfig

    # Accelerate wants several GPUs for tensor parallelism, and uses them for nothing that is saved.
    ParallelismConfig._validate_accelerator = lambda *_: None  # type: ignore[method-assign]
    differing: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        folder = Path(root) / layout
        expected = train(weights(folder / "base", layout), folder / "run", None, 5)
        dist.barrier()
        again = train(weights(folder / "base", layout), folder / "again", folder / "run" / "checkpoint-3", 5)
        differing[layout] = [name for name, value in expected.items() if not torch.equal(value, again[name])]
    return differing
