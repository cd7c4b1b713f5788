import asyncio
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_rollout.errors import RewardError
from slime_rollout.rewards import VerifierError, VerifierPool
from slime_rollout.rewards import pool as pool_module

GIB = 2**30
LIMIT = 2.0  # seconds
LOOP = asyncio.Runner()  # one event loop for all requests, as in a run
SOURCE = """
import ctypes, os, subprocess, time
print("{}", flush=True)
os.write(1, b"no reply\\n")

def verify(response, label, metadata):
    if response == "hang":
        while True: pass
    if response == "sleep": time.sleep(600)
    if response == "exit": os._exit(7)
    if response == "segfault": ctypes.string_at(0)
    if response == "allocate":
        held = []
        while True: held.append(bytes(1 << 24))
    if response == "raise": raise ValueError("no such number")
    if response == "interrupt": raise KeyboardInterrupt
    if response == "object": return object()
    if response == "nan": return float("nan")
    if response == "infinite": return {"score": float("inf")}
    if response == "named": return {"score": 1.0, "acc": True}
    if response == "unshown": return Unshown()
    if response == "nest": return verify_nested(0)
    if response == "noise": print("x" * 100_000)
    if response == "child": subprocess.Popen(["sleep", "600"]); time.sleep(600)
    if response == "big": return float(len(b"x" * (300 << 20)) > 0)
    if response == "pid": return float(os.getpid())
    if response.startswith("count"):
        with open(metadata["file"], "a") as file: file.write("x")
    if response == "count, sleep": time.sleep(600)
    return float(response == label)

class Unshown:
    def __repr__(self): raise SystemExit(3)

def verify_nested(depth): return verify_nested(depth + 1)
"""


@pytest.fixture
def pool(tmp_path):
    path = tmp_path / "verifier.py"
    path.write_text(SOURCE)
    made = VerifierPool(f"{path}:verify", workers=2, time_limit=LIMIT, memory_limit=GIB // 2)
    yield made
    made.close()


def ask(pool, *responses, label="right", metadata=None):
    async def all_of_them():
        asked = (pool.score(response, label, metadata or {}) for response in responses)
        return await asyncio.gather(*asked, return_exceptions=True)

    return LOOP.run(asyncio.wait_for(all_of_them(), 60))


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("hang", "it took more than 2 s"),
        ("sleep", "it took more than 2 s"),
        ("exit", "its process ended with exit code 7"),
        ("segfault", "its process ended with signal SIGSEGV"),
        ("allocate", "it reached the memory limit"),
        ("raise", "ValueError: no such number"),
        ("nest", "it nests too deep"),
        ("interrupt", "KeyboardInterrupt: "),
        ("nan", "it returned nan, which is not a finite number"),
        ("infinite", "it returned {'score': inf}, which is not a finite number"),
        ("unshown", "SystemExit: 3"),
    ],
)
def test_a_verifier_that_fails_costs_its_own_score_alone(pool, response, reason):
    good, bad, wrong, *after = ask(pool, "right", response, "wrong", *["right"] * 3)
    assert (good, wrong, after) == (1.0, 0.0, [1.0] * 3)
    assert isinstance(bad, VerifierError)
    assert str(bad) == reason


def test_many_failures_at_once_leave_every_other_score(pool):
    kinds = ["right", "exit", "segfault", "wrong", "raise"]
    scores = ask(pool, *(kinds[number % 5] for number in range(200)), metadata={"n": 1})
    for number, score in enumerate(scores):
        expected = {"right": 1.0, "wrong": 0.0}.get(kinds[number % 5])
        assert score == expected if expected is not None else isinstance(score, VerifierError)


def test_what_is_no_reward_costs_its_own_score_alone(pool):
    ask(pool, "right", "wrong")
    before = _below(pool._keeper.process.pid)
    bad, named = ask(pool, "object", "named")
    assert isinstance(bad, VerifierError)
    assert str(bad).startswith("it returned ") and str(bad).endswith(", which is not a finite number")
    assert named == {"score": 1.0, "acc": True}
    assert _below(pool._keeper.process.pid) == before


def test_a_value_that_is_kept_is_nobodys_own(pool):
    for _ in range(2):
        first, second = ask(pool, "named", "named")
        assert first == second == {"score": 1.0, "acc": True}
        first["score"] = second["acc"] = 5.0


