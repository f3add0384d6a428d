"""Every load by Accelerate or a Trainer says which step of which root it has restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

import accelerate_ckpt


def trained(root: Any, steps: int = 0) -> Accelerator:
    accelerator = accelerate_ckpt.enable(Accelerator(cpu=True), root)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        accelerator.save_state()
    return accelerator


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what a terminal shows without any setup of logging."""
    found = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    caplog.clear()
    return [each for each in found if each.startswith("Restored")]


def test_load_state_tells_once_what_it_restored(tmp_path, caplog):
    ours = trained(tmp_path / "run", steps=2)
    accelerate_ckpt.disable(ours).save_state(str(tmp_path / "run" / "stocks"))
    accelerator = trained(tmp_path / "run")
    accelerator.load_state()
    assert told(caplog) == [f"Restored step 2 of {tmp_path}/run (checkpoint checkpoint_1)"]
    accelerator.load_state(str(tmp_path / "run" / "checkpoint_0"), strict=False)
    assert told(caplog) == [f"Restored step 1 of {tmp_path}/run (checkpoint checkpoint_0)"]
    accelerator.load_state(str(tmp_path / "run" / "stocks"))
    assert told(caplog) == [f"Restored step 2 of {tmp_path}/run (checkpoint stocks)"]
    trained(tmp_path / "new").load_state()
    assert told(caplog) == []


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, x: Any = None, labels: Any = None) -> Any:
        return {"loss": self.net(x).pow(2).sum()}


def test_a_resumed_trainer_tells_once_what_it_restored(tmp_path, caplog):
    data = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 8

    def train(steps: int, resume: Any) -> None:
        arguments = TrainingArguments(
            tmp_path, report_to="none", max_steps=steps, use_cpu=True, disable_tqdm=True, save_steps=2
        )
        trainer = accelerate_ckpt.enable_trainer(Trainer(Net(), arguments, train_dataset=data))
        trainer.train(resume_from_checkpoint=resume)

    train(2, resume=True)
    assert told(caplog) == []
    train(4, resume=True)
    assert told(caplog) == [f"Restored step 2 of {tmp_path} (checkpoint checkpoint-2)"]
    train(5, resume=str(tmp_path / "checkpoint-4"))
    assert told(caplog) == [f"Restored step 4 of {tmp_path} (checkpoint checkpoint-4)"]
