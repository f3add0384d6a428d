"""What a job must not tell goes nowhere: not into an object's repr, an error, a log, an event or a file."""

from __future__ import annotations

import json
import logging
import secrets
import traceback
from contextlib import contextmanager

import fsspec
import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointOptions, KeepLatest
from ckpt_core.cli import main
from ckpt_core.disclosure import Redaction, logger_of, public_url
from ckpt_core.errors import CheckpointError, ConfigError
from ckpt_core.storage import object_storage, open_storage
from ckpt_core.telemetry import InMemorySink

CANARY = "hunter2+sEcret/9"
OPTIONS = {
    "secret": CANARY,
    "pin": 987654321,
    "client_kwargs": {"headers": {"Authorization": f"Bearer {CANARY}"}, "hosts": [f"{CANARY}.example"]},
}
FORMS = ("hunter2", "sEcret", "987654321")


def clean(text):
    """The text, once it is known to hold no part of a secret."""
    text = str(text)
    assert not any(form in text for form in FORMS), text
    return text


def told(error):
    """All that an error tells, with what is behind it, but not the frames, which quote our arguments."""
    whole = traceback.TracebackException.from_exception(error)
    lines = []
    while whole is not None:
        lines += whole.format_exception_only()
        whole = whole.__cause__ or (None if whole.__suppress_context__ else whole.__context__)
    return "".join(lines) + repr(error) + repr(getattr(error, "filename", ""))


def secret_url(place="run"):
    """A URL with a user, a password and a signature, in a filesystem that takes any."""
    return f"memory://me:{CANARY}@{secrets.token_hex(8)}/{place}?sig={CANARY}"


# --- what is shown of a URL ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/scratch/a@b/run?1", "/scratch/a@b/run?1"),
        ("s3://bucket/run@5", "s3://bucket/run@5"),
        ("s3://bucket/what?/run", "s3://bucket/what?/run"),
        ("s3://arn:aws:s3:eu:1:accesspoint/name/x@5", "s3://arn:aws:s3:eu:1:accesspoint/name/x@5"),
        ("s3://KEY:se/cret@bucket/run", "s3://bucket/run"),
        ("https://host:8443/run", "https://host:8443/run"),
        ("https://me:pass@host:8443/run", "https://host:8443/run"),
        ("https://me:p@ss@host/run", "https://host/run"),
        ("https://host/run?sv=1&sig=abc", "https://host/run?…"),
        ("https://host/run#token", "https://host/run?…"),
        ("ftp://me@host/run", "ftp://host/run"),
        (
            "abfs://container@account.dfs.core.windows.net/run",
            "abfs://container@account.dfs.core.windows.net/run",
        ),
        ("abfs://me:pass@account/run", "abfs://account/run"),
        ("simplecache::https://me:pass@host/run?sig=1", "simplecache::https://host/run?…"),
        ("zip://a/b::ftp://me:pass@host/x.zip", "zip://a/b::ftp://host/x.zip"),
    ],
)
def test_a_url_is_shown_without_user_password_and_query(url, shown):
    assert public_url(url) == shown
    assert public_url(shown) == shown.replace("?…", "?…")


def test_names_take_the_place_of_values_in_what_a_library_says():
    redaction = Redaction.of(secret_url(), OPTIONS)
    said = f"403 for {CANARY} at hunter2%2BsEcret%2F9 with {987654321}, as me, in Bearer {CANARY}"
    assert clean(redaction.text(said)).count("<") == 5
    assert Redaction.of("s3://b", {"region": "eu"}).text("Europe in eu") == "Europe in <region>"
    clean(repr(redaction))


# --- a run that works ---------------------------------------------------------------------------------------


def test_a_run_tells_no_secret_anywhere(caplog):
    caplog.set_level(logging.DEBUG)
    url, sink = secret_url(), InMemorySink()
    options = CheckpointOptions(storage_options=OPTIONS, keep=KeepLatest(1))
    for start in (1, 3):
        with CheckpointManager(url, options=options, sinks=[sink]) as manager:
            shown = [repr(manager), repr(manager.options), repr(manager.storage), manager.storage.url]
            shown += [repr(manager.save(step, {"w": torch.ones(4)})) for step in (start, start + 1)]
            shown.append(repr(manager.resume({"w": torch.zeros(4)})))
            shown += [repr(info) for info in manager.checkpoints(abandoned=True)]
    clean(shown)
    clean([record.getMessage() for record in caplog.records if record.name.startswith("ckpt_core")])
    clean([repr(event) for event in sink.events])
    files = fsspec.filesystem("memory").store
    written = [file.getvalue() for name, file in files.items() if name.startswith("/me:")]
    assert len(written) > 5
    clean(written)


