"""Provenance as fields of a manifest: left out where unknown, checked when read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from ckpt_core.formats.codec import Fields
from ckpt_core.types import DataPosition, Parent, Provenance

_NAME: Final = "provenance"
_LIBRARIES: Final = (
    *("numpy", "lightning", "pytorch_lightning", "accelerate", "transformers"),
    *("peft", "torchao", "bitsandbytes", "torchdata"),
)


def provenance_fields(provenance: Provenance) -> dict[str, Any]:
    """Return the fields for a manifest; none if nothing is known."""
    parent, data = provenance.parent, provenance.data
    code = _known(version=provenance.code_version, dirty=provenance.code_dirty)
    found = _known(
        parent=None
        if parent is None
        else {
            "name": parent.name,
            "step": parent.step,
            "save_id": parent.save_id,
            "manifest_sha256": parent.manifest_sha256,
            **({"elsewhere": True} if parent.elsewhere else {}),
        },
        run_id=provenance.run_id,
        code=code,
        configuration_sha256=provenance.configuration_sha256,
        data={
            name: _known(epoch=each.epoch, samples=each.samples, of=each.of) for name, each in data.items()
        },
    )
    return {_NAME: found} if found else {}


def read_provenance(fields: Fields) -> Provenance:
    """Read the provenance from a manifest; ValueError for bad values."""
    found = fields.optional(_NAME)
    if found is None:
        return Provenance()
    code, parent, data = found.optional("code"), found.optional("parent"), found.optional("data")
    return Provenance(
        parent=None if parent is None else _parent(parent),
        run_id=_text(found, "run_id"),
        code_version="" if code is None else _text(code, "version"),
        code_dirty=None if code is None or "dirty" not in code else code.get("dirty", bool),
        configuration_sha256=_text(found, "configuration_sha256"),
        data={} if data is None else {name: _position(data, name) for name in data},
    )


def _parent(fields: Fields) -> Parent:
    return Parent(
        name=fields.get("name", str),
        step=fields.count("step"),
        save_id=fields.get("save_id", str),
        manifest_sha256=fields.get("manifest_sha256", str),
        elsewhere="elsewhere" in fields and fields.get("elsewhere", bool),
    )


def _position(data: Fields, name: str) -> DataPosition:
    fields = data.optional(name) or Fields({})
    known = {each: fields.count(each) for each in ("epoch", "samples", "of") if each in fields}
    return DataPosition(**known)


def _text(fields: Fields, name: str) -> str:
    return fields.get(name, str) if name in fields else ""


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", {})}


def software_versions() -> Mapping[str, str]:
    """Return the versions of libraries that are imported already."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {name: str(version) for name, version in found.items() if isinstance(version, str)}
