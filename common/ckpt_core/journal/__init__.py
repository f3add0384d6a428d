"""The journal of a root: what happened to it, and how often its job fails.

Two files of JSON lines. `history.jsonl` has the starts and ends of runs, `events.jsonl` their saves, loads,
uploads and prunes. They are for people, reports and the choice of an interval; no save or load depends on
them.
"""

from ckpt_core.journal._carrying import JoinedJournal, RunJournal
from ckpt_core.journal._failure_rate import PRIOR, Prior, failure_rate
from ckpt_core.journal._files import add_event, read_events, read_history
from ckpt_core.journal._journal import Journal
from ckpt_core.journal._records import MOST_STEPS, Record

__all__ = [
    "MOST_STEPS",
    "PRIOR",
    "JoinedJournal",
    "Journal",
    "Prior",
    "Record",
    "RunJournal",
    "add_event",
    "failure_rate",
    "read_events",
    "read_history",
]