# --- errors -------------------------------------------------------------------------------------------------


@contextmanager
def failing(kind=Exception):
    """The block fails, and tells no secret."""
    with pytest.raises(kind) as caught:
        yield caught
    clean(told(caught.value))


@pytest.mark.parametrize(
    "options",
    [
        {"storage_options": CANARY},
        {"storage_options": [CANARY]},
        {"storage_options": {7: CANARY}},
        {"storage_options": OPTIONS, "verify": "maybe"},
        {"storage_options": OPTIONS, "sve": 1},
    ],
    ids=str,
)
def test_wrong_options_are_told_by_name(options):
    with failing(ConfigError):
        CheckpointOptions.from_mapping(options)
    with failing(ConfigError):
        CheckpointOptions.from_mapping(f"storage_options: {CANARY}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", f"storage_options: {{secret: '{CANARY}"),
        ("run.yaml", f"storage_options: {{secret: *{CANARY}}}"),
        ("run.yaml", f"storage_options: !{CANARY} x"),
        ("run.yaml", f"- {CANARY}"),
        ("run.yaml", f"storage_options: {CANARY}"),
        ("run.toml", f"secret = {CANARY}"),
        ("run.toml", f"[storage_options]\nsecret = '{CANARY}'\nsecret = '{CANARY}'"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_by_places(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with failing(ConfigError) as caught:
        CheckpointOptions.from_file(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"nowhere://me:{CANARY}@host/run?sig={CANARY}", OPTIONS),
        (f"s3://me:{CANARY}@bucket/run", OPTIONS),
        (f"s3://bucket/run?X-Amz-Signature={CANARY}", {}),
        (f"gs://me:{CANARY}@bucket/run", {}),
        (f"s3://me:{CANARY}@", {}),
        (f"s3:/me:{CANARY}@bucket/run", {}),
        (f"https:/host/run?sig={CANARY}", {}),
        ((f"https://me:{CANARY}@host",), {}),
        ("/scratch/run", OPTIONS),
    ],
    ids=str,
)
def test_a_root_that_cannot_be_opened_is_told_without_its_credentials(url, options):
    with failing(ConfigError):
        open_storage(url, options)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"ftp://me:{CANARY}@127.0.0.1:1/run", {}),
        (f"https://me:{CANARY}@127.0.0.1:1/run?sig={CANARY}", {}),
        (
            "s3://bucket/run",
            {"key": CANARY, "secret": CANARY, "endpoint_url": f"http://127.0.0.1:1/{CANARY}"},
        ),
        ("s3://bucket/run", {"key": "me", "secret": "x", "endpoint_url": CANARY}),
        ("s3://bucket/run", {"profile": CANARY}),
        ("s3://bucket/run", {"client_kwargs": {"config": CANARY}}),
        ("s3://bucket/run", {"client_kwargs": {CANARY[:3]: CANARY}}),
        ("s3://bucket/run", {"config_kwargs": {"signature_version": CANARY}, "key": "k", "secret": "s"}),
        ("memory://secrets-of-options", {"auto_mkdir": CANARY, "request_seconds": 1}),
    ],
    ids=str,
)
def test_errors_of_the_libraries_below_do_not_quote_secrets(url, options, caplog):
    caplog.set_level(logging.WARNING)
    state = {"w": torch.ones(4)}

    def use():
        with CheckpointManager(url, storage_options={"request_seconds": 2, **options}) as manager:
            manager.save(1, state)
            manager.resume(state)

    if url.startswith("memory"):
        use()
        return
    with failing((CheckpointError, OSError)):
        use()
    clean(caplog.text)


