from __future__ import annotations

import pytest
import torch.distributed as dist

from ckpt_core.coordination import Solo, coordinator_for_job
from ckpt_core.errors import CheckpointExistsError, CoordinationError


def refuse(_: object) -> list[int]:
    raise CheckpointExistsError("there already", step=3)


def fail(_: object) -> list[int]:
    raise OSError(28, "No space left on device")


def test_a_job_without_torch_distributed_gets_it():
    assert not dist.is_initialized()
    assert coordinator_for_job().world_size == 1


def test_one_rank_agrees_with_itself():
    solo = Solo()
    assert solo.is_coordinator
    assert solo.broadcast({"a": 1}) == {"a": 1}
    assert solo.gather_scatter(2, lambda values: [values[0] * 10]) == 20
    assert solo.gather("x") == ["x"]
    assert solo.run_on_coordinator(lambda: 5) == 5
    assert solo.all_reduce_max([3, 0, 7]) == (3, 0, 7)
    assert (
        solo.commit_channel().commit_barrier(
            "name", b"in", lambda payloads: payloads[0] + b" out", deadline_seconds=1
        )
        == b"in out"
    )
    assert solo.commit_channel().broadcast("name", lambda: 6, deadline_seconds=1) == 6
    solo.close()


def test_errors_are_those_of_a_larger_job():
    solo = Solo()
    with pytest.raises(CheckpointExistsError, match="there already") as exists:
        solo.gather_scatter(1, refuse)
    assert exists.value.step == 3
    with pytest.raises(CoordinationError, match=r"rank 0: OSError: .*No space") as failed:
        solo.gather_scatter(1, fail)
    assert isinstance(failed.value.__cause__, OSError)
    assert failed.value.failures == {0: "OSError: [Errno 28] No space left on device"}


@pytest.mark.parametrize("verb", ["gather_scatter", "gather", "commit_barrier"])
def test_a_value_that_could_not_be_made_is_an_error(verb):
    solo, error = Solo(), KeyError("lost")
    calls = {
        "gather_scatter": lambda: solo.gather_scatter(error, lambda values: values),
        "gather": lambda: solo.gather(error),
        "commit_barrier": lambda: solo.commit_channel().commit_barrier(
            "name", error, b"".join, deadline_seconds=1
        ),
    }
    with pytest.raises(CoordinationError, match="rank 0: KeyError: 'lost'") as caught:
        calls[verb]()
    assert caught.value.__cause__ is error
