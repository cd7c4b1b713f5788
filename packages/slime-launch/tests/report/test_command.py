import json
import socket

import pytest

from slime_launch.cli import main
from slime_launch.tracking import Tracker


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "runs" / "first"
    directory.mkdir(parents=True)
    tracker = Tracker(directory, tensorboard=False)
    tracker.log("rollout", step=0, rollout_id=0, metrics={"rollout/raw_reward": 0.5})
    tracker.close()
    return directory


def test_a_page_beside_the_run(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"open {run}/report.html\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_what_it_shows_for_other_programs(run, tmp_path, capsys):
    words = ["--output", f"{tmp_path}/p.html", "--json", f"{tmp_path}/p.json", "--trace", f"{tmp_path}/t.json"]
    assert main(["report", str(run), str(run), *words]) == 0
    assert "for https://ui.perfetto.dev" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "p.json").read_text())["runs"]) == 2
    assert "traceEvents" in json.loads((tmp_path / "t.json").read_text())
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "report needs a run's --output-dir"),
        (["nowhere"], "nowhere holds neither metrics.jsonl nor settings.json"),
        (["{run}", "--outptu", "x"], "--outptu"),
        (["{run}", "--port", "99999"], "--port"),
        (["{run}", "--output", "{run}/no/such/page.html"], "{run}/no/such/page.html cannot be written"),
    ],
)
def test_errors_are_a_line(run, capsys, words, said):
    assert main(["report", *(word.format(run=run) for word in words)]) == 2
    captured = capsys.readouterr()
    assert said.format(run=run) in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_port_that_is_taken(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["report", str(run), "--serve", "--port", str(port)]) == 2
    assert f"--port {port} cannot be used" in capsys.readouterr().err
