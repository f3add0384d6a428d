"""What an optimizer trains may be registered in place of prepared: a loss with parameters, or the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import accelerate_ckpt
from tests.adapters.accelerate_jobs import Job, accelerator, forget_accelerators

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
BATCHES = 8


class Training:
    """A model and a loss with parameters, and how the accelerator gets to know them."""

    def __init__(self, how: str, root: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.made = accelerator(Job(root=str(root), accumulation=4 if how == "within a window" else 1))
        accelerate_ckpt.enable(self.made, gradients=how == "within a window")
        net, loss = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        average = torch.optim.swa_utils.AveragedModel(net)
        each = [net.parameters(), loss.parameters()]
        groups = each if how == "an optimizer of its own" else [[p for part in each for p in part]]
        self.optimizers = [self.made.prepare(torch.optim.AdamW(group, lr=0.1)) for group in groups]
        if how == "nothing is prepared":
            self.made.register_for_checkpointing(average, net, loss)
        else:
            net = self.made.prepare(net)
            self.made.register_for_checkpointing(average, loss)
        self.net, self.loss = net, loss

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            with self.made.accumulate(self.net):
                batch = torch.arange(6.0).reshape(2, 3).roll(number)
                self.made.backward(self.loss(self.net(batch)).tanh().sum())
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    def end(self) -> list[torch.Tensor]:
        self.made.end_training()
        forget_accelerators()
        return [*self.net.state_dict().values(), *self.loss.state_dict().values()]


@pytest.mark.parametrize(
    "how", ["one optimizer", "an optimizer of its own", "nothing is prepared", "within a window"]
)
def test_a_registered_module_that_is_trained_resumes_as_under_stock(how: str, tmp_path: Path) -> None:
    whole = Training(how, tmp_path, seed=1)
    whole.train(0, 3)
    whole.made.save_state(str(tmp_path / "third"))
    whole.train(3, BATCHES)
    expected = whole.end()
    resumed = Training(how, tmp_path, seed=2)
    resumed.made.load_state(str(tmp_path / "third"))
    resumed.train(3, BATCHES)
    assert all(map(torch.equal, expected, resumed.end()))
