"""Signatures on messages, so that only the ranks of a job are heard, whoever else can write to its store."""

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
"""So that it fits into a positive signed integer of 64 bits, and its negative, too."""


@final
class Signer:
    """Signs messages and words with HMAC-SHA256, bound to where they are left and by whom.

    Args:
        secret: what only the ranks of this job know; it is never sent, told or shown.
        scope: what the keys below are relative to; a message of one scope does not count in another.
    """

    __slots__ = ("_secret", "scope")

    def __init__(self, secret: bytes = b"", scope: str = "") -> None:
        self._secret = secret
        self.scope = scope

    def within(self, scope: str) -> Signer:
        """The signer of the same ranks for the keys of another scope."""
        return Signer(self._secret, scope)

    def sign(self, key: str, sender: int, content: bytes) -> bytes:
        """The message as it is left under `key` by the rank `sender`."""
        return self._mac(key, sender, content) + content

    def verify(self, key: str, sender: int, message: bytes) -> bytes:
        """The content of a message.

        Raises:
            CoordinationError: `sender` has not left it under `key`.
        """
        content = message[_MAC_BYTES:]
        if not hmac.compare_digest(message[:_MAC_BYTES], self._mac(key, sender, content)):
            raise self._refusal(key, sender)
        return content

    def sign_word(self, key: str, sender: int, word: str) -> str:
        """The word as it is left under `key`, as text."""
        return f"{sender} {self._mac(key, sender, word.encode()).hex()} {word}"

    def verify_word(self, key: str, left: bytes) -> str:
        """The word that stands under `key`.

        Raises:
            CoordinationError: no rank has left it there.
        """
        sender, _, signed = left.decode("utf-8", "replace").partition(" ")
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
            f"what lies under the key {self.scope}/{key} of the job's store, where {writer} should have "
            "written, does not have the signature of a rank of this job; it was not read. Somebody else can "
            "write to that store: let only this job's hosts reach its port (MASTER_PORT, or the launcher's), "
            f"give all ranks one secret {KEY_VARIABLE}, and start the job again",
            failures={} if sender is None else {sender: "its message is not signed by a rank of this job"},
        )


def job_key() -> bytes:
    """The key that was given to all ranks of this job; empty if none was.

    Raises:
        ConfigError: it is too short to be one.
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
    """A number by which ranks tell whether they have the same key; 0 if there is none."""
    digest = hmac.digest(key, b"ckpt-suite: which key", "sha256")
    return (int.from_bytes(digest[:_FINGERPRINT_BYTES], "big") | 1) if key else 0


def session_secret(key: bytes, drawn: bytes) -> bytes:
    """What the messages of one session are signed with: of the key, and of what was drawn for the session."""
    return hmac.digest(key, b"ckpt-suite: session" + hashlib.sha256(drawn).digest(), "sha256")
