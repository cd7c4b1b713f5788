"""Malformed replies: whatever a server answers, the client gives a whole completion or its own error."""

import asyncio
import contextlib
import gzip
import json
import math
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.types import Sample, Status
from slime_core.types.arrays import columns_of, samples_of
from slime_rollout.errors import GenerationError
from slime_rollout.generate import Completion, EngineClient

FEW, MANY = 300, 10_000

# Raw JSON, because no Python value is written as some of these: numbers without end, half a surrogate pair.
ODD = (
    *(
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "-0.0",
        "1.5",
        "1e400",
        "-1e308",
        "1e-320",
        "NaN",
        "Infinity",
        "-Infinity",
    ),
    *("2147483648", "4294967296", "9223372036854775808", "1" + "0" * 400, "9" * 5000, "-" + "9" * 30),
    *(
        '""',
        '"NaN"',
        '"1"',
        '"-1"',
        '"1_0"',
        '"\\u0663"',
        '"\\ud800"',
        '"\\u0000"',
        '"stop"',
        '"default"',
        '"' + "9" * 5000 + '"',
    ),
    *("[]", "{}", "[[]]", "[null]", '[1, 2, "x"]', "[true, 5, null]", '{"type": "stop"}', "[" * 2000 + "]" * 2000),
    *('{"a": ' * 2000 + "1" + "}" * 2000, "", "+1", "01", "'x'", "undefined", "[1,]", "// x\n1"),
)
MARK = "@@odd%d@@"


@st.composite
def good_replies(draw):
    finish = draw(
        st.sampled_from(
            [
                {"type": "stop", "matched": 0},
                {"type": "length", "length": 9},
                {"type": "abort", "message": "Aborted", "status_code": None},
                {"type": "stop", "matched": "NaN happened"},
            ]
        )
    )
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=int(finish["type"] != "abort"), max_size=6))
    log_probs = [draw(st.floats(-50, 0)) for _ in tokens]
    meta = {
        "id": "a",
        "finish_reason": finish,
        "weight_version": draw(st.sampled_from(["default", "0", "17"])),
        "output_token_logprobs": [[p, token, None] for p, token in zip(log_probs, tokens, strict=True)],
        "completion_tokens": len(tokens),
    }
    if draw(st.booleans()):
        end = draw(st.integers(0, len(tokens)))
        meta["weight_versions"] = [
            {"version": "3", "start": 0, "end": end},
            {"version": "4", "start": end, "end": len(tokens)},
        ]
    return {"text": draw(st.text(max_size=8)), "output_ids": tokens, "meta_info": meta}


def places(value):
    """Every container in a reply with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def spoil_value(draw, reply, odd):
    """Something else in the place of a field, or the field left out, doubled or moved."""
    where = list(places(reply))
    if not where:
        return
    container, key = draw(st.sampled_from(where))
    how = draw(st.sampled_from(["odd", "odd", "odd", "delete", "double", "copy"]))
    if how == "odd":
        container[key] = MARK % len(odd)
        odd.append(draw(st.sampled_from(ODD)))
    elif how == "delete":
        del container[key]
    elif how == "double" and isinstance(container, list):
        container.append(container[key])
    else:
        other, name = draw(st.sampled_from(where))
        with contextlib.suppress(IndexError, KeyError):
            container[key] = json.loads(json.dumps(other[name]))


def spoil_bytes(draw, content):
    """Bytes lost, changed or added."""
    place = draw(st.integers(0, max(len(content) - 1, 0)))
    how = draw(st.sampled_from(["cut", "flip", "insert", "remove", "repeat"]))
    if how == "cut":
        return content[:place]
    if how == "flip":
        return content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
    if how == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=4)) + content[place:]
    if how == "remove":
        return content[:place] + content[place + draw(st.integers(1, 20)) :]
    return content + content


BODIES = (
    *(b"", b"null", b"[]", b"{}", b"0", b'"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x00" * 40, b"ok\n", b"data: {}\n\n"),
    *(b"<html><body><h1>502 Bad Gateway</h1></body></html>", b"[" * 100_000, b'{"text":' * 50_000, b"9" * 100_000),
    *(b'{"error": {"message": "no"}}', b'[{"text": "a"}]', b'"' + b"a" * 100_000),
)


@st.composite
def malformed(draw):
    """Bodies of replies with one to four things wrong."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from(BODIES))
    reply, odd = draw(good_replies()), []
    for _ in range(draw(st.integers(1, 3))):
        spoil_value(draw, reply, odd)
    text = json.dumps(reply)
    for number, value in enumerate(odd):
        text = text.replace(f'"{MARK % number}"', value)
    content = text.encode()
    return spoil_bytes(draw, content) if draw(st.integers(0, 2)) == 0 else content


def check(read):
    """What came of a reply: a completion that holds what it promises, or an error that can be shown."""
    try:
        done = read()
    except GenerationError as error:
        str(error).encode()
        assert "\n" not in str(error) and len(str(error)) < 1500
        return "error"
    count = len(done.tokens)
    assert len(done.log_probs) == len(done.weight_versions) == count
    assert all(type(token) is int and 0 <= token < 2**31 for token in done.tokens)
    assert all(type(value) is float and math.isfinite(value) and value <= 0.01 for value in done.log_probs)
    assert all(type(version) is int and 0 <= version < 2**63 for version in done.weight_versions)
    assert done.status in (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED)
    done.text.encode(), done.reason.encode()
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[1])
    sample.append_response(done.tokens, text=done.text, log_probs=done.log_probs, weight_version=done.weight_versions)
    assert samples_of(columns_of([sample])) == [sample]
    return "completion"


