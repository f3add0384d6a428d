"""Filesystem groups: roots on disks that only the ranks of one node see.

Ranks that see one another's files form a group. The lowest rank of a group, its leader, serves its disk to
the other groups over authenticated connections. So the root of such a job is one `Storage` after all
(`GroupedStorage`): what the coordinator does to the root happens in every group, and a file is read from the
group that has it. With one group, as on a shared filesystem, every call goes straight to the storage.
"""

from ckpt_core.groups._forming import Grouping, form_groups
from ckpt_core.groups._grouped_storage import (
    GroupedStorage,
    group_number,
    holders,
    local_part,
    on_each,
    open_root,
)

__all__ = [
    "GroupedStorage",
    "Grouping",
    "form_groups",
    "group_number",
    "holders",
    "local_part",
    "on_each",
    "open_root",
]
