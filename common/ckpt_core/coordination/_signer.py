"""Sign messages, so that a job ignores what others write to its store."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Final, final

from ckpt_core.errors import ConfigError, CoordinationError

KEY_VARIABLE: Final = "CKPT_SUITE_KEY"
_LEAST_KEY_CHARS: Final = 16
_MAC_BYTES: Final = 32
_RANK_DIGITS: Final = 10
_FINGERPRINT_BYTES: Final = 7
"""Fits into a positive signed integer of 64 bits, as does its negative."""


@final
class Signer:
    """Signs messages and words with HMAC-SHA256, bound to key and sender.

    Args:
        secret: known to the ranks of this job only; never sent, logged or shown.
        scope: prefix of the keys; a message of one scope is invalid in another.
    """

    __slots__ = ("_secret", "scope")

    def __init__(self, secret: bytes = b"", scope: str = "") -> None:
        self._secret = secret
        self.scope = scope

    def within(self, scope: str) -> Signer:
        """Return the signer of the same ranks for another scope."""
        return Signer(self._secret, scope)

    def sign(self, key: str, sender: int, content: bytes) -> bytes:
        """Return the signed message that rank `sender` stores under `key`."""
        return self._mac(key, sender, content) + content

    def verify(self, key: str, sender: int, message: bytes) -> bytes:
        """Check a message, return its content.

        Raises:
            CoordinationError: `sender` did not write it to `key`.
        """
        content = message[_MAC_BYTES:]
        if not hmac.compare_digest(message[:_MAC_BYTES], self._mac(key, sender, content)):
            raise self._refusal(key, sender)
        return content

    def sign_word(self, key: str, sender: int, word: str) -> str:
        """Return the signed word to be stored under `key`, as text."""
        return f"{sender} {self._mac(key, sender, word.encode()).hex()} {word}"

    def verify_word(self, key: str, stored: bytes) -> str:
        """Check a stored word, return it without its signature.

        Raises:
            CoordinationError: no rank wrote it to `key`.
        """
        sender, _, signed = stored.decode("utf-8", "replace").partition(" ")
        mac, _, word = signed.partition(" ")
        is_rank = sender.isascii() and sender.isdecimal() and len(sender) < _RANK_DIGITS
        known = int(sender) if is_rank else 0
        expected = self._mac(key, known, word.encode("utf-8", "replace")).hex()
        if not hmac.compare_digest(mac.encode("utf-8", "replace"), expected.encode()):
            raise self._refusal(key, None)
        return word

    def _mac(self, key: str, sender: int, content: bytes) -> bytes:
        place = "".join(f"{len(part)}:{part}" for part in (self.scope, key, str(sender)))
        return hmac.digest(self._secret, place.encode() + b"\0" + content, "sha256")

    def _refusal(self, key: str, sender: int | None) -> CoordinationError:
        writer = "a rank" if sender is None else f"rank {sender}"
        return CoordinationError(
            f"the value under the key {self.scope}/{key} of the job's store, where {writer} should have "
            "written, has no signature of a rank of this job and was not read. Another process can "
            "write to that store: let only this job's hosts reach its port (MASTER_PORT, or the launcher's), "
            f"give all ranks one secret {KEY_VARIABLE}, and start the job again",
            failures={} if sender is None else {sender: "its message is not signed by a rank of this job"},
        )


def job_key() -> bytes:
    """Return the key in the environment of this job's ranks; empty without one.

    Raises:
        ConfigError: it is too short.
    """
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return b""
    if len(text) < _LEAST_KEY_CHARS:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(text)} characters, and needs {_LEAST_KEY_CHARS} or more: give every "
            "rank the same random text, such as secrets.token_hex(32) makes, or unset it"
        )
    return text.encode("utf-8", "surrogateescape")


def fingerprint(key: bytes) -> int:
    """Return a number that is equal for equal keys; 0 without a key."""
    digest = hmac.digest(key, b"ckpt-suite: which key", "sha256")
    return (int.from_bytes(digest[:_FINGERPRINT_BYTES], "big") | 1) if key else 0


def session_secret(key: bytes, drawn: bytes) -> bytes:
    """Derive the secret of one session from the key and from random bytes."""
    return hmac.digest(key, b"ckpt-suite: session" + hashlib.sha256(drawn).digest(), "sha256")
