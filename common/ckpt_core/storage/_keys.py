"""What a key may look like, the same for every backend."""

from __future__ import annotations


def key_parts(key: str) -> tuple[str, ...]:
    """Components of a key; () for the root.

    Raises:
        ValueError: the key is absolute, leads out of the root or is not in its plain form.
    """
    if key == "":
        return ()
    parts = tuple(key.split("/"))
    if not all(map(is_plain, parts)):
        raise ValueError(
            f"storage key {key!r} must be relative to the root, in plain form: no leading or doubled '/', "
            "no '.' or '..'"
        )
    return parts


def is_plain(name: str) -> bool:
    """Whether a key may have this component."""
    return name not in {"", ".", ".."} and "\0" not in name


def file_key(key: str) -> str:
    """The key itself, once it is known to name something below the root.

    Raises:
        ValueError: the key is empty (the root) or malformed.
    """
    if not key_parts(key):
        raise ValueError("the root itself cannot be written, renamed or deleted through its storage")
    return key


def parent_keys(key: str) -> list[str]:
    """Every directory above `key`, outermost first, without the root."""
    parts = key_parts(key)
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
