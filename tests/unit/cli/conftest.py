from __future__ import annotations

import pytest

from ckpt_core.cli import main


@pytest.fixture
def ckpt(capsys):
    """Runs the command in this process; returns exit code, standard output, standard error."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as usage:
            code = usage.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
