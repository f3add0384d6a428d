"""Facts about where a checkpoint comes from, as its manifest names them.

Its parent, the start of the job that saved it, the version of the code, a digest of the configuration, and
how far the training was in its data. They say what happened; no load decides by them. None of them names a
machine, a path or a user, and one variable of the environment is all that is read of that.
"""

from ckpt_core.provenance._configuration import configuration_digest
from ckpt_core.provenance._fields import (
    CODE_VERSION_VARIABLE,
    CodeVersion,
    code_version,
    parent_fields,
    provenance_fields,
    read_parent,
    read_provenance,
    software_versions,
)

__all__ = [
    "CODE_VERSION_VARIABLE",
    "CodeVersion",
    "code_version",
    "configuration_digest",
    "parent_fields",
    "provenance_fields",
    "read_parent",
    "read_provenance",
    "software_versions",
]