def test_equal_requests_that_are_open_are_one(pool, tmp_path):
    counted = {"file": str(tmp_path / "calls")}
    assert ask(pool, *["count"] * 50, label="count", metadata=counted) == [1.0] * 50
    assert (tmp_path / "calls").read_text() == "x"
    counted = {"file": str(tmp_path / "late")}
    late = ask(pool, *["count, sleep"] * 8, metadata=counted)
    assert [str(error) for error in late] == ["it took more than 2 s"] * 8
    assert (tmp_path / "late").read_text() == "x"


def test_one_that_is_cancelled_takes_no_equal_one_with_it(pool, tmp_path):
    async def cancel_the_first():
        metadata = {"file": str(tmp_path / "calls")}
        first, second = (asyncio.create_task(pool.score("count", "count", metadata)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.gather(first, second, return_exceptions=True)

    cancelled, score = LOOP.run(asyncio.wait_for(cancel_the_first(), 30))
    assert isinstance(cancelled, asyncio.CancelledError)
    assert score == 1.0


def test_what_is_kept_does_not_grow_with_the_responses(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_CACHED", 3)
    responses = [letter * 100_000 for letter in "abcd"]
    assert ask(pool, *responses) == [0.0] * 4
    assert len(pool._scores) == 3 and all(len(key) == 16 for key in pool._scores)
    assert pool._pending == {}


def test_idle_workers_that_die_are_replaced_when_they_are_needed(pool):
    ask(pool, "right", "wrong")
    keeper, *workers = _below(pool._keeper.process.pid)
    for pid in workers:
        os.kill(pid, 9)
    _wait_until_gone(workers)
    assert ask(pool, "right again", "wrong again") == [0.0, 0.0]
    assert _below(keeper)[0] == pool._keeper.process.pid
    assert not set(_below(keeper)) & set(workers)


def test_workers_that_cannot_live_cost_scores_and_no_time(tmp_path):
    path = tmp_path / "verifier.py"
    path.write_text(
        "import os\n"
        "def dies(): os._exit(3)\n"
        "os.register_at_fork(after_in_child=dies)\n"
        "def verify(response, label, metadata): return 1.0\n"
    )
    pool = VerifierPool(f"{path}:verify", workers=2, time_limit=LIMIT, memory_limit=GIB)
    errors = ask(pool, *map(str, range(20)))
    assert {str(error) for error in errors} == {"its process ended with exit code 3"}
    keeper = Path(f"/proc/{pool._keeper.process.pid}/stat")
    before = keeper.read_text().rpartition(")")[2].split()[11:13]
    time.sleep(0.3)  # were they replaced at once, it would be busy now
    after = keeper.read_text().rpartition(")")[2].split()[11:13]
    assert sum(map(int, after)) - sum(map(int, before)) <= 5  # hundredths of a second
    pool.close()


def test_waiting_for_a_worker_is_not_counted(pool, tmp_path):
    path = tmp_path / "naps.py"
    path.write_text("import time\ndef verify(response, label, metadata): time.sleep(0.5); return 1.0\n")
    naps = VerifierPool(f"{path}:verify", workers=2, time_limit=LIMIT, memory_limit=GIB)
    assert ask(naps, *map(str, range(10))) == [1.0] * 10  # 2.5 s in all
    naps.close()


def test_the_event_loop_goes_on_while_verifiers_hang(pool):
    async def longest():
        hanging = asyncio.create_task(pool.score("hang", "right", {}))
        latest, longest = time.monotonic(), 0.0
        while not hanging.done():
            await asyncio.sleep(0.01)
            longest, latest = max(longest, time.monotonic() - latest), time.monotonic()
        with pytest.raises(VerifierError):
            await hanging
        return longest

    # A loop that waits for a verifier does so each time; a busy machine keeps one waiting now and then.
    assert any(LOOP.run(asyncio.wait_for(longest(), 60)) < 0.5 for _ in range(5))


def test_equal_requests_are_verified_once_and_failures_again(pool, tmp_path):
    counted = {"file": str(tmp_path / "calls")}
    for _ in range(3):
        assert ask(pool, "count", label="count", metadata=counted) == [1.0]
    assert (tmp_path / "calls").read_text() == "x"
    first, second = (ask(pool, "raise")[0] for _ in range(2))
    assert isinstance(first, VerifierError) and first is not second


def test_output_is_no_reply(pool):
    assert ask(pool, "noise", label="noise") == [1.0]


def test_odd_text_arrives_whole(pool):
    for text in ("a\nb", "\ud800 lone", "\0", "é" * 100_000):
        assert ask(pool, text, label=text) == [1.0]


def test_a_worker_that_has_grown_is_replaced_between_two_samples(pool):
    def pid(number):
        return ask(pool, "pid", metadata={"n": number})[0]

    idle = pid(0)
    assert pid(1) == idle  # the first idle worker is taken
    assert ask(pool, "big") == [1.0]
    assert idle not in {pid(number) for number in range(2, 6)}


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends while its file is read
        return False


def _wait_until_gone(pids):
    end = time.monotonic() + 20
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in pids if _alive(pid)]


def _below(pid):
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [pid, *(below for child in children for below in _below(child))]


def test_what_a_verifier_started_ends_with_it(pool):
    ask(pool, "right")
    keeper = pool._keeper.process.pid

    async def started_and_stopped():
        asked = asyncio.create_task(pool.score("child", "right", {}))
        while not (busy := [tree for worker in _below(keeper)[1:] if len(tree := _below(worker)) == 2]):
            await asyncio.sleep(0.01)
        with pytest.raises(VerifierError, match="took more"):
            await asked
        while len(_below(keeper)) != 3:  # the keeper and two workers
            await asyncio.sleep(0.01)
        return busy[0]

    _wait_until_gone(LOOP.run(asyncio.wait_for(started_and_stopped(), 30)))


def test_no_process_outlives_its_pool(pool):
    ask(pool, "right", "wrong")
    tree = _below(pool._keeper.process.pid)
    assert len(tree) == 3
    pool.close()
    _wait_until_gone(tree)
    assert ask(pool, "right now", label="right now") == [1.0]  # and it starts again


def test_a_pool_that_is_dropped_ends_its_task_and_processes(pool, caplog):
    async def score_and_drop():
        dropped = VerifierPool(pool._target, workers=1, time_limit=LIMIT, memory_limit=GIB)
        assert await dropped.score("right", "right", {}) == 1.0
        tree = _below(dropped._keeper.process.pid)
        del dropped
        gc.collect()  # before the event loop could see that the connection is closed
        return tree

    _wait_until_gone(LOOP.run(asyncio.wait_for(score_and_drop(), 30)))
    assert not caplog.records


def test_no_process_outlives_a_killed_run_with_a_hanging_verifier(pool):
    code = f"""
import asyncio, os, signal
from slime_rollout.rewards import VerifierPool
pool = VerifierPool({pool._target!r}, workers=2, time_limit=60.0, memory_limit=1 << 30)
async def run():
    await pool.score("right", "right", {{}})
    asyncio.create_task(pool.score("hang", "right", {{}}))
    await asyncio.sleep(0.2)
    print(pool._keeper.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(run())
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    tree = _below(int(run.stdout.readline()))
    assert len(tree) == 3
    run.kill()
    run.communicate(timeout=20)
    _wait_until_gone(tree)


def test_a_killed_keeper_costs_the_open_scores_and_is_replaced(pool):
    ask(pool, "right")
    tree = _below(pool._keeper.process.pid)

    async def kill_it():
        asked = asyncio.create_task(pool.score("sleep", "right", {}))
        await asyncio.sleep(0.1)
        os.kill(tree[0], 9)
        with pytest.raises(VerifierError, match="ended with exit code -9"):
            await asked

    LOOP.run(asyncio.wait_for(kill_it(), 30))
    _wait_until_gone(tree)
    assert ask(pool, "wrong") == [0.0]


def test_a_verifier_that_cannot_start_is_an_error_of_the_run(tmp_path):
    pool = VerifierPool(f"{tmp_path}/none.py:verify", workers=1, time_limit=1.0, memory_limit=GIB)
    error = ask(pool, "right")[0]
    assert isinstance(error, RewardError) and not isinstance(error, VerifierError)
    assert "does not start: " in str(error) and "none.py" in str(error)


def test_mathematics_without_end():
    pool = VerifierPool("math", workers=2, time_limit=3.0, memory_limit=2 * GIB)
    endless = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{10000000!}"]
    first, second, good = ask(pool, *endless, r"\boxed{\frac{4}{8}}", label="0.5")
    assert good == 1.0
    assert isinstance(first, VerifierError) and isinstance(second, VerifierError)
    pool.close()
