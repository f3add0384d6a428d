"""A sample of what others wrote: one project, killed and resumed; and that the suites know their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.outside import projects, suites

PACKAGES = Path(sys.prefix) / "outside"


@pytest.mark.slow
@pytest.mark.skipif(not (PACKAGES / "site-packages" / "litgpt").is_dir(), reason="litgpt is not installed")
def test_a_project_that_nobody_here_wrote_resumes_exactly(tmp_path):
    result = projects.judge("litgpt", tmp_path, PACKAGES, stock=False)
    assert result.problem == ""
    assert 0 < result.resumed_at < result.steps


def test_every_project_has_a_driver_and_every_suite_a_door():
    drivers = {path.stem for path in (Path(__file__).parent / "cases").glob("*.py")}
    assert drivers == projects.PROJECTS.keys()
    text = (Path(__file__).parent / "injection.py").read_text(encoding="utf-8")
    assert all(f'"{suite.door}": ' in text for suite in suites.SUITES.values())


def test_a_difference_that_no_page_documents_is_one_to_mend():
    told = suites.Difference(
        test="a", message="E   IsADirectoryError: [Errno 21] Is a directory: 'last.ckpt'"
    )
    untold = suites.Difference(test="b", message="E   AssertionError: assert 3 == 4")
    assert (told.documented, untold.documented) == ("a checkpoint is a directory", None)
    assert suites.Difference(test="a", message=told.message, door="trainer").documented is None, (
        "of Lightning"
    )
    lineage = "E   AssertionError: best_model_path"
    doors = {door: suites.Difference(test="c", message=lineage, door=door) for door in ("callback", "plugin")}
    assert [door for door, each in doors.items() if each.documented] == ["callback"]


@pytest.mark.parametrize(
    ("looks", "failed"),
    [
        ("    assert os.path.isfile(last)", ">   assert trainer.global_step == 4"),
        ("    torch_save = Mock()", ">   assert model.loaded"),
        ("    # .ckpt-suite is left out", ">   trainer.fit(model)"),
    ],
)
def test_only_the_statement_that_failed_tells_what_a_difference_is(looks, failed):
    message = f"assert 3 == 4\n{looks}\n{failed}\nE   AssertionError: assert 3 == 4"
    assert suites.Difference(test="a", message=message).documented is None


def test_a_resumed_run_that_differs_is_found():
    whole = [{"parameters": number, "generators": number} for number in range(4)]
    other = [*whole[:3], {"parameters": 9, "generators": 3}]
    assert projects._difference(whole, whole) == ""
    assert projects._difference(whole, other) == "step 4 differs in parameters"
    assert projects._difference(whole, whole[1:]) == "3 steps, not 4"
