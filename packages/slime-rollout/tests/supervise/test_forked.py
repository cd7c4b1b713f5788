"""Commands that are forked from a process that has their imports: they end as those that are started do."""

import json
import os
import signal
import sys

import pytest

from slime_rollout.supervise import Supervised, forked, reaper
from slime_rollout.supervise.forked import template

GRACE = 1.0
TOLD = """
import json, os, sys
print(json.dumps({
    "prepared": "prepared" in sys.modules, "name": __name__, "words": sys.argv[1:],
    "path": [sys.path[0], len(sys.path), os.getcwd() in sys.path],
    "directory": os.getcwd(), "word": os.environ.get("WORD"), "set": os.environ.get("SET"), "session": os.getsid(0),
    "input": sys.stdin.read(),
}))
"""
PREPARE = "import os, sys; sys.modules['prepared'] = sys; os.environ['SET'] = 'by an import'"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def address():
    with template(sys.executable, PREPARE, os.environ) as address:
        yield address


@pytest.fixture
def forked_tree(marked, address, directory):
    """A tree that tries to survive, below a forked supervisor."""
    script = directory / "tree.py"
    script.write_text(marked.tree()[2])
    command = [sys.executable, str(script), marked.mark]
    with Supervised.start(command, log_path=directory / "log", grace=GRACE, template=address) as supervised:
        marked.wait_ready()
        yield supervised


def write_script(directory, code):
    script = directory / "script.py"
    script.write_text(code)
    return str(script)


def run(command, log, **more):
    with Supervised.start([sys.executable, *command], log_path=log, grace=GRACE, **more) as supervised:
        return supervised.wait(60), supervised.log_tail()


@pytest.mark.parametrize("words", ["-m script", "script.py", "-P script.py"])
def test_a_forked_command_is_as_a_started_one_but_for_its_imports(address, directory, words):
    write_script(directory, TOLD)
    command = words.split()
    environment = {**os.environ, "WORD": "here"}
    by_fork = run([*command, "a", "--b"], directory / "forked", env=environment, template=address)
    started = run([*command, "a", "--b"], directory / "started", env=environment)
    assert (by_fork[0], started[0]) == (0, 0), by_fork[1]
    one, other = json.loads(by_fork[1]), json.loads(started[1])
    assert one.pop("session") != other.pop("session") != os.getsid(0)
    assert one == {**other, "prepared": True, "set": "by an import"}
    assert one["path"][2] == (command[0] != "-P")
    assert other["prepared"] is False and other["words"] == ["a", "--b"] and other["directory"] == str(directory)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError('of the command')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("import atexit; atexit.register(print, 'at its end')", 0),
    ],
)
def test_its_exit_code(address, directory, code, expected):
    code, said = run([write_script(directory, code)], directory / "log", template=address)
    assert code == expected
    assert expected != 1 or said.endswith("ValueError: of the command")
    assert expected != 0 or said == "at its end"


def test_stop_ends_the_whole_tree_and_nothing_else(marked, forked_tree, bystander, address):
    assert len(forked_tree.process_ids()) > 4
    forked_tree.stop()
    assert marked.pids() == []
    assert forked_tree.poll() == 128 + signal.SIGTERM == forked_tree.stop()
    assert forked_tree.process_ids() == []
    assert bystander.poll() is None


def test_a_second_signal_ends_it_at_once(marked, forked_tree):
    forked_tree.kill()
    assert forked_tree.wait(10) in (128 + signal.SIGKILL, 128 + signal.SIGHUP)
    assert marked.pids() == []


def test_its_command_goes_when_the_supervisor_is_killed(marked, forked_tree):
    pids = forked_tree.process_ids()
    os.kill(forked_tree.pid, signal.SIGKILL)
    assert forked_tree.wait(10) == -signal.SIGKILL
    marked.wait_until(lambda: not reaper.is_alive(pids[0]), what="end of the command")
    for pid in marked.pids():  # what it had started belongs to nobody now; in a run, to the supervisor of all
        os.kill(pid, signal.SIGKILL)
    marked.wait_gone()


def test_nothing_is_left_when_its_starter_is_killed(marked, address, directory):
    script = directory / "tree.py"
    script.write_text(marked.tree()[2])
    body = "from slime_rollout.supervise import Supervised\nfrom pathlib import Path\n"
    body += f"s = Supervised.start([sys.executable, {str(script)!r}, sys.argv[1]], log_path=Path('log'), grace=1.0, "
    body += f"template={address!r})\ntime.sleep(600)"
    with marked.starter(body) as starter:
        marked.wait_ready()
        starter.kill()
    marked.wait_gone()


def test_it_lives_on_when_the_process_it_was_forked_from_is_gone(marked, directory):
    with template(sys.executable, PREPARE, os.environ) as address:
        first = Supervised.start(
            [sys.executable, write_script(directory, "import time; print('up', flush=True); time.sleep(600)")],
            log_path=directory / "first",
            grace=GRACE,
            template=address,
        )
        marked.wait_until(lambda: first.log_tail() == "up")
    try:
        assert first.poll() is None
    finally:
        assert first.stop() == 128 + signal.SIGTERM


def test_without_that_process_a_command_is_started(directory, caplog):
    script = write_script(directory, "import sys; print('prepared' in sys.modules)")
    assert run([script], directory / "log", template="slime-nobody") == (0, "False")
    assert "is started, not forked from the process that has its imports: it does not answer" in caplog.text


def test_a_request_that_was_given_up_is_not_served_later(marked, directory, monkeypatch, caplog):
    """Else two commands would run, on one port."""
    prepare = PREPARE + "\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    script = write_script(directory, "import sys; print('prepared' in sys.modules); open('ran', 'a').write('x')")
    with template(sys.executable, prepare, os.environ) as address:
        monkeypatch.setattr(forked, "ANSWER_SECONDS", 0.2)
        assert run([script], directory / "first", template=address) == (0, "False")
        monkeypatch.undo()
        monkeypatch.chdir(directory)
        (directory / "go").touch()
        assert run([script], directory / "second", template=address) == (0, "True")
    assert "it does not answer: timed out" in caplog.text
    assert (directory / "ran").read_text() == "xx"


@pytest.mark.parametrize(
    ("prepare", "environment", "why"),
    [
        (PREPARE, {"OMP_NUM_THREADS": "13"}, "it was started with OMP_NUM_THREADS="),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            {},
            "threads",
        ),
        ("raise ImportError('no such package')", {}, "does not answer"),
    ],
)
def test_where_a_fork_would_differ_a_command_is_started(directory, caplog, prepare, environment, why):
    script = write_script(directory, "import sys; print('prepared' in sys.modules)")
    with template(sys.executable, prepare, os.environ) as address:
        said = run([script], directory / "log", env={**os.environ, **environment}, template=address)
    assert said == (0, "False")
    assert why in caplog.text
