"""The journal of a root: what happened to it, and how often its job fails.

A file of JSON lines for each run: its start and end, its saves, loads, uploads and prunes. They are for
people, reports and the choice of an interval; no save or load depends on them.
"""

from ckpt_core.journal._journal import Journal
from ckpt_core.journal._records import MOST_STEPS, PRIOR, Prior, Record, failure_rate
from ckpt_core.journal._run_files import add_event, read_events, read_history, unread

__all__ = [
    "MOST_STEPS",
    "PRIOR",
    "Journal",
    "Prior",
    "Record",
    "add_event",
    "failure_rate",
    "read_events",
    "read_history",
    "unread",
]
