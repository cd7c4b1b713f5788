import gzip
import http.client
import json
import threading

import pytest

from slime_launch.report import serve
from slime_launch.report.serve import LiveData, make_server
from slime_launch.tracking import Tracker


@pytest.fixture
def run(tmp_path):
    tracker = Tracker(tmp_path, tensorboard=False)
    tracker.log("rollout", step=0, rollout_id=0, metrics={"rollout/raw_reward": 0.5})
    yield tmp_path, tracker
    tracker.close()


def rewards(body):
    return json.loads(gzip.decompress(body))["runs"][0]["curves"]["rollout"]["series"]["rollout/raw_reward"]


def test_data_are_collected_again_when_they_changed_and_it_costs_little(run, monkeypatch):
    directory, tracker = run
    now, cost, collected = [0.0], 0.5, []

    def collect(*args, report_data=serve.report_data, **more):
        now[0] += cost
        collected.append(now[0])
        return report_data(*args, **more)

    monkeypatch.setattr(serve, "report_data", collect)
    live = LiveData([directory], clock=lambda: now[0])
    body, tag = live.body()
    assert live.body() == (body, tag) and len(collected) == 1
    tracker.log("rollout", step=1, rollout_id=1, metrics={"rollout/raw_reward": 0.75})
    assert live.body() == (body, tag)  # too soon
    now[0] += serve.RATIO * cost
    newer, other = live.body()
    assert rewards(newer) == [0.5, 0.75] and other != tag and len(collected) == 2


TOKEN = "a-token-of-this-test"


def test_a_browser_gets_the_page_and_new_data(run):
    directory, _ = run
    with make_server([directory], 0, TOKEN) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert server.server_address[0] == "127.0.0.1"

            def get(path, **headers):
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                return answer, answer.read()

            answer, page = get(f"/?token={TOKEN}")
            assert answer.status == 200 and page.startswith(b"<!doctype html>")
            answer, body = get(f"/data.json?token={TOKEN}")
            assert rewards(body) == [0.5]
            again, nothing = get(f"/data.json?token={TOKEN}", **{"If-None-Match": answer.headers["ETag"]})
            assert (again.status, nothing) == (304, b"")
            assert get(f"/../metrics.jsonl?token={TOKEN}")[0].status == 404
            assert get(f"/data.json?token={TOKEN}", Host="a-site-elsewhere.example:80")[0].status == 403
            assert get("http://[", Host="localhost:1")[0].status == 400
            for path in ("/", "/data.json", "/nothing"):
                for query in ("", "?token=", "?token=another", f"?token={TOKEN}x", f"?token=x&token={TOKEN}", "?%ff"):
                    answer, body = get(path + query)
                    assert (answer.status, body) == (403, serve.NO_TOKEN), path + query
                assert get(path, Cookie=f"token={TOKEN}", Authorization=f"token {TOKEN}")[0].status == 403
        finally:
            server.shutdown()
