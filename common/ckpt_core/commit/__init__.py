"""Commit protocol, catalog, verification and removal of checkpoints; the lease.

The one rule of the whole suite is enforced here: no `COMMITTED`, no checkpoint. Nothing in this package needs
torch, so that listing and verifying stay fast.
"""

from ckpt_core.commit._catalog import (
    Catalog,
    Survey,
    known_pins,
    plain_files,
    plain_storage,
    read_entry,
    read_manifest,
)
from ckpt_core.commit._inventory import Inventory
from ckpt_core.commit._lease import Lease, Owner
from ckpt_core.commit._manifest import (
    MAX_MARKER_BYTES,
    NEWEST_FORMAT,
    ItemKind,
    Manifest,
    Marker,
    next_lineage,
    on_present_line,
    present_lineage,
)
from ckpt_core.commit._notes import forget_notes, in_use, note_measured, read_notes
from ckpt_core.commit._occupant import (
    Occupant,
    content_of,
    describe,
    file_as_root,
    look_around,
    quarantine,
    refuse_as_root,
    replaced,
)
from ckpt_core.commit._protocol import (
    abandon,
    begin,
    commit,
    commit_copy,
    is_name,
    require_free,
    working_name,
)
from ckpt_core.commit._prune import collect_orphans, remove, remove_drafts, settle_asides, strangers
from ckpt_core.commit._signature import MAX_SIGNATURE_BYTES, require_trusted, write_signature
from ckpt_core.commit._stock_dcp import stock_parts, verify_part, verify_stock
from ckpt_core.commit._verify import TensorEntry, list_tensors, share, verify

__all__ = [
    "MAX_MARKER_BYTES",
    "MAX_SIGNATURE_BYTES",
    "NEWEST_FORMAT",
    "Catalog",
    "Inventory",
    "ItemKind",
    "Lease",
    "Manifest",
    "Marker",
    "Occupant",
    "Owner",
    "Survey",
    "TensorEntry",
    "abandon",
    "begin",
    "collect_orphans",
    "commit",
    "commit_copy",
    "content_of",
    "describe",
    "file_as_root",
    "forget_notes",
    "in_use",
    "is_name",
    "known_pins",
    "list_tensors",
    "look_around",
    "next_lineage",
    "note_measured",
    "on_present_line",
    "plain_files",
    "plain_storage",
    "present_lineage",
    "quarantine",
    "read_entry",
    "read_manifest",
    "read_notes",
    "refuse_as_root",
    "remove",
    "remove_drafts",
    "replaced",
    "require_free",
    "require_trusted",
    "settle_asides",
    "share",
    "stock_parts",
    "strangers",
    "verify",
    "verify_part",
    "verify_stock",
    "working_name",
    "write_signature",
]
