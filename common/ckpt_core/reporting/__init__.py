"""Reports on a root: what saves cost, what failures took, what would cost less.

`report_of` reads the journal and the checkpoints of a root; `sections` are a report in words and tables, and
`page` is one self-contained HTML page of it.
"""

from ckpt_core.reporting._facts import Report, goodput, report_of
from ckpt_core.reporting._sections import Section, page, sections, why_kept

__all__ = ["Report", "Section", "goodput", "page", "report_of", "sections", "why_kept"]
