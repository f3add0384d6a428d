"""The choice of a backend by URL."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointNotFoundError, ConfigError
from ckpt_core.storage._base import Storage, is_full
from ckpt_core.storage.local._storage import LocalStorage
from ckpt_core.storage.object import ObjectStorage, RequestTerms
from ckpt_core.validation import integer, require

_URL = re.compile(r"(?:\w+::)*(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_COLLAPSED_URL = re.compile(r"(?:s3a?|gcs|gs|az|abfs|https?|memory|file):/[^/]")
_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})|^%\w+%")
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_LOCAL = {"file", "local"}
_WITHOUT_USERS = {"s3", "s3a", "gs", "gcs"}
_WITH_BUCKETS = {*_WITHOUT_USERS, "az", "abfs"}
REQUEST_SECONDS: Final = 600.0
"""The default time limit of one request."""

_LEAST_PART_BYTES_OF_S3: Final = 5 * 2**20

_S3: Final = ("s3", "s3a")
_EXTRAS: Final = {
    **dict.fromkeys(_S3, "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
}


def open_storage(
    root: str | os.PathLike[str] | Storage,
    storage_options: Mapping[str, Any] | None = None,
    *,
    deadline_seconds: float | None = None,
) -> Storage:
    """Open the storage at a path or URL; a `Storage` is returned unchanged.

    Args:
        root: a path, `file://…`, `s3://bucket/prefix`, `gs://bucket/prefix`, any other fsspec URL, or a
            `Storage`.
        storage_options: credentials, endpoint and the like for a URL; see `object_storage`.
        deadline_seconds: the longest wait of ranks for one another. Unless the options say otherwise, one
            request to an object store may take a third of it, so that a rank can report the failure in time.

    Raises:
        ConfigError: the URL cannot be opened, or options were given where none apply.
    """
    options = dict(storage_options or {})
    if isinstance(root, Storage):
        _refuse_options(root.url, options)
        return root
    text = _text(root)
    match = _URL.fullmatch(text)
    if match is None or ("::" not in text and match["protocol"] in _LOCAL):
        _refuse_options(text, options)
        return LocalStorage(_local_path(text if match is None else match["rest"]))
    if match["protocol"] in _WITH_BUCKETS and not match["rest"].partition("/")[0]:
        raise ConfigError(f"{public_url(text)} names no bucket; give {match['protocol']}://bucket/run")
    if match["protocol"] in _WITHOUT_USERS and public_url(text) != text:
        raise ConfigError(
            f"{public_url(text)} was given with a user, a password or a query, which {match['protocol']}:// "
            "does not take: use storage_options, a profile or a role for credentials"
        )
    if deadline_seconds is not None:
        options.setdefault("request_seconds", min(REQUEST_SECONDS, deadline_seconds / 3))
    return object_storage(text, **options)


def object_storage(
    url: str,
    *,
    write_block_bytes: int | None = None,
    request_seconds: float = REQUEST_SECONDS,
    conditional_writes: bool = True,
    **storage_options: Any,
) -> ObjectStorage:
    """Open a prefix in an object store, without using the network.

    Args:
        url: any URL that fsspec knows, with or without a trailing slash.
        write_block_bytes: size of the parts of an upload, on S3 at least 5 MiB; None for the client's.
        request_seconds: the time limit of one request, retries included.
        conditional_writes: whether to create objects only if there is none; a store that speaks S3 but lacks
            `If-None-Match` needs False, and then two jobs must not write to one root.
        storage_options: in the words of the fsspec filesystem (credentials, endpoint…). On S3, time-outs and
            retries are set to fit into `request_seconds` unless `config_kwargs` sets them.

    Raises:
        ConfigError: the protocol is unknown or its extra is not installed, or the client does not take an
            option.
    """
    protocol = url.partition("://")[0]
    if write_block_bytes is not None:
        least = _LEAST_PART_BYTES_OF_S3 if protocol in _S3 else 1
        require(public_url(url), integer("write_block_bytes", write_block_bytes, minimum=least))
    terms = RequestTerms(request_seconds, conditional_writes, write_block_bytes)
    try:
        if protocol in _S3:
            from ckpt_core.storage.object._s3 import S3Storage

            return S3Storage(url, storage_options, terms)
        if protocol in _EXTRAS:
            from ckpt_core.storage.object._obstore import ObstoreStorage

            return ObstoreStorage(url, storage_options, terms)
        from ckpt_core.storage.object._fsspec import FsspecStorage

        return FsspecStorage(url, storage_options, terms)
    except ImportError as error:
        fix = f'pip install "ckpt-suite[{_EXTRAS[protocol]}]"' if protocol in _EXTRAS else "install it"
        raise ConfigError(f"{public_url(url)}: {protocol}:// needs {error.name or error}; {fix}") from None


def open_around(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[Storage, str, str]:
    """Open the storage around a folder or file; return both, too: see `around`."""
    root, directory, file = around(place, storage_options)
    return open_storage(root, storage_options), directory, file


def around(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[str, str, str]:
    """Split the place of a folder or a file that somebody wrote.

    Links in the path are followed; in a folder only those that stay in what is opened, which for a snapshot
    in the cache of `huggingface_hub` has the files that its links name. Returns what to open as a storage,
    the key of the folder there, and the name of the file in it; "" if the place is a folder.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ConfigError: it cannot be opened, or has no folder above it, as a bucket has not.
        OSError: storage failed.
    """
    text = _text(place)
    match = _URL.fullmatch(text)
    if match is None or ("::" not in text and match["protocol"] in _LOCAL):
        return _around_local(_local_path(text if match is None else match["rest"]))
    parent, _, name = text.rstrip("/").rpartition("/")
    storage = open_storage(_with_bucket(parent, text), storage_options)
    if storage.exists(name):
        parent, _, directory = parent.rpartition("/")
        return _with_bucket(parent, text), directory, name
    if not storage.list(name):
        raise CheckpointNotFoundError(f"{public_url(text)}: there is nothing")
    return parent, name, ""


def _around_local(path: Path) -> tuple[str, str, str]:
    if not path.exists():
        raise CheckpointNotFoundError(f"{path}: there is nothing")
    folder, file = (path, "") if path.is_dir() else (path.parent, path.name)
    folder = Path(os.path.realpath(folder))
    root = folder.parent
    if root.name == "snapshots" and (root.parent / "blobs").is_dir():
        root = root.parent
    if root == folder:
        raise _top(str(path))
    return str(root), folder.relative_to(root).as_posix(), file


def _with_bucket(parent: str, text: str) -> str:
    if not parent.partition("://")[2].strip("/"):
        raise _top(text)
    return parent


def _top(text: str) -> ConfigError:
    return ConfigError(f"{public_url(text)} has no folder above it: put what it holds into a folder")


def is_in_bucket(place: str) -> bool:
    """Return whether a place is a URL of S3, GCS or Azure: the same for every process."""
    protocol, separator, _ = place.partition("://")
    return bool(separator) and protocol in _WITH_BUCKETS


def unwritable(url: str, error: OSError) -> ConfigError:
    remedy = "Remove the cause, then start again"
    if "://" in url:
        remedy = "Nothing was written"
    elif is_full(error):
        remedy = "Free space there, or choose another directory"
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, None}:
        remedy = "Choose a directory this job may write to"
    return ConfigError(f"checkpoints cannot be written to {url}: {error}. {remedy}")


def _text(root: object) -> str:
    if isinstance(root, str | os.PathLike):
        text: object = os.fspath(root)
        if isinstance(text, str):
            return text
    raise ConfigError(f"the checkpoint root must be a str, a path or a Storage, not {type(root).__name__}")


def _local_path(text: str) -> Path:
    if not text:
        raise ConfigError("the checkpoint root is empty; give a directory or a URL such as s3://bucket/run")
    if _COLLAPSED_URL.match(text):
        shown = public_url(text.replace(":/", "://", 1))
        raise ConfigError(f"{shown} looks like a URL that went through pathlib.Path; pass it as a str")
    if "\0" in text:
        raise ConfigError(f"the checkpoint root {text!r} has a null character, which no path may have")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text!r} cannot be a checkpoint root: {error}; give the whole path") from error
    unexpanded = _VARIABLE.search(text)
    if (unexpanded or (os.sep == "/" and _WINDOWS.match(text))) and not path.exists():
        fix = "expand it with os.path.expandvars" if unexpanded else "this is no Windows system"
        raise ConfigError(f"{text!r} would make a directory of exactly that name; {fix}, or make it yourself")
    return path


def _refuse_options(root: str, options: Mapping[str, Any]) -> None:
    if options:
        names = ", ".join(sorted(options))
        raise ConfigError(f"{root}: storage_options ({names}) apply to URLs only; remove them")