def test_an_error_that_quotes_a_secret_loses_it_and_what_is_behind_it():
    storage = object_storage(secret_url(), **OPTIONS)
    for error in (
        FileNotFoundError(2, "no such file", f"/{CANARY}/x"),
        PermissionError(f"refused for {CANARY}"),
        OSError(5, f"refused for {CANARY}"),
        ValueError(f"bad endpoint {CANARY}"),
    ):

        def fail(*_, error=error, **__):
            raise error from RuntimeError(CANARY)

        storage.filesystem.info = fail
        with failing(ConfigError if isinstance(error, ValueError) else type(error)):
            storage.size("x")


# --- the command line ---------------------------------------------------------------------------------------


def run(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    clean(captured.out)
    return code, clean(captured.err)


def test_the_command_line_tells_no_secret(capsys, monkeypatch):
    url = secret_url()
    with CheckpointManager(url) as manager:
        manager.save(1, {"w": torch.ones(4)})
    monkeypatch.setenv("SECRET", CANARY)
    given = ["--storage-option", "secret=@SECRET", "--storage-option", f"token={CANARY}"]
    for command in (
        ["ls"],
        ["ls", "--json"],
        ["show"],
        ["show", "--tensors"],
        ["verify"],
        ["verify", "--all"],
    ):
        assert run([*command, url, *given], capsys)[0] == 0, command
    assert run(["pin", f"{url}@1", "--reason", "x", *given], capsys)[0] == 0
    assert run(["prune", url, "--keep-latest", "1", "--dry-run", *given], capsys)[0] == 0
    assert run(["mark", f"{url}@1", "bad", "--reason", "x", *given], capsys)[0] == 0
    for place in (secret_url(), f"{url}/step-000000009", "s3://", f"nowhere://me:{CANARY}@host/run"):
        for command in ("ls", "show", "verify"):
            assert run([command, place, *given], capsys)[0] != 0
    assert run(["mark", url, "good"], capsys)[0] == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--storage-option", CANARY],
        ["--storage-option", f"={CANARY}"],
        ["--storage-optoin", f"secret={CANARY}"],
        [f"--storage-optoin=secret={CANARY}"],
        ["--storage-option", "secret=@NO_SUCH_VARIABLE"],
        ["--storage-option", "secret", CANARY],
    ],
)
def test_a_mistyped_storage_option_is_not_shown(capsys, words):
    code, said = run(["ls", "memory://nothing", *words], capsys)
    assert code == 2
    assert said


@pytest.mark.parametrize(
    "text", [CANARY, f"[{CANARY}]", f"{{secret: '{CANARY}", f"!{CANARY} x", "2020-99-99"]
)
def test_options_in_the_environment_are_not_shown(capsys, monkeypatch, text):
    monkeypatch.setenv("CKPT_SUITE_STORAGE_OPTIONS", text)
    code, said = run(["ls", "memory://nothing"], capsys)
    assert code == 2
    assert "CKPT_SUITE_STORAGE_OPTIONS" in said


def test_a_value_comes_from_the_variable_that_is_named(monkeypatch):
    from ckpt_core.cli._arguments import storage_options

    environment = {
        "PASSWORD": "123456",
        "KWARGS": '{"a": 1}',
        "CKPT_SUITE_STORAGE_OPTIONS": "{key: k, anon: true}",
    }
    pairs = ["secret=@PASSWORD", "client_kwargs=@KWARGS", "at=@@home", "anon=false"]
    given = {"secret": "123456", "client_kwargs": {"a": 1}, "at": "@home", "anon": False}
    assert storage_options(pairs, "s3://b/run", environment) == {"key": "k", **given}
    assert storage_options(pairs, "/scratch/run", environment) == given, (
        "for a path only what is given counts"
    )


# --- writer.json and logs -----------------------------------------------------------------------------------


def test_writer_json_tells_no_more_than_a_person_needs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"/home/{CANARY}/train.py", f"--token={CANARY}"])
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": torch.ones(4)})
        told = json.loads(clean((tmp_path / ".ckpt-suite/writer.json").read_text()))
    assert told["job"] == "train.py"


def test_names_in_a_log_cannot_steer_a_terminal_or_forge_a_line(caplog):
    logger = logger_of("ckpt_core.test")
    logger.warning("%s/%s: %d of %s", "/run", "a\x1b[31m\u202eb\rc", 3, ValueError("x\ny\x1b"))
    assert caplog.records[0].getMessage() == "/run/a?[31m?b?c: 3 of x\ny?"
    assert len(logger_of("ckpt_core.test").filters) == 1
