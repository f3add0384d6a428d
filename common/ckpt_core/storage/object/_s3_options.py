"""Options of s3fs, in the words of botocore."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Self, final

from ckpt_core.disclosure import Redaction
from ckpt_core.storage.object._parts import CONNECTIONS
from ckpt_core.storage.object._translation import refuse_others, refused

if TYPE_CHECKING:
    from botocore.config import Config

_MOST_ATTEMPTS: Final = 6
_KEYS: Final = {
    "key": "aws_access_key_id",
    "username": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "password": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "endpoint_url",
    "use_ssl": "use_ssl",
}
_OTHERS: Final = (
    "anon",
    "checksums",
    "client_kwargs",
    "config_kwargs",
    "max_concurrency",
    "profile",
    "requester_pays",
    "s3_additional_kwargs",
)
_OPERATIONS: Final = (
    "abort_multipart_upload",
    "complete_multipart_upload",
    "create_multipart_upload",
    "delete_object",
    "get_object",
    "head_object",
    "list_objects_v2",
    "put_object",
    "upload_part",
)
# What only the caches and files of fsspec need.
_WITHOUT_EFFECT: Final = (
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
)


def time_limits(seconds: float) -> dict[str, Any]:
    """Return botocore's time-outs and retries that fit into `seconds`."""
    # So many tries fit if the waits between them double from at most 1 s on.
    attempts = max(2, min(int(math.log2(seconds / 2 + 1)) + 1, _MOST_ATTEMPTS))
    return {
        "connect_timeout": max(1.0, min(10.0, seconds / 4)),
        "read_timeout": max(1.0, min(60.0, seconds / 4)),
        "retries": {"mode": "standard", "total_max_attempts": attempts},
    }


@final
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class S3Settings:
    """How to reach S3, by how many connections for an object; whether to let it check."""

    session: Mapping[str, Any]
    client: Mapping[str, Any]
    config: Config
    additional: Mapping[str, Any]
    connections: int
    checksums: bool

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any], seconds: float, redaction: Redaction) -> Self:
        """Translate options; ConfigError names those that have no translation."""
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        refuse_others(url, options, {*_KEYS, *_OTHERS, *_WITHOUT_EFFECT}, "botocore")
        given = {_KEYS[name]: value for name, value in options.items() if name in _KEYS and value is not None}
        connections = int(options.get("max_concurrency") or CONNECTIONS)
        user = dict(options.get("config_kwargs") or {})
        _refuse_other_checksums(url, options)
        config = {
            "max_pool_connections": 4 * connections,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **time_limits(seconds),
            **user,
            # The checksum is signed instead of a second one of the content.
            "s3": {**(user.get("s3") or {}), "payload_signing_enabled": False},
        }
        if options.get("anon"):
            config["signature_version"] = UNSIGNED
        payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
        try:
            made = Config(**config)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, BotoCoreError) as error:
            raise refused(url, "botocore", options, error=error, redaction=redaction) from None
        return cls(
            session={"profile": options["profile"]} if options.get("profile") else {},
            client={**given, **(options.get("client_kwargs") or {})},
            config=made,
            additional={**payer, **(options.get("s3_additional_kwargs") or {})},
            connections=connections,
            checksums=bool(options.get("checksums", True)),
        )

    def connect(self, url: str, redaction: Redaction) -> Any:
        """Make botocore's client, which asks for credentials when it first needs them."""
        from botocore.session import Session

        try:
            session: Any = Session(**self.session)  # type: ignore[no-untyped-call]
            session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
            client = session.create_client("s3", config=self.config, **self.client)
        except (ValueError, TypeError) as error:
            raise refused(url, "botocore", self.client, error=error, redaction=redaction) from None
        taken = {name for operation in _OPERATIONS for name in _members(client, operation)}
        known = [f"s3_additional_kwargs {name}" for name in taken]
        refuse_others(url, {f"s3_additional_kwargs {name}": 0 for name in self.additional}, known, "botocore")
        return client

    def known(self, client: Any, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        members = _members(client, operation)
        more = {name: value for name, value in self.additional.items() if name in members}
        return {**more, **arguments}


@cache
def _loader(search_path: str | None) -> Any:
    """Return the reader of what botocore knows of services; parsing takes 50 ms."""
    from botocore.loaders import create_loader

    return create_loader(search_path)  # type: ignore[no-untyped-call]


def _members(client: Any, operation: str) -> Collection[str]:
    name = client.meta.method_to_api_mapping[operation]
    members: Collection[str] = client.meta.service_model.operation_model(name).input_shape.members
    return members


def _refuse_other_checksums(url: str, options: Mapping[str, Any]) -> None:
    """Refuse other checksums, and signatures of content: only the CRC-32 is made."""
    additional = options.get("s3_additional_kwargs") or {}
    others = [f"s3_additional_kwargs {name}" for name in additional if name.startswith("Checksum")]
    if ((options.get("config_kwargs") or {}).get("s3") or {}).get("payload_signing_enabled"):
        others.append("config_kwargs s3 payload_signing_enabled")
    refuse_others(url, dict.fromkeys(others), (), "botocore")
