import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from slime_core.errors import ConfigError, DataError
from slime_rollout.data import PromptDataset, RowEncoder
from slime_rollout.data.dataset import CHUNK
from slime_rollout.data.files import RawRow

LIMIT = 60.0


def rows(count, bad=()):
    """Rows with their numbers; some of them bad."""
    for place in range(count):
        value = b"no json" if place in bad else b'{"prompt": "%d + 1 =", "label": "%d"}' % (place, place + 1)
        yield place, RawRow(where=f"f:{place + 1}", value=value)


def texts(outcomes):
    return [(place, str(one) if isinstance(one, DataError) else one) for place, one in outcomes]


def wait_until(done):
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [0, 1, CHUNK, 5 * CHUNK + 3])
def test_the_outcomes_are_those_of_one_process_in_order(pool, config_of, encoder, count):
    bad = {3, CHUNK, CHUNK + 1}
    alone = RowEncoder(config_of(prompt_data="none"), encoder)
    assert texts(pool.outcomes(rows(count, bad))) == texts(alone.outcomes(rows(count, bad)))


@pytest.mark.timeout(120)
def test_the_look_ahead_is_bounded(pool):
    read = []

    def counting():
        for pair in rows(10_000):
            read.append(pair)
            yield pair

    outcomes = pool.outcomes(counting())
    assert not read
    for taken in range(1, 3 * CHUNK):
        next(outcomes)
        assert len(read) <= taken + 4 * CHUNK
    outcomes.close()


@pytest.mark.timeout(120)
def test_an_error_of_the_rows_comes_after_the_rows_before_it(pool):
    def failing():
        yield from rows(CHUNK + 5)
        raise DataError("the file ends here")

    outcomes, seen = pool.outcomes(failing()), []
    with pytest.raises(DataError, match="the file ends here"):
        seen.extend(place for place, _ in outcomes)
    assert seen == list(range(CHUNK + 5))


@pytest.mark.timeout(120)
def test_two_streams_share_the_processes(pool):
    first, second = pool.outcomes(rows(200)), pool.outcomes(rows(100))
    places = [(next(first)[0], next(second)[0]) for _ in range(100)]
    assert places == [(place, place) for place in range(100)]
    assert [place for place, _ in first] == list(range(100, 200))


@pytest.fixture
def own_pool(config_of, encoder):
    """Makes a pool that no other test uses, and its processes."""
    made = []

    def build(processes, **changes):
        before = set(multiprocessing.active_children())
        made.append(RowEncoder(config_of(prompt_data="none", **changes), encoder, processes))
        return made[-1], lambda: set(multiprocessing.active_children()) - before

    yield build
    for one in made:
        one.close()


@pytest.mark.timeout(120)
def test_a_process_that_dies_is_one_error_and_the_next_rows_get_a_new_one(own_pool):
    pool, children = own_pool(2)
    outcomes = pool.outcomes(rows(10**6))
    next(outcomes)
    before = children()
    for child in before:
        child.kill()
    with pytest.raises(DataError, match=r"^a process of --num-data-workers died .* tokenized f:\d+ and what follows"):
        list(outcomes)
    assert [place for place, _ in pool.outcomes(rows(40))] == list(range(40))
    assert children() and not before & children()


@pytest.mark.timeout(120)
def test_the_processes_of_a_closed_pool_end(own_pool):
    pool, children = own_pool(1)
    outcomes = pool.outcomes(rows(3 * CHUNK))
    for _ in range(CHUNK):
        next(outcomes)
    (child,) = children()
    pool.close()
    pool.close()
    assert not is_running(child.pid)
    for rest in (outcomes, pool.outcomes(rows(1))):
        with pytest.raises(RuntimeError, match="after shutdown"):
            next(rest)


@pytest.mark.timeout(120)
def test_a_process_that_cannot_load_the_tokenizer_says_why(own_pool, tmp_path):
    pool, _ = own_pool(1, hf_checkpoint=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .*none is not a directory"):
        next(pool.outcomes(rows(1)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["SIGKILL", "exit", "forgotten", "forked"])
def test_the_processes_end_with_this_one(config_of, how):
    """Whether it is killed in the middle, ends by itself, or drops the pool; also if a fork keeps its pipes open."""
    config = config_of(prompt_data="none")
    code = f"""
        import gc, multiprocessing, os, pickle, sys, time
        from slime_rollout.data import RowEncoder
        from slime_rollout.data.files import RawRow
        pool = RowEncoder(pickle.loads({pickle.dumps(config)!r}), None, 2)
        outcomes = pool.outcomes((n, RawRow(where="f", value=b'{{"prompt": "a", "label": "1"}}')) for n in range(10**6))
        next(outcomes)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        if {how!r} == "forked":
            print(os.fork() or time.sleep(100), flush=True)
            time.sleep(100)
        if {how!r} == "SIGKILL":
            for _ in outcomes: pass
            time.sleep(100)
        del pool, outcomes
        gc.collect()
        if {how!r} == "forgotten":
            print("dropped", flush=True)
            time.sleep(100)
        """
    forked = []
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        if how == "forked":
            forked.append(int(process.stdout.readline()))
            process.kill()
        elif how == "forgotten":
            assert process.stdout.readline() == "dropped\n"
        elif how == "exit":
            assert process.wait(LIMIT) == 0
        else:
            assert all(map(is_running, pids))
            process.kill()
        wait_until(lambda: not any(map(is_running, pids)))
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.timeout(120)
def test_data_in_memory_is_the_same_with_processes(pool, config_of, encoder, write, tmp_path):
    path = tmp_path / "p.jsonl"
    write([{"prompt": f"{place} + 1 =" * (1 + 3 * (place % 2)), "label": str(place)} for place in range(100)], path)
    config = config_of(prompt_data=str(path), rollout_max_prompt_len=12)
    alone, shared = (PromptDataset.load(str(path), config, encoder, encoding=one) for one in (None, pool))
    assert 0 < len(alone) < 100
    assert shared.digest == alone.digest
    with path.open("a") as file:
        file.write("no json\n")
    errors = []
    for one in (None, pool):
        with pytest.raises(DataError) as caught:
            PromptDataset.load(str(path), config, encoder, encoding=one)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert ":101: invalid JSON" in errors[0]
