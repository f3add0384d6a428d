"""Commands that look at roots and checkpoints, and change nothing."""

from ckpt_core.cli.inspection import _diff as diff
from ckpt_core.cli.inspection import _du as du
from ckpt_core.cli.inspection import _ls as ls
from ckpt_core.cli.inspection import _report as report
from ckpt_core.cli.inspection import _show as show

__all__ = ["diff", "du", "ls", "report", "show"]
