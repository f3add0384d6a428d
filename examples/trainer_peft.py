"""Train adapters of PEFT with the Hugging Face Trainer: run it, stop it, run it again.

Only the adapters and their optimizer are saved; the frozen base is referred to, and compared.
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import accelerate_ckpt
from ckpt_core import EverySeconds, EverySteps, OnPreemption


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main(root: str = "runs/trainer", max_steps: str = "50") -> None:
    torch.manual_seed(0)  # a base that is the same in every run, as one from the Hub is
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj", "v_proj"]))
    arguments = TrainingArguments(
        output_dir=root,
        max_steps=int(max_steps),
        save_total_limit=2,
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    # The one new line; `save` replaces `save_strategy`, `save_total_limit` becomes a retention policy.
    accelerate_ckpt.enable_trainer(trainer, save=EverySteps(20) | EverySeconds(300) | OnPreemption())
    latest = accelerate_ckpt.trainer_checkpoints(trainer).latest()
    print("starting afresh" if latest is None else f"resuming from {latest.name}")
    trainer.train(resume_from_checkpoint=True)  # none yet: starts afresh
    newest = accelerate_ckpt.trainer_checkpoints(trainer).latest()
    print(f"newest: {newest.name if newest else 'none'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
