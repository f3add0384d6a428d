"""Tests trust faults of a service to happen where they say."""

from __future__ import annotations

import http.client
import threading

import pytest

from tests.support.service_faults import FaultyService, ServiceControl, ServiceFault

LISTING = (
    b"<R><Contents><Key>run/a</Key></Contents><Contents><Key>run/b</Key></Contents>"
    b"<CommonPrefixes><Prefix>run/c/</Prefix></CommonPrefixes></R>"
)


class Application:
    """Counts what it did, and answers with it; listings grow by themselves."""

    def __init__(self):
        self.done = []

    def __call__(self, environ, start):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        self.done.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], body))
        listing = "list-type=2" in environ["QUERY_STRING"]
        content = LISTING if listing else f"answer {len(self.done)}".encode()
        start("200 OK", [("Content-Length", str(len(content)))])
        return [content]


@pytest.fixture
def application():
    return Application()


@pytest.fixture
def endpoint(application):
    serving = pytest.importorskip("werkzeug.serving")

    class Quiet(serving.WSGIRequestHandler):
        def log(self, *arguments):
            pass

    server = serving.make_server(
        "127.0.0.1", 0, FaultyService(application), threaded=True, request_handler=Quiet
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def control(endpoint):
    return ServiceControl(f"http://{endpoint}")


def ask(endpoint, method="GET", path="/b/k", body=None, who="rank0"):
    connection = http.client.HTTPConnection(endpoint, timeout=60)
    try:
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={who}/20260101/us-east-1/s3/aws4_request"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_requests_are_numbered_with_who_sent_them(endpoint, control):
    ask(endpoint, "PUT", "/b/run/a%20b?uploadId=x%2Fy", b"1")
    ask(endpoint, "HEAD", "/b/run/c", who="rank1")
    told = [(request.number, request.method, request.target, request.who) for request in control.log()]
    assert told == [(0, "PUT", "/b/run/a b?uploadId=x/y", "rank0"), (1, "HEAD", "/b/run/c", "rank1")]
    assert control.log(since=1) == control.log()[1:]


def test_errors_are_answered_from_the_nth_on_and_as_often_as_asked(endpoint, control, application):
    control.set(ServiceFault(action="error", code="SlowDown", target="/b/k", nth=1, count=2))
    found = [ask(endpoint) for _ in range(4)]
    assert [status for status, _ in found] == [200, 503, 503, 200]
    assert b"<Code>SlowDown</Code>" in found[1][1]
    assert len(application.done) == 2
    assert [list(request.faults) for request in control.log()] == [[], ["error"], ["error"], []]


def test_faults_can_be_of_one_sender_alone(endpoint, control):
    control.set(ServiceFault(action="error", who="rank1"))
    assert ask(endpoint, who="rank0")[0] == 200
    assert ask(endpoint, who="rank1")[0] == 500
    control.clear()
    assert ask(endpoint, who="rank1")[0] == 200


@pytest.mark.parametrize(("action", "done"), [("drop", 0), ("lose", 1)])
def test_a_connection_ends_before_or_after_the_request_is_done(endpoint, control, application, action, done):
    control.set(ServiceFault(action=action))
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(endpoint, "PUT", body=b"content")
    assert application.done == [("PUT", "/b/k", b"content")] * done


def test_an_answer_ends_in_its_middle(endpoint, control):
    control.set(ServiceFault(action="truncate"))
    with pytest.raises(http.client.IncompleteRead):
        ask(endpoint)


def test_what_hangs_is_done_when_it_is_released_though_nobody_waits(endpoint, control, application):
    control.set(ServiceFault(action="hang", method="PUT"))
    gone = http.client.HTTPConnection(endpoint, timeout=60)
    gone.request("PUT", "/b/k", b"late")
    waiting = threading.Thread(target=ask, args=(endpoint, "PUT", "/b/other", b"x"))
    waiting.start()
    while len(control.log()) < 2:
        ask(endpoint)
    gone.close()
    assert all(method == "GET" for method, _, _ in application.done)
    control.release()
    waiting.join()
    control.clear()
    while ("PUT", "/b/k", b"late") not in application.done:
        ask(endpoint)


def test_listings_hide_and_lag(endpoint, control):
    listing = "/b?list-type=2&prefix=run/"
    earlier = ask(endpoint, path=listing)[1]
    control.set(ServiceFault(action="hide", hidden="run/[bc]*"))
    hidden = ask(endpoint, path=listing)[1]
    assert hidden == b"<R><Contents><Key>run/a</Key></Contents></R>"
    assert ask(endpoint, path="/b/run/b") == (200, b"answer 3")
    control.set(ServiceFault(action="stale", as_of=1))
    assert ask(endpoint, path=listing)[1] == earlier
