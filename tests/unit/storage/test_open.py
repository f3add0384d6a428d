"""Which root becomes which storage, and what is said when it cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.storage import LocalStorage, ObjectStorage, open_storage
from tests.kit.memory import MemoryStorage


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}"])
def test_paths_and_file_urls_are_local(tmp_path, form):
    storage = open_storage(form.format(tmp_path))
    assert isinstance(storage, LocalStorage)
    assert storage.url == str(tmp_path)


def test_path_objects_and_home_are_local(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage(Path("~/runs")).url == str(tmp_path / "runs")


def test_other_urls_are_object_stores():
    storage = open_storage("memory://somewhere/run/")
    assert isinstance(storage, ObjectStorage)
    assert storage.url == "memory://somewhere/run"
    assert not storage.supports_rename


def test_a_storage_passes_through():
    storage = MemoryStorage("mine")
    assert open_storage(storage) is storage


@pytest.mark.emulator
def test_options_reach_the_filesystem(s3_endpoint):
    options = {"key": "testing", "secret": "testing", "endpoint_url": s3_endpoint}
    with pytest.raises(FileNotFoundError, match="'absent-bucket' does not exist"):
        open_storage("s3://absent-bucket/run", options).check_root()


def test_options_that_nothing_would_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="endpoint_url"):
        open_storage(tmp_path, {"endpoint_url": "x"})
    with pytest.raises(ConfigError, match="endpoint_url"):
        open_storage(MemoryStorage(), {"endpoint_url": "x"})


def test_a_url_that_went_through_pathlib_is_recognised():
    with pytest.raises(ConfigError, match="pass it as a str"):
        open_storage(Path("s3://bucket/run"))


def test_an_empty_root_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        open_storage("")


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ConfigError, match="nonsense"):
        open_storage("nonsense://bucket/run")


@pytest.mark.parametrize(
    ("packages", "protocol", "extra"),
    [
        (["botocore"], "s3", "s3"),
        (["gcsfs"], "gs", "gcs"),
        (["obstore"], "gs", "gcs"),
    ],
)
def test_a_missing_extra_says_what_to_install(packages, protocol, extra):
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {packages!r}: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from ckpt_core.errors import ConfigError\n"
        "from ckpt_core.storage import open_storage\n"
        f"try: open_storage('{protocol}://bucket/run')\n"
        "except ConfigError as error: print(error)\n"
    )
    assert f'pip install "ckpt-suite[{extra}]"' in _run(program)


def test_a_local_root_needs_neither_torch_nor_fsspec(tmp_path):
    program = (
        "import sys\n"
        "from ckpt_core.storage import open_storage\n"
        f"open_storage({str(tmp_path)!r}).list('')\n"
        "print(sorted({'torch', 'fsspec', 's3fs', 'asyncio', 'pytest'} & set(sys.modules)))\n"
    )
    assert _run(program) == "[]\n"


def _run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout
