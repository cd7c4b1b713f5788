import ast
import asyncio
import http.server
import itertools
import json
import logging
import threading
import time
from pathlib import Path

import pytest

import slime_rollout
from slime_rollout.http import RETRY_DELAYS, HttpError, Retries, _Asked, call, patient_delays, retry_after_seconds


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the statuses in the server's list, one after the other, and echoes the body."""

    def do_POST(self):
        status = self.server.statuses.pop(0)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if status == "slow":
            time.sleep(1.0)
            status = 200
        if status in ("endless", "cut short"):
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"[")
            while status == "endless" and not self.server.over.wait(0.02):
                self.wfile.write(b"1,")
            return
        self.send_response(status)
        answer = json.dumps({"echo": json.loads(body)}).encode() if status == 200 else b"went wrong"
        if status == 204:
            answer = b""
        self.send_header("Content-Length", str(len(answer)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.over, server.headers = threading.Event(), {}
    server.url = f"http://127.0.0.1:{server.server_port}/path"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def test_json_there_and_back(server):
    server.statuses = [200, 204]
    assert call("POST", server.url, {"a": [1, 2]}) == {"echo": {"a": [1, 2]}}
    assert call("POST", server.url, {}) is None


def test_a_server_error_is_tried_again_and_logged(server, caplog):
    server.statuses = [503, 500, 200]
    assert call("POST", server.url, 1, attempts=3) == {"echo": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "attempt 1 of 3 failed" in caplog.text and "HTTP 503" in caplog.text


def test_it_gives_up_with_the_servers_words(server):
    server.statuses = [500, 500, 200]
    with pytest.raises(HttpError, match=r"POST .*/path: HTTP 500: went wrong") as caught:
        call("POST", server.url, 1, attempts=2)
    assert caught.value.status == 500
    assert server.statuses == [200]


def test_a_client_error_is_never_tried_again(server):
    server.statuses = [400, 200]
    with pytest.raises(HttpError) as caught:
        call("POST", server.url, 1, attempts=5)
    assert (caught.value.status, caught.value.body) == (400, "went wrong")
    assert server.statuses == [200]


def test_time_limit(server):
    server.statuses = ["slow"]
    with pytest.raises(HttpError, match=r"no answer: time limit of 0\.1 s"):
        call("POST", server.url, 1, timeout=0.1)


def test_the_time_limit_is_for_the_whole_answer(server):
    """One that trickles keeps the socket busy."""
    server.statuses = ["endless"]
    with pytest.raises(HttpError, match=r"no answer: time limit of 0\.3 s"):
        call("POST", server.url, 1, timeout=0.3)


def test_an_answer_that_is_cut_short_is_tried_again(server):
    server.statuses = ["cut short", 200]
    assert call("POST", server.url, 1, attempts=2) == {"echo": 1}


def test_a_proxy_of_the_environment_is_not_asked(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server.statuses = [200]
    assert call("POST", server.url, 1) == {"echo": 1}


def test_an_error_says_whether_time_ran_out(server):
    server.statuses = ["slow", 400]
    for timeout, expected in ((0.2, True), (5.0, False)):
        with pytest.raises(HttpError) as caught:
            call("POST", server.url, {}, timeout=timeout)
        assert caught.value.timed_out is expected


def test_nobody_there(server, caplog):
    server.shutdown()
    server.server_close()
    with pytest.raises(HttpError, match=r"no answer: .*refused"):
        call("GET", server.url, attempts=2)
    assert "attempt 1 of 2 failed" in caplog.text


def test_a_call_inside_an_event_loop(server):
    async def inside():
        return call("POST", server.url, 1)

    server.statuses = [200]
    assert asyncio.run(inside()) == {"echo": 1}


def test_a_server_may_ask_for_more_time(server):
    server.statuses = [429, 200]
    server.headers = {"Retry-After": "1"}
    start = time.monotonic()
    assert call("POST", server.url, 1, attempts=2) == {"echo": 1}
    assert time.monotonic() - start >= 1.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 0.0),
        ("0", 0.0),
        (" 7 ", 7.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:05 GMT", 0.0),
        ("-3", 0.0),
        ("1.5", 0.0),
        ("٣", 0.0),
        ("9" * 400, 0.0),
        ("soon", 0.0),
        ("Thu, 99 Foo 1970 00:01:40 GMT", 0.0),
        ("", 0.0),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after_seconds(value, now=10.0) == seconds


def failed(body="busy", **more):
    return HttpError("POST", "http://a", 503, body, **more)


def test_waiting_times_grow_and_are_spread():
    retries = Retries(RETRY_DELAYS)
    waits = [retries.wait_after(attempt, failed()) for attempt in range(1, len(RETRY_DELAYS) + 1)]
    assert waits != list(RETRY_DELAYS)
    assert all(0.75 * mean <= wait <= 1.25 * mean for mean, wait in zip(RETRY_DELAYS, waits, strict=True))
    assert all(later > earlier for earlier, later in itertools.pairwise(waits[:5]))
    assert 240 < sum(waits) < 400


def test_requests_that_failed_together_do_not_come_back_together():
    retries = Retries([1.0])
    assert len({retries.wait_after(1, failed()) for _ in range(100)}) == 100


def test_equal_runs_wait_equally():
    one, other = ([each.wait_after(1, failed()) for _ in range(3)] for each in (Retries([1.0]), Retries([1.0])))
    assert one == other


def test_the_server_may_ask_for_more_but_not_for_less():
    retries = Retries([1.0, 1.0])
    assert retries.wait_after(1, failed(retry_after=50.0)) == 50.0
    assert retries.wait_after(2, failed(retry_after=0.1)) >= 0.75
    assert retries.count == 2
    last = failed()
    with pytest.raises(HttpError) as caught:
        retries.wait_after(3, last)
    assert caught.value is last and retries.count == 2


def test_a_hundred_failures_at_once_are_two_lines(caplog, monkeypatch):
    clock = iter([100.0] * 100 + [106.0])
    monkeypatch.setattr("slime_rollout.http.time.monotonic", lambda: next(clock))
    retries = Retries([1.0])
    with caplog.at_level(logging.WARNING):
        for _ in range(101):
            retries.wait_after(1, failed())
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("attempt 1 of 2 failed: POST http://a: HTTP 503: busy; trying again in")
    assert second.endswith("; so did 99 other attempts")


@pytest.mark.parametrize(
    ("status", "may_pass", "may_run"),
    [
        *((None, True, True), (408, True, True), (429, True, False)),
        *((500, True, True), (502, True, True), (503, True, False), (504, True, True)),
        *((501, False, True), (404, False, True), (302, False, True), (200, False, True)),
    ],
)
def test_what_a_status_says(status, may_pass, may_run):
    error = HttpError("POST", "http://a", status, "why")
    assert (error.may_pass, error.may_run) == (may_pass, may_run)
    assert error.problem == ("why" if status is None else f"HTTP {status}: why")


@pytest.mark.parametrize("seconds", [0.0, 320.0, 1000.0])
def test_patience_goes_on_as_it_began(seconds):
    delays = patient_delays(seconds)
    assert delays[: len(RETRY_DELAYS)] == RETRY_DELAYS
    assert set(delays[len(RETRY_DELAYS) :]) <= {10.0}
    assert max(seconds, sum(RETRY_DELAYS)) <= sum(delays) < max(seconds, sum(RETRY_DELAYS)) + 10.0


def test_a_server_that_answers_nothing_is_known_as_long_as_requests_wait_there():
    asked, url = _Asked(), "http://127.0.0.1:1"
    with asked(f"{url}/one"):
        with asked(f"{url}/two"), asked("https://other"):
            assert asked.silent(0.0) == [url, "https://other"]
            assert asked.silent() == []
        assert asked.silent(0.0) == [url]
    assert asked.silent(0.0) == []


UNPICKLES = ("pickle.load", "pickle.loads", "Unpickler", "torch.load", "np.load", "numpy.load", "yaml.unsafe_load")


def test_nothing_in_this_package_unpickles():
    """Whatever comes over HTTP is JSON; every module that speaks HTTP is here."""
    paths = list(Path(slime_rollout.__file__).parent.rglob("*.py"))
    assert len(paths) > 50
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node.func)}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(UNPICKLES)
    ]
    assert not found
