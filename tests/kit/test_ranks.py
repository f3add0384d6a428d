"""A distributed test that cannot fail loudly is worse than none."""

from __future__ import annotations

import os
import resource
import signal
import threading

import pytest
import torch

from tests.kit.ranks import RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed


def add_up(extra: int) -> tuple[int, int, str]:
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + extra])
    dist.all_reduce(value)
    return dist.get_rank(), int(value), os.environ["LOCAL_RANK"]


def fail_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ZeroDivisionError("only here")
    threading.Event().wait()


def die_on_zero() -> str:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("dying", "now")
        os.kill(os.getpid(), signal.SIGKILL)
    store.get("dying")
    # A key after the death: the store must outlive rank 0.
    store.set("survived", "yes")
    return store.get("survived").decode()


def abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def wait_forever() -> None:
    a_name_to_find_in_the_stacks()


def a_name_to_find_in_the_stacks() -> None:
    threading.Event().wait()


def test_every_rank_returns_its_result_in_rank_order():
    assert run_ranks(add_up, 2, 10) == [(0, 21, "0"), (1, 21, "1")]


def test_a_failure_brings_its_traceback_and_ends_the_others():
    with pytest.raises(RanksFailedError, match="ZeroDivisionError: only here") as caught:
        run_ranks(fail_on_one, 2)
    assert "rank 1 of 2 failed first" in str(caught.value)
    assert "fail_on_one" in caught.value.reports[0], "the stacks of the rank that waited"


def test_a_rank_may_die_when_that_is_the_test():
    assert run_ranks(die_on_zero, 2, expect_death={0}) == [None, "yes"]


def test_an_unexpected_death_and_an_unexpected_survival_are_failures():
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(die_on_zero, 2)
    with pytest.raises(RanksFailedError, match="expected to die by SIGKILL"):
        run_ranks(os.getpid, 1, expect_death={0}, process_group=False)


def test_a_crash_below_python_brings_the_stacks_of_its_rank():
    with pytest.raises(RanksFailedError, match=f"exit code -{signal.SIGABRT:d}") as caught:
        run_ranks(abort, 1, process_group=False)
    assert "Fatal Python error: Aborted" in caught.value.reports[0]
    assert "in abort" in caught.value.reports[0]


@pytest.mark.slow
def test_a_hang_ends_with_every_ranks_stacks():
    run_ranks(os.getpid, 1, process_group=False)  # its imports are not the hang
    with pytest.raises(RanksFailedError, match="ranks 0, 1 did not finish within") as caught:
        run_ranks(wait_forever, 2, timeout_seconds=3, process_group=False)
    assert all("a_name_to_find_in_the_stacks" in report for report in caught.value.reports.values())
