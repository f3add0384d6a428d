"""Filesystem groups: roots on disks that only the ranks of one node see.

Ranks that see one another's files form a group. The lowest rank of a group, its leader, carries out on its
disk what the other groups ask for. So the root of such a job is one `Storage` after all (`GroupedStorage`):
what the coordinator does to the root happens in every group, and a file is read from the group that has it.
With one group, as on a shared filesystem, every call goes straight to the storage.
"""

from ckpt_core.groups._grouped_storage import (
    GroupedStorage,
    form_groups,
    holders,
    local_part,
    on_each,
    open_root,
)
from ckpt_core.groups._remote_disk import RemoteDisk, serve_disk

__all__ = [
    "GroupedStorage",
    "RemoteDisk",
    "form_groups",
    "holders",
    "local_part",
    "on_each",
    "open_root",
    "serve_disk",
]
