"""The S3 server of the benchmarks answers as S3 does, and the benchmarks on it measure what they say."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from benchmarks import objects, tiers
from benchmarks.buckets.bare import obstore_of
from benchmarks.s3 import Server, serving

obstore = pytest.importorskip("obstore")
exceptions = pytest.importorskip("obstore.exceptions")
MIB = 1 << 20
SMALL = ["--gib", "0.002", "--tensors", "5", "--rounds", "1"]


@pytest.fixture(scope="module")
def server():
    with serving(verifies=True) as running:
        yield running


@pytest.fixture
def store(server):
    found = obstore_of(server)
    for page in obstore.list(found):
        obstore.delete(found, [each["path"] for each in page])
    return found


def request(server: Server, method: str, target: str, body: bytes = b"", **headers: str):
    """Speak HTTP without a client of S3."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)) as connection:
        connection.request(method, f"/{server.bucket}/{target}", body or None, names)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def test_an_object_is_created_once_and_replaced_where_that_is_asked_for(store):
    for multipart in (False, True):
        key = f"new {multipart}+%/x"
        obstore.put(store, key, b"first", mode="create", use_multipart=multipart)
        with pytest.raises(exceptions.AlreadyExistsError):
            obstore.put(store, key, b"second", mode="create", use_multipart=multipart)
        assert bytes(obstore.get(store, key).bytes()) == b"first"
        obstore.put(store, key, b"third", use_multipart=multipart)
        assert bytes(obstore.get(store, key).bytes()) == b"third"


def test_ranges_of_parts_are_those_that_were_asked_for(store, server):
    content = bytes(range(256)) * (12 * MIB // 256)
    obstore.put(store, "parts", content, use_multipart=True, chunk_size=5 * MIB)
    spans = [(0, 1), (5 * MIB - 3, 5 * MIB + 3), (4 * MIB, 11 * MIB), (12 * MIB - 1, 12 * MIB)]
    for start, stop in spans:
        assert bytes(obstore.get_range(store, "parts", start=start, end=stop)) == content[start:stop]
    status, headers, tail = request(server, "GET", "parts", Range="bytes=-7")
    assert (status, headers["content-range"], tail) == (206, "bytes 12582905-12582911/12582912", content[-7:])
    assert request(server, "GET", "parts", Range="bytes=12582912-")[0] == 416


def test_listings_have_pages_prefixes_and_uploads_that_nobody_completed(store, server):
    for number in range(1005):
        obstore.put(store, f"many/{number:04}", b"")
    obstore.put(store, "many/deep/er", b"")
    assert sum(len(page) for page in obstore.list(store, "many")) == 1006
    found = obstore.list_with_delimiter(store, "many")
    assert (found["common_prefixes"], len(found["objects"])) == (["many/deep"], 1005)
    upload = request(server, "POST", "begun?uploads", x_amz_meta_token="mine")[2].decode()
    upload_id = upload.partition("<UploadId>")[2].partition("<")[0]
    request(server, "PUT", f"begun?partNumber=1&uploadId={upload_id}", b"part")
    assert b"<Size>4</Size>" in request(server, "GET", f"begun?uploadId={upload_id}")[2]
    assert b"<Key>begun</Key>" in request(server, "GET", "?uploads&prefix=be")[2]
    assert request(server, "DELETE", f"begun?uploadId={upload_id}")[0] == 204
    assert b"begun" not in request(server, "GET", "?uploads")[2]


def test_checksums_are_compared_and_metadata_is_kept(server):
    of_content = {"x_amz_checksum_crc32": "/sUwqQ=="}
    assert request(server, "PUT", "sum", b"other", **of_content)[0] == 400
    assert request(server, "PUT", "sum", b"content", x_amz_meta_token="mine", **of_content)[0] == 200
    asked = request(server, "HEAD", "sum", x_amz_checksum_mode="ENABLED")[1]
    assert (asked["x-amz-meta-token"], asked["x-amz-checksum-crc32"]) == ("mine", "/sUwqQ==")
    framed = b"7;chunk-signature=x\r\ncontent\r\n0\r\nx-amz-checksum-crc32:%s\r\n\r\n"
    for checksum, status in ((b"/sUwqQ==", 200), (b"2Vg1IA==", 400)):
        found = request(server, "PUT", "sum", framed % checksum, x_amz_decoded_content_length="7")
        assert (found[0], b"BadDigest" in found[2]) == (status, status == 400)
    assert request(server, "GET", "sum")[2] == b"content"


@pytest.fixture
def bench(tmp_path):
    """Run a command line and return the JSON it wrote."""

    def run(module, *arguments: str) -> dict:
        out = tmp_path / "out.json"
        assert module.main([*arguments, "--root", str(tmp_path), "--json", str(out)]) == 0
        return json.loads(out.read_text())["results"]

    return run


def test_clients_save_and_load_every_byte_once(bench):
    found = bench(objects, *SMALL, "--no-peak", "--only", "obstore,dcp-fsspec")
    assert found["save"]["obstore"]["sent"]["median"] == pytest.approx(1, abs=0.01)
    assert found["load"]["obstore"]["received"]["median"] == pytest.approx(1, abs=0.01)
    assert found["save"]["dcp-fsspec"]["cpu_seconds"]["median"] > 0


@pytest.mark.slow
def test_tiers_are_measured_from_the_call_to_the_bucket_and_back(bench):
    found = bench(tiers, *SMALL, "--only", "ours-tiers,obstore")
    ours = found["ours-tiers"]
    assert ours["stall_s"]["median"] <= ours["local_s"]["median"] <= ours["uploaded_s"]["median"]
    found = bench(tiers, *SMALL, "--resume", "--only", "resume-whole,resume-lost,obstore")
    assert found["resume-whole"]["received"]["median"] < 0.1
    assert found["resume-lost"]["received"]["median"] >= 1
    assert found["obstore"]["received"]["median"] == pytest.approx(1, abs=0.01)
    beside = ["--interference", "--step-ms", "5", "--base-steps", "2", "--only", "ours-tiers,obstore"]
    assert bench(tiers, *SMALL, *beside)["ours-tiers"]["stall_s"]["median"] > 0
