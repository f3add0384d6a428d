"""Who is heard: the ranks of the job, each where it should be heard, and nobody else."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_core.coordination._channel import Channel, _packed
from ckpt_core.coordination._signer import KEY_VARIABLE, Signer, fingerprint, job_key, session_secret
from ckpt_core.errors import ConfigError, CoordinationError

LONG = 30.0
NOT_SIGNED = r"under the key s/t/{} of the job's store.*rank {}.*signature.*CKPT_SUITE_KEY"


def signer(secret: bytes = b"of the job") -> Signer:
    return Signer(secret, "s")


class Canary:
    """Leaves a file behind if anything unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def coordinator(left: bytes) -> Channel:
    """Of two ranks, where something lies for it in the store that rank 1 should have left."""
    store = dist.HashStore()
    store.set("t/arrive/1", left)
    return Channel(store, 0, 2, signer=signer())


def arrivals() -> dict[str, bytes]:
    """What may lie where the coordinator expects rank 1, and was not written there by rank 1 of this job."""
    value = _packed("value", "from rank 1")
    return {
        "no signature": value,
        "nothing": b"",
        "other key": signer(b"of another").sign("t/arrive/1", 1, value),
        "no key": Signer(b"", "s").sign("t/arrive/1", 1, value),
        "other call": signer().sign("u/arrive/1", 1, value),
        "other rank": signer().sign("t/arrive/1", 2, value),
        "other session": Signer(b"of the job", "r").sign("t/arrive/1", 1, value),
        "moved border": signer().sign("t/arrive/", 11, value),
    }


@pytest.mark.parametrize("what", list(arrivals()))
def test_what_rank_1_has_not_signed_for_this_key_is_not_read(what):
    with pytest.raises(CoordinationError, match=NOT_SIGNED.format("arrive/1", 1)) as caught:
        coordinator(arrivals()[what]).gather_scatter("t", 0, list, LONG)
    assert list(caught.value.failures) == [1]


def test_a_pickle_in_the_store_is_never_loaded(tmp_path):
    for wrapped in (
        pickle.dumps(Canary(tmp_path / "ran")),
        pickle.dumps({"value": Canary(tmp_path / "ran")}),
        signer().sign("t/arrive/1", 1, pickle.dumps(Canary(tmp_path / "ran"))),
    ):
        with pytest.raises(CoordinationError):
            coordinator(wrapped).gather_scatter("t", 0, list, LONG)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("call", "key"), [("broadcast", "said"), ("gather_scatter", "depart/1"), ("commit_barrier", "depart")]
)
def test_a_reply_that_the_coordinator_has_not_signed_is_not_read(call, key):
    store = dist.HashStore()
    store.set(f"t/{key}", signer(b"of another").sign(f"t/{key}", 0, _packed("value", "evil")))
    channel = Channel(store, 1, 2, signer=signer())
    act = {
        "broadcast": lambda: channel.broadcast("t", lambda: None, LONG),
        "gather_scatter": lambda: channel.gather_scatter("t", 1, list, LONG),
        "commit_barrier": lambda: channel.commit_barrier("t", 1, sum, LONG),
    }
    with pytest.raises(CoordinationError, match=NOT_SIGNED.format(key, 0)):
        act[call]()


@pytest.mark.parametrize("word", ["deciding", "rank 1", "\x00", "1 00 deciding", "9" * 5000 + " a b", "\xff"])
def test_a_word_that_no_rank_has_signed_does_not_count(word):
    store = dist.HashStore()
    store.set("t/arrive/1", signer().sign("t/arrive/1", 1, _packed("value", 1)))
    store.set("t/verdict", word.encode("latin-1"))
    with pytest.raises(CoordinationError, match="under the key s/t/verdict"):
        Channel(store, 0, 2, signer=signer()).commit_barrier("t", 0, sum, LONG)


def test_ten_thousand_mutations_of_a_message_are_errors_of_ours():
    chance, value = random.Random(3), _packed("value", {"a": [1, b"xyz", ("b", None)]})
    honest = signer().sign("t/arrive/1", 1, value)
    for _ in range(10_000):
        changed = bytearray(honest)
        for _ in range(chance.choice((1, 1, 3))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        cut = bytes(changed[: chance.choice((None, None, chance.randrange(len(changed))))])
        if cut != honest:
            with pytest.raises(CoordinationError):
                signer().verify("t/arrive/1", 1, cut)


def test_what_is_signed_and_is_no_message_is_an_error_of_ours():
    for content in (b"", b"\xff" * 40, pickle.dumps(1), _packed("value", 1)[:-1], b"\0" * 7 + b"\x011"):
        with pytest.raises(CoordinationError, match=r"t/arrive/1: a message that"):
            coordinator(signer().sign("t/arrive/1", 1, content)).gather_scatter("t", 0, list, LONG)


def test_ranks_with_the_same_secret_hear_one_another():
    sent = signer().sign("k", 3, b"content")
    assert signer().verify("k", 3, sent) == b"content"
    word = signer().sign_word("k", 3, "rank 3").encode()
    assert signer().verify_word("k", word) == "rank 3"


def test_the_key_is_in_nothing_that_can_be_shown(monkeypatch):
    secret = "very-secret-" + "x" * 20
    monkeypatch.setenv(KEY_VARIABLE, secret)
    made = signer(session_secret(job_key(), b"drawn"))
    with pytest.raises(CoordinationError) as caught:
        made.verify("k", 1, b"")
    shown = [repr(made), str(caught.value), str(vars(caught.value)), str(fingerprint(job_key()))]
    shown += [made.sign("k", 1, b"x").hex(), made.sign_word("k", 1, "w")]
    assert not [text for text in shown if secret in text or secret.encode().hex() in text]


@pytest.mark.parametrize("short", ["", "hunter2", "x" * 15])
def test_a_key_that_could_be_guessed_is_refused_without_showing_it(short, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, short)
    with pytest.raises(ConfigError, match=r"CKPT_SUITE_KEY has \d+ characters, and needs 16") as caught:
        job_key()
    assert not short or short not in str(caught.value)


def test_without_a_key_there_is_none(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert (job_key(), fingerprint(b"")) == (b"", 0)
    assert 0 < fingerprint(b"x" * 16) < 2**62
    assert session_secret(b"", b"a") != session_secret(b"", b"b") != session_secret(b"k", b"b")
