"""What blocks the event loop is told with its name; what may do so is not."""

import asyncio
import logging
import threading

import pytest

from slime_rollout.generate import blocked, single_turn
from slime_rollout.generate.blocked import BlockWatch
from slime_rollout.generate.custom import CustomGenerate

SOURCE = """
import asyncio, threading
told = threading.Event()

async def custom_generate(args, sample, sampling_params):
    sample.response = str(told.wait(30))

async def in_a_task(args, sample, sampling_params):
    async def inner():
        return told.wait(30)
    sample.response = str(await asyncio.create_task(inner()))

async def elsewhere(args, sample, sampling_params):
    await asyncio.to_thread(told.wait, 0.5)
    sample.response = "1"
"""


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(blocked, "SECONDS", 0.2)
    monkeypatch.setattr(blocked, "_PING_SECONDS", 0.05)


class Listener(logging.Handler):
    """Lets the function go on as soon as it was told on, and keeps the lines."""

    def __init__(self, told):
        super().__init__()
        self.told, self.lines = told, []

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.told.set()


@pytest.fixture
def rollout(manager, tmp_path):
    def run(name, rollouts=1, **changes):
        (tmp_path / "own.py").write_text(SOURCE)
        given = manager(custom_generate_function_path=f"{tmp_path}/own.py:{name}", **changes)
        listener = Listener(given._pipeline._generate._function.__globals__["told"])
        blocked.logger.addHandler(listener)
        try:
            samples = [sample for number in range(rollouts) for sample in given.generate(number).samples]
            given.close()
        finally:
            blocked.logger.removeHandler(listener)
        return {sample.response for sample in samples}, listener.lines

    return run


@pytest.mark.parametrize(("name", "line"), [("custom_generate", 6), ("in_a_task", 10)])
@pytest.mark.parametrize("continuous", [None, 1], ids=["in turn", "beside the trainer"])
def test_a_function_that_blocks_is_told_once(rollout, tmp_path, name, line, continuous):
    responses, lines = rollout(name, rollouts=2, async_buffer_size=continuous)
    assert responses == {"True"}  # the function went on when it was told on, not after its 30 s
    assert lines == [
        f"--custom-generate-function-path {tmp_path}/own.py:{name} has kept the event loop for more than 0.2 s "
        f"({tmp_path}/own.py, line {line}), and nothing else is generated meanwhile; await what takes time "
        "(asyncio.to_thread, asyncio.sleep)"
    ]


def test_one_that_waits_elsewhere_is_not(rollout):
    assert rollout("elsewhere") == ({"1"}, [])


def test_what_else_blocks_the_loop_is_not_taken_for_the_function(tmp_path, monkeypatch, caplog):
    (tmp_path / "own.py").write_text(SOURCE)
    looked, frame_in = threading.Event(), blocked._frame_in

    def look(*args):
        found = frame_in(*args)
        looked.set()
        return found

    monkeypatch.setattr(blocked, "_frame_in", look)
    watch = BlockWatch(CustomGenerate(f"{tmp_path}/own.py", timeout=1.0, calls=1))

    async def main():
        with watch.here():
            assert [thread for thread in threading.enumerate() if thread.name == blocked.THREAD]
            assert looked.wait(30)

    asyncio.run(main())
    assert not caplog.records


def test_without_a_function_there_is_no_watch():
    async def main():
        with BlockWatch(single_turn).here():
            return [thread for thread in threading.enumerate() if thread.name == blocked.THREAD]

    assert asyncio.run(main()) == []
