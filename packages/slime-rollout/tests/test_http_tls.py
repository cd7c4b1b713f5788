"""Certificates of services are checked: by whom they are, and for which host."""

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
import sys
import threading

import pytest
from aiohttp import web

from slime_rollout.http import HttpError, Service, call

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="certificates are made with openssl, which is not here")
ASK = "import sys; from slime_rollout.http import call; print(call('POST', sys.argv[1], {}, timeout=20))"


def certificate(directory, host):
    """Paths of a certificate that is its own authority, and of its key."""
    files = directory / f"{host}.crt", directory / f"{host}.key"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    words += ["-subj", f"/CN={host}", "-addext", f"subjectAltName={'IP' if host[0].isdigit() else 'DNS'}:{host}"]
    words += ["-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run([OPENSSL, *words], check=True, capture_output=True, timeout=60)
    return files


@contextlib.contextmanager
def served(files, asked):
    """The address of a service with this certificate, which notes what it is asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def answer(request):
        asked.append(await request.text())
        return web.json_response(1.0)

    async def live():
        nonlocal port
        server = await loop.create_server(web.Server(answer), "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()

    port, stop = 0, asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(live()))
    thread.start()
    assert ready.wait(20)
    try:
        yield f"https://127.0.0.1:{port}/score"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["call", "service"])
def test_a_certificate_that_proves_nothing_is_refused_before_anything_is_sent(tmp_path, way):
    asked = []
    with served(certificate(tmp_path, "127.0.0.1"), asked) as url, pytest.raises(HttpError) as caught:
        if way == "call":
            call("POST", url, {"prompt": "secret"}, timeout=20)
        else:
            asyncio.run(Service(url, timeout=20).ask({"prompt": "secret"}))
    assert asked == []
    assert url in str(caught.value) and "certificate" in str(caught.value)
    assert not caught.value.may_pass


@pytest.mark.timeout(120)
def test_an_authority_of_ones_own_is_given_by_the_environment(tmp_path):
    files, asked = certificate(tmp_path, "127.0.0.1"), []
    wrong = certificate(tmp_path, "somebody.example")
    with served(files, asked) as url:
        told = dict(os.environ, SSL_CERT_FILE=str(files[0]))
        done = subprocess.run([sys.executable, "-c", ASK, url], capture_output=True, text=True, timeout=60, env=told)
        assert done.stdout.strip() == "1.0", done.stderr
    with served(wrong, asked) as url:  # a trusted one, of another host
        told = dict(os.environ, SSL_CERT_FILE=str(wrong[0]))
        done = subprocess.run([sys.executable, "-c", ASK, url], capture_output=True, text=True, timeout=60, env=told)
        assert "certificate" in done.stderr
    assert len(asked) == 1
