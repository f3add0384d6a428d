"""A save in the background cannot call a collective: its channel has none, and it has no coordinator."""

from __future__ import annotations

import ast
from pathlib import Path

import ckpt_core
from ckpt_core.coordination import CommitChannel, Coordinator

COLLECTIVES = {
    "broadcast_tensor",
    "gather",
    "gather_scatter",
    "run_on_coordinator",
    "all_reduce_max",
}


def test_a_commit_channel_has_no_collective():
    assert set(dir(Coordinator)) >= COLLECTIVES
    assert not COLLECTIVES & set(dir(CommitChannel))


def test_a_save_in_the_background_knows_a_channel_and_no_coordinator():
    sources = [path.read_text() for path in Path(ckpt_core.__path__[0]).rglob("*.py")]
    (source,) = [each for each in sources if "\nclass Save(Task):" in each]
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert "CommitChannel" in names
    assert not names & {"Coordinator", "coordinator", "_coordinator"}