def run_fuzz(strategy, read, examples):
    """Check so many replies; how often which outcome was seen."""
    seen = {"error": 0, "completion": 0}

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def fuzz(reply):
        seen[check(lambda: read(reply))] += 1

    fuzz()
    print(f"malformed replies: {seen}")
    assert sum(seen.values()) >= examples
    assert all(seen.values())  # both ways are really gone
    return seen


def test_malformed_bodies():
    run_fuzz(malformed(), Completion.from_json, FEW)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_malformed_bodies():
    run_fuzz(malformed(), Completion.from_json, MANY)


@settings(max_examples=FEW, deadline=None, database=None)
@given(good_replies())
def test_good_replies_are_read(reply):
    content = json.dumps(reply).encode()
    if reply["meta_info"]["finish_reason"].get("matched") == "NaN happened":
        with pytest.raises(GenerationError, match="not numbers"):
            Completion.from_json(content)
        return
    done = Completion.from_json(content)
    assert (done.tokens, done.text) == (reply["output_ids"], reply["text"])
    assert done.log_probs == [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


STATUS_LINES = (
    *(b"HTTP/1.1 200 OK",) * 20,
    *(b"HTTP/1.1 %d X" % status for status in (204, 206, 301, 302, 400, 404, 408, 429, 500, 501, 503, 600, 999)),
    *(
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 200",
        b"HTTP/9.9 200 OK",
        b"HTTP/1.1 2OO OK",
        b"HTTP/1.1",
        b"ICY 200 OK",
        b"\x16\x03",
    ),
)
HEADERS = (
    b"Content-Type: text/html",
    b"Content-Type: application/json; charset=utf-99",
    b"Content-Type: \xff\xfe",
    b"Content-Encoding: br",
    b"Set-Cookie: \x01=;;;=",
    b"Location: http://127.0.0.1:9/",
    b"Retry-After: 99999999999999999999",
    b"Retry-After: Thu, 99 Foo 0000",
    b"No colon",
    b": empty",
    b"X: " + b"y" * 20_000,
    b"Transfer-Encoding: identity",
    b"Connection: upgrade",
)


def chunked(body, end=b"0\r\n\r\n"):
    half = len(body) // 2
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part) + end


FRAMES = {
    "length": lambda body: (b"Content-Length: %d" % len(body), body),
    "until the end": lambda body: (b"Connection: close", body),
    "too long": lambda body: (b"Content-Length: %d" % (len(body) + 10), body),
    "too short": lambda body: (b"Content-Length: %d" % (len(body) // 2), body),
    "negative": lambda body: (b"Content-Length: -1", body),
    "no number": lambda body: (b"Content-Length: ten", body),
    "two": lambda body: (b"Content-Length: 3\r\nContent-Length: %d" % len(body), body),
    "chunked": lambda body: (b"Transfer-Encoding: chunked", chunked(body)),
    "chunks end early": lambda body: (b"Transfer-Encoding: chunked", chunked(body, end=b"")),
    "chunk of no size": lambda body: (b"Transfer-Encoding: chunked", chunked(body, end=b"zz\r\n")),
    "gzip": lambda body: (b"Content-Encoding: gzip", gzip.compress(body)),
    "gzip cut": lambda body: (b"Content-Encoding: gzip", gzip.compress(body)[:-9]),
    "no gzip": lambda body: (b"Content-Encoding: gzip", body),
    "deflate": lambda body: (b"Content-Encoding: deflate", zlib.compress(body)),
    "nothing": lambda body: (b"", b""),
}


@st.composite
def wire_replies(draw):
    """Everything that a server sends before it closes the connection."""
    body = draw(malformed())
    frame, body = FRAMES[draw(st.sampled_from(["length"] * 8 + list(FRAMES)))](body)
    extra = draw(st.lists(st.sampled_from(HEADERS), max_size=2)) if draw(st.booleans()) else []
    head = b"\r\n".join([draw(st.sampled_from(STATUS_LINES)), frame or b"A: b", *extra])
    reply = head + b"\r\n\r\n" + body
    return spoil_bytes(draw, reply) if draw(st.integers(0, 9)) == 0 else reply


@contextlib.contextmanager
def fuzzed_client():
    """A client in an event loop next to a server that sends what it is given, once for each request, and closes."""
    with asyncio.Runner() as runner:
        given_reply = b""

        async def serve(reader, writer):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST /generate"):
                    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                    await reader.readexactly(int(length.split(b":")[1]))
                    writer.write(given_reply)
                else:
                    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\nConnection: close\r\n\r\n{"workers":[]}')
                await writer.drain()
            writer.close()

        async def start():
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            client = EngineClient(f"http://127.0.0.1:{port}", concurrency=4, timeout=20.0, retry_delays=())
            return server, await client.__aenter__()

        server, client = runner.run(start())

        def ask(reply):
            nonlocal given_reply
            given_reply = reply
            return runner.run(client.generate([1, 2], {}))

        yield ask
        runner.run(client.__aexit__(None, None, None))
        server.close()


def test_malformed_answers_on_a_socket():
    with fuzzed_client() as ask:
        run_fuzz(wire_replies(), ask, FEW)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_malformed_answers_on_a_socket():
    with fuzzed_client() as ask:
        run_fuzz(wire_replies(), ask, MANY)
