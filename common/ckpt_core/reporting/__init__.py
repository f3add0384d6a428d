"""Reports on a root: what saves cost, what failures took, what would cost less.

`report_of` reads the journal and the checkpoints of a root; `sections` are a report in words and tables, and
`page` is one self-contained HTML page of it.
"""

from ckpt_core.reporting._facts import Report, moment, report_of, seconds_text
from ckpt_core.reporting._sections import page, sections

__all__ = ["Report", "moment", "page", "report_of", "seconds_text", "sections"]
