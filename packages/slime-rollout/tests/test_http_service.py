import asyncio
import contextlib
import gzip
import resource
import threading
import time
import zlib

import pytest
from aiohttp import web

from slime_rollout.http import ATTEMPTS, MOST_BYTES, REQUESTS, HttpError, Service, call


class Server:
    """A real server in a thread; `answer(number, body)` gives what it says, perhaps to be awaited.

    Attributes:
        bodies: What it was asked.
        connections: The transports on which it was asked.
    """

    def __init__(self, answer):
        self.answer, self.bodies, self.connections = answer, [], set()

    @property
    def open(self):
        return sum(not connection.is_closing() for connection in self.connections)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/score"

    async def note(self, request):
        self.connections.add(request.transport)
        return await self.handle(request)

    async def handle(self, request):
        self.bodies.append(await request.json())
        given = self.answer(len(self.bodies) - 1, self.bodies[-1])
        given = await given if asyncio.iscoroutine(given) else given
        return given if isinstance(given, web.StreamResponse) else web.json_response(given)

    @contextlib.contextmanager
    def serve(self):
        ready, loop = threading.Event(), asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(self._live(ready)))
        thread.start()
        assert ready.wait(20)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(self.stop.set)
            thread.join(20)
            loop.close()

    async def _live(self, ready):
        self.stop = asyncio.Event()
        handler = web.Server(self.note, handler_cancellation=True)
        server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self.stop.wait()
        server.close()
        await handler.shutdown(0.1)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


async def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_connections_are_used_again():
    async def ask_all(service, numbers):
        return await asyncio.gather(*(service.ask({"number": number}) for number in numbers))

    async def answer(number, body):
        await asyncio.sleep(0.01)
        return body["number"]

    with Server(answer).serve() as server:
        assert run(ask_all(Service(server.url, timeout=20.0), range(600))) == list(range(600))
        assert len(server.connections) <= REQUESTS
        assert len(server.bodies) == 600


def test_at_most_64_requests_run_at_once():
    running = most = 0

    async def answer(number, body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return 1

    async def ask_all(service):
        await asyncio.gather(*(service.ask({}) for _ in range(200)))

    with Server(answer).serve() as server:
        run(ask_all(Service(server.url, timeout=20.0)))
    assert 32 < most <= REQUESTS


def test_a_hanging_service_is_left_at_the_time_limit_each_time():
    with Server(lambda number, body: asyncio.sleep(60)).serve() as server:
        start = time.monotonic()
        with pytest.raises(HttpError, match=r"time limit of 0\.1 s") as caught:
            run(Service(server.url, timeout=0.1).ask({}))
        assert caught.value.may_pass
        assert len(server.bodies) == ATTEMPTS
        assert ATTEMPTS * 0.1 <= time.monotonic() - start < 10


def test_waiting_for_a_turn_is_not_counted():
    async def answer(number, body):
        await asyncio.sleep(2.6)
        return 1

    async def ask_all(service):
        return await asyncio.gather(*(service.ask({}) for _ in range(4 * REQUESTS)))

    with Server(answer).serve() as server:
        service = Service(server.url, timeout=10.0)
        assert run(ask_all(service)) == [1] * 4 * REQUESTS  # 10.4 s in all; a busy machine may take 7 s more for each
        assert len(server.bodies) == 4 * REQUESTS


@pytest.mark.parametrize(("status", "asked"), [(408, ATTEMPTS), (429, ATTEMPTS), (500, ATTEMPTS), (404, 1), (422, 1)])
def test_what_may_pass_is_tried_again(status, asked):
    with Server(lambda number, body: web.Response(status=status, text="scripted")).serve() as server:
        with pytest.raises(HttpError, match=f"HTTP {status}: scripted"):
            run(Service(server.url, timeout=20.0).ask({}))
        assert len(server.bodies) == asked


def test_a_refused_connection_is_no_answer():
    with Server(lambda number, body: 1).serve() as server:
        url = server.url
    with pytest.raises(HttpError, match="no answer") as caught:
        run(Service(url, timeout=20.0).ask({}))
    assert caught.value.may_pass


def test_an_answer_without_end_is_left_at_the_time_limit():
    async def handle(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await answer.write(b" " * 1000)
                await asyncio.sleep(0.01)
        return answer

    server = Server(None)
    server.handle = handle
    with server.serve(), pytest.raises(HttpError, match="time limit"):
        run(Service(server.url, timeout=0.2).ask({}))


def test_what_is_cancelled_leaves_the_service_and_its_turn():
    async def work(server):
        service = Service(server.url, timeout=60.0)
        asked = [asyncio.create_task(service.ask({"wait": True})) for _ in range(REQUESTS + 8)]
        await wait_until(lambda: len(server.bodies) == REQUESTS)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await wait_until(lambda: server.open == 0)
        assert await service.ask({"wait": False}) == 1

    async def answer(number, body):
        await asyncio.sleep(60 if body["wait"] else 0)
        return 1

    with Server(answer).serve() as server:
        run(work(server))


def test_its_connections_end_with_the_last_answer_and_later_requests_get_others():
    async def work(server):
        service = Service(server.url, timeout=20.0)
        for _ in range(2):
            assert await service.ask({}) == 1
            await wait_until(lambda: server.open == 0)

    with Server(lambda number, body: 1).serve() as server:
        run(work(server))


def test_odd_text_arrives_whole():
    with Server(lambda number, body: 1).serve() as server:
        assert run(Service(server.url, timeout=20.0).ask({"text": "\ud800 lone é"})) == 1
        assert server.bodies == [{"text": "\ud800 lone é"}]


def test_what_is_no_json_is_text_and_nothing_is_none():
    answers = [web.Response(text="<html>"), web.Response(body=b"")]
    with Server(lambda number, body: answers[number]).serve() as server:
        service = Service(server.url, timeout=20.0)
        assert run(service.ask({})) == "<html>"
        assert run(service.ask({})) is None


def packed(body, encoding):
    return web.Response(body=body, headers={"Content-Encoding": encoding, "Content-Type": "application/json"})


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)],
)
def test_an_answer_is_unpacked_and_has_a_largest_size(encoding, pack):
    bodies = [b'"%s"' % (b"a" * count) for count in (998, 999)]
    with Server(lambda number, body: packed(pack(bodies[number]), encoding)).serve() as server:
        service = Service(server.url, timeout=20.0)
        assert run(service.ask({}, most=1000)) == "a" * 998
        with pytest.raises(HttpError, match="HTTP 200: an answer of more than 1,000 bytes") as caught:
            run(service.ask({}, most=1000))
        assert not caught.value.may_pass and len(server.bodies) == 2


