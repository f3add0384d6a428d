"""Objects registered for checkpointing whose tensors are sharded, such as a moving average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters import accelerate_jobs
from tests.adapters.accelerate_jobs import Job
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


class Average:
    """A moving average of weights, by name."""

    def __init__(self, net: nn.Module) -> None:
        self.values = {name: each.detach().clone() for name, each in net.named_parameters()}

    def update(self, net: nn.Module) -> None:
        for name, each in net.named_parameters():
            self.values[name].lerp_(each.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in self.values.items():
            each.copy_(state["values"][name])


def average(job: Job) -> dict[str, torch.Tensor]:
    """Train and save, or load; tell this rank's part of the average."""
    made, net, optimizer, _, loader = accelerate_jobs.prepared(job)
    kept = Average(net)
    made.register_for_checkpointing(kept)
    if job.resume:
        made.load_state(job.load)
    else:
        for batch in loader:
            made.backward(net(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            kept.update(net)
        made.save_state(job.load)
    made.end_training()
    return {name: getattr(each, "_local_tensor", each) for name, each in kept.values.items()}


def saved_and_loaded(jobs: list[Job]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        tuple(accelerate_jobs.in_turn([job, job.but(resume=True)], average))  # type: ignore[misc]
        for job in jobs
    ]


def test_every_rank_gets_its_own_shards_of_a_registered_object(tmp_path):
    """Stock gives all of them the first rank's."""
    jobs = [
        Job(strategy=each, root=str(tmp_path / each), load=str(tmp_path / each / "saved"))
        for each in ("tp", "fsdp2")
    ]
    for of_rank in run_ranks(saved_and_loaded, 2, jobs, timeout_seconds=120):
        for saved, loaded in of_rank:
            assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
