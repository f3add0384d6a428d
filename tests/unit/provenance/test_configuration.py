"""The digest of a configuration: equal for equal ones, and without secrets."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core import CheckpointOptions, KeepLatest
from ckpt_core.provenance import configuration_digest


def digest(value: Any) -> str:
    return configuration_digest(lambda: value)


class Kind(enum.Enum):
    A = "a"
    B = "b"


@dataclass
class Options:
    rate: float
    hub_token: str = "t"


class Opaque:
    pass


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=15)
@given(st.dictionaries(st.text(max_size=5), plain, max_size=4))
def test_the_digest_is_of_the_values_in_whatever_order(values):
    assert digest(values) == digest(dict(reversed(values.items())))
    assert len(digest(values)) == len(hashlib.sha256().hexdigest())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lr": 0.1}, {"lr": 0.2}),
        ({"lr": 1}, {"lr": 1.0}),
        ([1, 2], [2, 1]),
        (Kind.A, Kind.B),
        (Options(0.1), Options(0.2)),
        (torch.float32, torch.bfloat16),
        (len, max),
        (PurePosixPath("a"), PurePosixPath("b")),
    ],
)
def test_another_value_is_another_digest(one, other):
    assert digest(one) != digest(other)


SECRETS = [
    ({"api_key": "a"}, {"api_key": "b"}),
    ({"wandb": {"PASSWORD": "a"}}, {"wandb": {"PASSWORD": "b"}}),
    (Options(0.1, "a"), Options(0.1, "b")),
    ({"url": "s3://user:one@host/x"}, {"url": "s3://user:two@host/x"}),
]


@pytest.mark.parametrize(("one", "other"), SECRETS)
def test_no_secret_is_part_of_it(one, other):
    assert digest(one) == digest(other)


NAMES = [
    *("api_keys", "tokens", "secrets", "passwords", "pwd", "pin", "passcode", "connection_string", "db_uri"),
    *("private_key_pem", "credential_json", "aws_secret_access_key_id", "api_token", "wandb_api_key"),
    *("hfToken", "DB_PASS", "conn-str", "auth_header", "creds", "jwt", "session cookies", "sentry_dsn"),
    *(
        "sas_url",
        "connectionstring",
        "webhook_url",
        "slackWebhook",
        "storage-sas-uri",
        "SASUrl",
        "presigned_urls",
    ),
    *("proxyPwds", "bearerValue", "azure_sas", "secretKeys", "otp", "passphrase2", "ACCESS_KEYS_OLD"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("values", [("1234", "1235"), (1234, 1235), (["1234"], ["1235"])], ids=repr)
def test_a_secret_is_known_by_plurals_prefixes_and_short_forms_of_its_name(name, values):
    one, other = values
    assert digest({"a": {name: one}}) == digest({"a": {name: other}})


@pytest.mark.parametrize(
    "name",
    [
        *("max_tokens", "num_keys", "tokenizer", "key_dim", "pin_memory", "author", "bypass_weights", "spin"),
        *("n_train_tokens", "passes", "signal", "keyboard", "token_budget", "credit", "opinion", "pattern"),
        *("signed", "sasquatch", "url", "unsigned_url", "hooks", "data_urls"),
    ],
)
def test_what_only_sounds_like_a_secret_counts(name):
    assert digest({name: 1}) != digest({name: 2})


def test_objects_count_by_type_and_never_by_their_address():
    assert digest([Opaque(), {1, 2, 3}]) == digest([Opaque(), {3, 2, 1}])


def test_what_cannot_be_digested_is_no_reason_to_fail():
    endless: list[Any] = []
    endless.append(endless)
    assert digest(endless)
    assert digest(list(range(100_000)))
    assert digest({"text": "\ud800"})

    def broken() -> Any:
        raise AttributeError("hparams")

    assert configuration_digest(broken) == ""


def test_options_count_where_they_decide_what_is_saved():
    assert CheckpointOptions().chosen == {}
    how = CheckpointOptions(storage_options={"key": "secret"}, arenas=2, deadline_seconds=3.0)
    assert how.chosen == {}
    assert CheckpointOptions(keep=KeepLatest(3), checksum="sha256").chosen == {
        "keep": KeepLatest(3),
        "checksum": "sha256",
    }