def test_a_bomb_takes_no_memory():
    """2 MB that unpack to 2 GB."""
    one = zlib.compressobj(wbits=31)
    bomb = b"".join([*(one.compress(bytes(2**20)) for _ in range(2000)), one.flush()])
    assert len(bomb) < 2.2e6
    with Server(lambda number, body: packed(bomb, "gzip")).serve() as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(HttpError, match="an answer of more than 1,000,000 bytes"):
            run(Service(server.url, timeout=60.0).ask({}, most=1_000_000))
        with pytest.raises(HttpError, match=f"an answer of more than {MOST_BYTES:,} bytes"):
            call("POST", server.url, {}, timeout=60.0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


@pytest.mark.parametrize(
    ("body", "encoding", "said"),
    [
        (b"{}", "gzip", "not of the Content-Encoding gzip"),
        (gzip.compress(b"{}")[:-5], "gzip", "is cut off"),
        (b"{}", "br", "Content-Encoding br, which nobody asked for"),
        (gzip.compress(b"{}") + bytes(10), "gzip", "more than one body of the Content-Encoding gzip"),
    ],
    ids=["something else", "cut off", "unknown", "more behind it"],  # the time is in what gzip makes
)
def test_what_cannot_be_unpacked_is_no_answer(body, encoding, said):
    with Server(lambda number, asked: packed(body, encoding)).serve() as server:
        with pytest.raises(HttpError, match=said) as caught:
            run(Service(server.url, timeout=20.0).ask({}))
        assert caught.value.may_pass


def redirect(status, where):
    return web.Response(status=status, headers={"Location": where})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_server_is_not_followed(status):
    with Server(lambda number, body: 1).serve() as other:
        with Server(lambda number, body: redirect(status, other.url)).serve() as server:
            with pytest.raises(HttpError, match=f"HTTP {status}: redirected to {other.url}, another server") as caught:
                run(Service(server.url, timeout=20.0).ask({"label": "secret"}))
            assert not caught.value.may_pass
        for where in (f"https://127.0.0.1:{server.port}/score", "file:///etc/passwd", "//localhost:1/x", "http://[x"):
            with (
                Server(lambda number, body, where=where: redirect(status, where)).serve() as server,
                pytest.raises(HttpError, match="another server"),
            ):
                run(Service(server.url, timeout=20.0).ask({"label": "secret"}))
        assert other.bodies == []


@pytest.mark.parametrize("status", [307, 308])
@pytest.mark.parametrize("where", ["/other?a=b", "{url}/more"])
def test_a_redirect_on_the_same_server_is_followed(status, where):
    def answer(number, body):
        return redirect(status, where.format(url=server.url)) if number == 0 else body

    with Server(answer).serve() as server:
        assert run(Service(server.url, timeout=20.0).ask({"a": 1})) == {"a": 1}


def test_redirects_in_a_circle_end():
    with Server(lambda number, body: redirect(307, "/score")).serve() as server:
        with pytest.raises(HttpError, match="HTTP 307"):
            run(Service(server.url, timeout=20.0).ask({}))
        assert len(server.bodies) == 5
