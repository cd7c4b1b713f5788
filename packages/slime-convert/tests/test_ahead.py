"""One thing is made ahead, in order; errors come in their turn."""

import threading
from contextlib import closing

import pytest

from slime_convert.ahead import AHEAD_BYTES, made_ahead

LIMIT = 30.0  # seconds


def test_the_next_is_made_while_one_is_used_and_no_more():
    made = [threading.Event() for _ in range(4)]

    def job(number):
        def make():
            made[number].set()
            return number

        return 1, make

    for number in (results := made_ahead(map(job, range(4)))):
        if number == 3:
            break
        assert made[number + 1].wait(LIMIT)
        assert not any(event.is_set() for event in made[number + 2 :])
    assert list(results) == []


def test_what_is_large_is_made_when_it_is_asked_for():
    threads = []
    sizes = [1, AHEAD_BYTES + 1, AHEAD_BYTES, 1]
    assert list(made_ahead((size, lambda: threads.append(threading.current_thread())) for size in sizes)) == [None] * 4
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False, False]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_comes_when_its_result_is_asked_for(kind):
    def wrong():
        raise kind("wrong")

    results = made_ahead([(1, lambda: 1), (1, wrong), (1, lambda: pytest.fail("after an error"))])
    assert next(results) == 1
    with pytest.raises(kind, match="wrong"):
        next(results)


def test_closing_waits_for_the_job_that_runs():
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go_on.wait(LIMIT)
        ended.append(True)

    with closing(made_ahead([(1, lambda: None), (1, slow)])) as results:
        next(results)
        assert begun.wait(LIMIT)
        threading.Timer(0.01, go_on.set).start()
    assert ended


def test_nothing():
    assert list(made_ahead([])) == []
