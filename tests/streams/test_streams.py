"""The order of work on devices, proved on simulated ones: no device has run this code.

Every scenario is executed in every order that its streams allow: no step overwrites a tensor before its copy,
no slot is written before it is filled, no memory is used again too early. And every fault put into the code
that orders this work is found by a scenario.
"""

from __future__ import annotations

import ast
import inspect
from contextlib import ExitStack
from functools import partial

import pytest

from tests.streams.explore import execute, explore, try_at_random
from tests.streams.mutants import MODULES, WRONG, Mutant, changed, without_a_call
from tests.streams.scenarios import SCENARIOS, a_long_training

LEFT_OUT = list(without_a_call())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_the_order_of_work_holds_in_every_execution(scenario):
    assert explore(scenario) >= 1


def test_the_order_of_work_holds_in_many_executions_of_a_long_training():
    try_at_random(a_long_training, times=40)


@pytest.mark.parametrize("mutant", LEFT_OUT, ids=lambda each: each.name)
def test_a_call_left_out_is_found(mutant):
    assert found(mutant)


@pytest.mark.parametrize("fault", WRONG, ids=lambda each: each[0])
def test_a_wrong_order_is_found(fault):
    assert found(changed(*fault))


def test_there_are_enough_mutants():
    assert len(LEFT_OUT) >= 12
    assert len(WRONG) >= 12


def found(mutant: Mutant) -> bool:
    """Whether a scenario fails: with the device as late as it can be, in a few orders, else in any."""
    with mutant.in_place():
        for attempt in (execute, partial(try_at_random, times=8), explore):
            for scenario in SCENARIOS:
                try:
                    attempt(scenario)
                except Exception:
                    return True
    return False


def test_code_without_a_fault_is_found_right():
    """The control: what puts faults into place is no fault itself."""
    with ExitStack() as stack:
        for module in MODULES:
            same = ast.unparse(ast.parse(inspect.getsource(module)))
            stack.enter_context(Mutant("none", module, same).in_place())
        for scenario in SCENARIOS:
            try_at_random(scenario, times=2)
