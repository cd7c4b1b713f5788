import http.server
import json
import threading
import time
import urllib.request

import pytest

from slime_rollout.http import HttpError, call


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
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.over = threading.Event()
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
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the proxies of its first request
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
