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
    assert isinstance(coordinator_for_job().as_of_now(), Solo)


def test_one_rank_agrees_with_itself():
    solo = Solo()
    assert solo.is_coordinator
    assert solo.agree({"a": 1}) == {"a": 1}
    assert solo.exchange(2, lambda values: [values[0] * 10]) == 20
    assert solo.gather("x") == ["x"]
    assert solo.once(lambda: 5) == 5
    assert solo.combine([3, 0, 7]) == (3, 0, 7)
    assert solo.meet("name", b"in", lambda payloads: payloads[0] + b" out", deadline_seconds=1) == b"in out"
    solo.close()


def test_errors_are_those_of_a_larger_job():
    solo = Solo()
    with pytest.raises(CheckpointExistsError, match="there already") as exists:
        solo.exchange(1, refuse)
    assert exists.value.step == 3
    with pytest.raises(CoordinationError, match=r"rank 0: OSError: .*No space") as failed:
        solo.exchange(1, fail)
    assert isinstance(failed.value.__cause__, OSError)
    assert failed.value.failures == {0: "OSError: [Errno 28] No space left on device"}


@pytest.mark.parametrize("verb", ["exchange", "gather", "meet"])
def test_a_value_that_could_not_be_made_is_an_error(verb):
    solo, error = Solo(), KeyError("lost")
    calls = {
        "exchange": lambda: solo.exchange(error, lambda values: values),
        "gather": lambda: solo.gather(error),
        "meet": lambda: solo.meet("name", error, b"".join, deadline_seconds=1),
    }
    with pytest.raises(CoordinationError, match="rank 0: KeyError: 'lost'") as caught:
        calls[verb]()
    assert caught.value.__cause__ is error
