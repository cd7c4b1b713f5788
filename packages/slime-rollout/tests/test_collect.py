"""Dynamic sampling, over-sampling and partial rollouts: what is trained on, what goes back, what goes on."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.types import Status
from slime_rollout.errors import GenerationError, HookTimeoutError, RewardError
from slime_rollout.generate import sampling_seed
from slime_rollout.rewards.scorers import Scorer

NONZERO = "slime_rollout.filters.check_reward_nonzero_std"
INDEX = {sampling_seed(5, index): index for index in range(600)}


def index_of(body):
    """Number of the sample that a request is for."""
    return INDEX[body["sampling_params"]["sampling_seed"]]


def asked(engine):
    """Numbers of the samples that were asked for, those of evaluations left out."""
    return sorted(index_of(body) for body in engine.bodies if not is_evaluation(body))


def is_evaluation(body):
    return body["sampling_params"]["sampling_seed"] not in INDEX


def indices(batch):
    return [sample.index for sample in batch.samples]


@pytest.fixture
def right_for(engine, reply):
    """Has the engine answer rightly for some samples only. The label of group g is g modulo 6."""

    def answer(right, **more):
        engine.answer = lambda number, body: reply(
            text=str(index_of(body) // 3 % 6) if index_of(body) in right else "-1", **more
        )

    return answer


@pytest.fixture
def held(engine, reply):
    """Holds back the answers for some samples until their request is aborted or cancelled."""
    state = {"held": set(), "version": "0"}

    async def answer(number, body):
        if index_of(body) in state["held"]:
            await asyncio.sleep(600)
        return reply(text="1", version=state["version"])

    engine.answer = answer
    return state


def test_groups_of_equal_rewards_are_replaced(manager, right_for, engine):
    right_for({0, 7, 8, 9, 13})  # groups 0 (one of three), 2 (two), 3 (one) and 4 (one) differ; 1 and 5 do not
    given_ = manager(dynamic_sampling_filter_path=NONZERO)
    batch = given_.generate(0)
    assert [group[0].group_index for group in batch.groups] == [0, 2]
    assert batch.metrics["dynamic_filter/drop_zero_std_0"] == 1
    assert asked(engine) == list(range(9))
    assert [group[0].group_index for group in given_.generate(1).groups] == [3, 4]
    counts = given_.source.ledger.counts
    assert (counts["generated"], counts["trained"], counts["filtered"], counts["out"]) == (15, 12, 3, 0)


def test_groups_of_equal_rewards_are_kept_rather_than_replaced(manager, right_for, engine):
    """Of two groups in flight none may be left out; of three, the one of equal rewards gives way to the others."""
    right_for({3, 7})  # groups 1 and 2 differ
    fallback = f"{NONZERO}_with_fallback"
    three = manager(dynamic_sampling_filter_path=fallback, over_sampling_batch_size=3).generate(0)
    assert [group[0].group_index for group in three.groups] == [1, 2]
    assert three.metrics["dynamic_filter/drop_zero_std_0"] == 1
    two = manager(dynamic_sampling_filter_path=fallback).generate(0)
    assert [group[0].group_index for group in two.groups] == [0, 1]
    assert two.metrics["dynamic_filter/kept_when_insufficient"] == 1
    assert asked(engine) == [*sorted([*range(6), *range(6)]), 6, 7, 8]


def test_the_ledger_balances_while_groups_are_filtered(manager, right_for, caplog):
    right_for({0, 6, 12, 18})
    given_ = manager(dynamic_sampling_filter_path=NONZERO)
    for number in range(2):
        given_.generate(number)
    assert not [record for record in caplog.records if "ledger" in record.message]


def test_a_filter_that_drops_everything_ends_the_run(manager, right_for):
    right_for(set())
    given_ = manager(dynamic_sampling_filter_path=NONZERO, dynamic_sampling_max_prompts=7)
    before = given_.state_dict()
    with pytest.raises(
        GenerationError,
        match=r"rollout 3 has 0 of 2 groups after [67] were tried \(dynamic_filter/drop_zero_std_0 \d\); look at the",
    ):
        given_.generate(3)
    assert given_.state_dict() == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def keep(args, group): raise ValueError('no')", "own.py:keep raised ValueError for group 0: no"),
        ("def keep(args, group): raise SystemExit(3)", "own.py:keep raised SystemExit for group 0: 3"),
        ("def keep(args, group): return 'yes'", "own.py:keep returned 'yes'; return Keep\\(\\), Drop\\('reason'\\)"),
        ("def keep(args, group): return None", "own.py:keep returned None"),
    ],
)
def test_a_filter_that_fails_ends_the_rollout(manager, tmp_path, body, message):
    (tmp_path / "own.py").write_text(body + "\n")
    given_ = manager(dynamic_sampling_filter_path=f"{tmp_path}/own.py:keep", rollout_batch_size=1)
    with pytest.raises(DataError, match=message):
        given_.generate(0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def keep(group): return True", r"takes \(group\)"),
        ("async def keep(args, group): return True", "is async"),
        ("keep = 3", "has no function keep"),
    ],
)
def test_a_filter_is_checked_before_anything_is_generated(manager, tmp_path, body, message):
    (tmp_path / "own.py").write_text(body + "\n")
    with pytest.raises(ConfigError, match=message):
        manager(dynamic_sampling_filter_path=f"{tmp_path}/own.py:keep")


@pytest.mark.parametrize("continuous", [None, 1], ids=["in turn", "beside the trainer"])
def test_a_filter_that_hangs_ends_the_run(manager, tmp_path, continuous):
    (tmp_path / "own.py").write_text("import threading\ndef keep(args, group): threading.Event().wait(40)\n")
    given_ = manager(
        dynamic_sampling_filter_path=f"{tmp_path}/own.py:keep", hook_timeout=0.3, async_buffer_size=continuous
    )
    before, start = given_.state_dict(), time.monotonic()
    with pytest.raises(
        HookTimeoutError,
        match=r"^--dynamic-sampling-filter-path .*own\.py:keep for group [01] was not done after 0\.3 s; it hangs",
    ):
        given_.generate(0)
    given_.close()
    assert time.monotonic() - start < 20
    assert continuous or given_.state_dict() == before


def test_generation_goes_on_while_a_filter_thinks(manager, tmp_path, engine, reply):
    """The filter keeps the first group waiting until the engine has answered for the second."""
    (tmp_path / "own.py").write_text(
        "import threading\nanswered, running, most = threading.Event(), [], []\n"
        "def keep(args, group):\n"
        "    running.append(1)\n    most.append(len(running))\n"
        "    assert answered.wait(20)\n    running.pop()\n    return True\n"
    )
    given_ = manager(dynamic_sampling_filter_path=f"{tmp_path}/own.py:keep")
    own = given_._collector._keep._function.__globals__

    async def answer(number, body):
        if index_of(body) >= 3:
            async with asyncio.timeout(20):
                while not (own["running"] or own["answered"].is_set()):
                    await asyncio.sleep(0.005)
            own["answered"].set()
        return reply(text="1")

    engine.answer = answer
    assert indices(given_.generate(0)) == list(range(6))
    assert own["most"] == [1, 1]  # one call at a time


def test_surplus_goes_back_and_is_trained_on_next(manager, held, engine):
    held["held"] = {0, 1, 2, 10}  # group 0 as a whole, and one sample of group 3
    given_ = manager(over_sampling_batch_size=4)
    pipeline = given_._collector._pipeline
    scored, reward, plain = set(), pipeline._scorer.reward, engine.answer

    async def noting(sample):
        scored.add(sample.index)
        return await reward(sample)

    async def in_order(number, body):
        while index_of(body) == 8 and not {9, 11} <= scored:  # the rollout ends once the others of group 3 are there
            await asyncio.sleep(0.005)
        while index_of(body) == 10 and not {*range(12, 18)} <= {*asked(engine)}:  # the next one, once all are in flight
            await asyncio.sleep(0.005)
        return await plain(number, body)

    pipeline._scorer, engine.answer = Scorer(noting, None), in_order
    batch = given_.generate(0)
    assert indices(batch) == [3, 4, 5, 6, 7, 8]
    assert batch.metrics["groups_given_back"] == 2
    held["held"] = {*range(12, 18)}
    batch = given_.generate(1)
    # What was finished of group 3 was not generated again, what was not was.
    assert indices(batch) == [0, 1, 2, 9, 10, 11]
    assert sorted(asked(engine)) == sorted([*range(12), 0, 1, 2, 10, *range(12, 18)])
    assert given_.source.check_ledger() is None
    counts = given_.source.ledger.counts
    assert (counts["trained"], counts["buffered"], counts["generated"]) == (12, 6, 18)


def test_surplus_survives_a_restart(manager, held):
    held["held"] = {0, 1, 2}
    first = manager(over_sampling_batch_size=4)
    first.generate(0)
    held["held"] = set()
    second = manager(over_sampling_batch_size=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert indices(second.generate(1))[:3] == [0, 1, 2]


def test_what_is_older_than_allowed_is_generated_anew(manager, held, engine):
    held["held"] = {0, 1, 2}
    given_ = manager(over_sampling_batch_size=3, max_weight_staleness=0)
    given_.generate(0)  # groups 1 and 2; group 0 goes back unfinished
    held["held"] = {3 * 3, 3 * 3 + 1, 3 * 3 + 2}
    held["version"] = "1"
    assert indices(given_.generate(1)) == [0, 1, 2, 12, 13, 14]
    held["held"], held["version"] = set(), "2"
    given_.source.add_samples([])
    batch = given_.generate(2)
    assert {version for sample in batch.samples for version in sample.weight_versions} == {2}
    assert batch.metrics["staleness/max"] == 0


@pytest.mark.parametrize("masked", [False, True])
def test_partial_rollouts_go_on_where_they_were_cut_off(manager, engine, reply, masked):
    """The engine gives back what it has when a request is aborted, as SGLang does."""
    cut, version = {4, 5}, {"now": "0"}
    waiting = {}

    async def answer(number, body):
        if index_of(body) in cut and len(body["input_ids"]) == prompt_length(body):
            waiting[body["rid"]] = aborted = asyncio.Event()
            await aborted.wait()
            return reply(text="1?", tokens=(7, 5), version=version["now"], finish={"type": "abort"})
        return reply(text="2", tokens=(8, 9), version=version["now"])

    lengths = {}

    def prompt_length(body):
        return lengths.setdefault(index_of(body), len(body["input_ids"]))

    engine.answer = answer
    engine.on_abort = lambda told: [event.set() for rid, event in waiting.items() if rid.startswith(told["rid"])]
    given_ = manager(
        over_sampling_batch_size=3,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=masked,
        rollout_max_response_len=9,
    )
    batch = given_.generate(0)
    assert [group[0].group_index for group in batch.groups] == [0, 2]
    version["now"] = "1"
    batch = given_.generate(1)
    group = batch.groups[0]
    assert [sample.index for sample in group] == [3, 4, 5]
    for sample in group[1:]:
        assert sample.response_tokens == [7, 8, 9]
        assert sample.weight_versions == [0, 1, 1]
        assert sample.rollout_log_probs == [-0.5, -0.5, -1.5]
        assert sample.trained_mask == ([0, 1, 1] if masked else [1, 1, 1])
        assert sample.status is Status.COMPLETED
    assert group[0].weight_versions == [0, 0]
    assert batch.metrics["continued_samples"] == 2
    assert batch.metrics["staleness/max"] == 1
    continued = [body for body in engine.bodies if len(body["input_ids"]) > prompt_length(body)]
    assert {body["sampling_params"]["max_new_tokens"] for body in continued} == {8}
    assert sorted(asked(engine)) == sorted([*range(9), 4, 5, *range(9, 9 + 3 * 2)])


def test_a_failure_takes_nothing(manager, engine, reply):
    given_ = manager(over_sampling_batch_size=4)
    before = given_.state_dict()
    engine.answer = lambda number, body: 400 if index_of(body) == 5 else reply()
    with pytest.raises(GenerationError, match="refused a request"):
        given_.generate(0)
    assert given_.state_dict() == before


def test_what_fails_while_it_is_cut_off_goes_back_and_is_generated_again(manager, engine, reply, tmp_path, caplog):
    """The rollout is complete without it, and a hook may stumble over a response without an end."""
    (tmp_path / "own.py").write_text(
        "async def custom_generate(args, sample, sampling_params):\n"
        "    from slime_rollout import Trajectory\n"
        "    await Trajectory.start(sample).generate()\n"
        "    assert sample.status != 'aborted', 'no end'\n"
    )
    waiting = {}

    async def answer(number, body):
        if index_of(body) == 0 and number < 12:
            waiting[body["rid"]] = aborted = asyncio.Event()
            await aborted.wait()
            return reply(text="1?", tokens=(7, 5), finish={"type": "abort", "message": "Aborted"})
        return reply(text="2", tokens=(8, 9))

    engine.answer = answer
    engine.on_abort = lambda told: [event.set() for rid, event in waiting.items() if rid.startswith(told["rid"])]
    given_ = manager(
        over_sampling_batch_size=3, partial_rollout=True, custom_generate_function_path=f"{tmp_path}/own.py"
    )
    batch = given_.generate(0)
    assert [group[0].group_index for group in batch.groups] == [1, 2]
    assert "group 0 failed while it was stopped: --custom-generate-function-path" in caplog.text
    assert "ledger" not in caplog.text
    engine.answer = lambda number, body: reply(text="1")
    one = reply(text="1")["output_ids"]
    batch = given_.generate(1)
    assert given_.source.check_ledger() is None
    assert [sample.response_tokens for sample in batch.groups[0]] in ([one, [8, 9], [8, 9]], [one] * 3)


def test_what_goes_back_shares_nothing_with_a_hook_that_was_left_behind(manager, tmp_path, engine, held):
    """A reward function runs in a thread that cannot be stopped."""
    held["held"] = {0}
    (tmp_path / "own.py").write_text(
        "import threading\nasked, over, seen = threading.Event(), threading.Event(), []\n"
        "def score(args, sample):\n"
        "    if sample.index == 1:\n        seen.append(sample)\n        asked.set()\n        over.wait(20)\n"
        "        sample.metadata['late'] = True\n"
        "    elif sample.index > 1:\n        asked.wait(20)\n"
        "    return 0.5\n"
    )
    given_ = manager(over_sampling_batch_size=3, rm_type=None, custom_rm_path=f"{tmp_path}/own.py:score")
    loaded = (module for module in sys.modules.values() if getattr(module, "__file__", "") == f"{tmp_path}/own.py")
    own = vars(next(loaded))
    try:
        given_.generate(0)
        (group,) = given_.source._buffer
        assert (group[1].index, group[1].response_length) == (1, 2) and group[1] is not own["seen"][0]
        assert group[1].metadata is not own["seen"][0].metadata
    finally:
        own["over"].set()


def test_a_cancelled_error_that_nobody_asked_for_ends_the_rollout(manager, monkeypatch):
    """It would stop one group without a word, and the rollout would wait for that forever."""
    given_ = manager(n_samples_per_prompt=1)

    async def run(*args, **kwargs):
        raise asyncio.CancelledError

    monkeypatch.setattr(given_._collector._pipeline, "run", run)
    with pytest.raises(GenerationError, match=r"a function that worked on group [01] raised CancelledError"):
        given_.generate(0)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_prompt_is_trained_on_or_dropped_once(manager, engine, reply, data):
    right = data.draw(st.sets(st.integers(0, 120)), label="right answers")
    over = data.draw(st.integers(2, 5), label="over-sampling")
    stale = data.draw(st.none() | st.integers(0, 2), label="staleness")
    restart = data.draw(st.integers(0, 3), label="restart before")
    version = {"now": "0"}
    delays = data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.03]), min_size=7, max_size=7), label="delays")

    async def answer(number, body):
        index = index_of(body)
        await asyncio.sleep(delays[index % 7])
        text = str(index // 3 % 6) if index in right or index % 9 == 0 else "-1"
        return reply(text=text, version=version["now"])

    engine.answer = answer
    changes = {
        "over_sampling_batch_size": over,
        "dynamic_sampling_filter_path": NONZERO,
        "max_weight_staleness": stale,
        "dynamic_sampling_max_prompts": 500,
    }
    given_, trained = manager(**changes), []
    for number in range(4):
        version["now"] = str(number)
        batch = given_.generate(number)
        assert len(batch.groups) == 2
        assert given_.source.check_ledger() is None
        if stale is not None:
            oldest = min(min(sample.weight_versions) for sample in batch.samples)
            assert number - oldest <= stale
        trained += indices(batch)
        if number == restart:
            state = given_.state_dict()
            given_ = manager(**changes)
            given_.load_state_dict(json.loads(json.dumps(state)))
    counts = given_.source.ledger.counts
    assert len(set(trained)) == len(trained) == counts["trained"] == 24
    assert counts["generated"] == 24 + counts["filtered"] + counts["buffered"] + len(given_.source._unfinished) * 3


class TestContinuous:
    def test_generates_ahead_and_no_further(self, manager, engine, reply):
        engine.answer = lambda number, body: reply(text="1", version="0")
        given_ = manager(async_buffer_size=2)
        batch = given_.generate(0)
        assert indices(batch) == list(range(6))
        wait_for(lambda: len(scored(given_)) == 12)
        assert len(engine.bodies) == 6 + 12  # two rollouts wait, and no more is generated
        assert indices(given_.generate(1)) == list(range(6, 12))

    def test_nothing_is_lost_by_a_restart(self, manager, engine, reply):
        first = manager(async_buffer_size=2)
        first.generate(0)
        wait_for(lambda: len(scored(first)) == 12)
        state = first.state_dict()
        first.close()
        second = manager(async_buffer_size=2)
        second.load_state_dict(json.loads(json.dumps(state)))
        assert indices(second.generate(1)) == list(range(6, 12))
        assert asked(engine)[:18] == list(range(18))  # what had been generated was not generated again
        assert state["next_group"] <= 6

    def test_tokens_are_no_older_than_allowed(self, manager, engine, reply):
        version = {"now": "0"}
        engine.answer = lambda number, body: reply(text="1", version=version["now"])
        given_ = manager(async_buffer_size=3, max_weight_staleness=1)
        for number in range(4):
            version["now"] = str(number)
            batch = given_.generate(number)
            oldest = min(min(sample.weight_versions) for sample in batch.samples)
            assert number - oldest <= 1
            assert batch.metrics["staleness/max"] <= 1
        assert given_.source.ledger.counts["trained"] == 24

    def test_with_staleness_0_nothing_is_generated_ahead(self, manager, engine, reply):
        given_ = manager(async_buffer_size=1, max_weight_staleness=0)
        for number in range(3):
            engine.answer = lambda _, body, number=number: reply(text="1", version=str(number))
            batch = given_.generate(number)
            assert {version for sample in batch.samples for version in sample.weight_versions} == {number}
            assert len(engine.bodies) == 6 * (number + 1)

    def test_weights_that_stay_old_are_told_and_not_waited_for(self, manager, engine, reply):
        engine.answer = lambda number, body: reply(text="1", version="0")
        given_ = manager(async_buffer_size=1, max_weight_staleness=1, dynamic_sampling_max_prompts=10)
        with pytest.raises(GenerationError, match=r"rollout 5 has 0 of 2 groups after \d+ were tried \(stale_samples"):
            given_.generate(5)

    def test_looking_far_ahead_is_no_reason_to_give_up(self, manager, engine):
        """The cap is on what is tried for one rollout; what is generated for later ones is no more than it."""
        given_ = manager(async_buffer_size=3, dynamic_sampling_max_prompts=2)
        assert indices(given_.generate(0)) == list(range(6))
        assert given_.source.ledger.counts["generated"] == 2 * 6
        assert indices(given_.generate(1)) == list(range(6, 12))

    def test_an_interrupted_call_takes_no_samples(self, manager, engine, reply, monkeypatch):
        released = threading.Event()

        async def answer(number, body):
            async with asyncio.timeout(20):
                while index_of(body) == 0 and not released.is_set():
                    await asyncio.sleep(0.005)
            return reply(text="1")

        engine.answer = answer
        given_ = manager(async_buffer_size=1)

        class Interrupted(Future):
            def result(self, timeout=None):
                wait_for(lambda: engine.in_flight == 1)
                raise KeyboardInterrupt

        def interrupted(coroutine, loop):
            done = Interrupted()
            done.__dict__.update(plain(coroutine, loop).__dict__)
            return done

        plain = asyncio.run_coroutine_threadsafe
        given_.state_dict()
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            given_.generate(0)
        monkeypatch.undo()
        released.set()
        wait_for(lambda: len(scored(given_)) == 6)
        assert indices(given_.generate(0)) == list(range(6))

    def test_an_error_beside_the_trainer_comes_with_the_next_rollout(self, manager, engine, reply):
        engine.answer = lambda number, body: 400 if index_of(body) == 7 else reply()
        given_ = manager(async_buffer_size=1)
        given_.generate(0)
        with pytest.raises(GenerationError, match="refused a request"):
            given_.generate(1)
        assert len(given_.state_dict()["unfinished"]) == 2

    def test_close_stops_what_is_in_flight(self, manager, engine, held):
        held["held"] = set(range(6, 12))
        given_ = manager(async_buffer_size=1)
        given_.generate(0)
        wait_for(lambda: engine.in_flight == 6)
        given_.close()
        wait_for(lambda: engine.in_flight == 0)
        given_.close()
        held["held"] = set()
        assert indices(given_.generate(1)) == list(range(6, 12))

    def test_an_evaluation_does_not_stop_generation(self, manager, engine, reply, write_rows):
        evaluates, over, free = threading.Event(), threading.Event(), [6]  # samples below it are answered

        async def answer(number, body):
            if is_evaluation(body):
                evaluates.set()
            async with asyncio.timeout(20):
                while not (over.is_set() if is_evaluation(body) else index_of(body) < free[0]):
                    await asyncio.sleep(0.005)
            return reply(text="1")

        engine.answer = answer
        sums = write_rows([{"prompt": "1 + 0", "label": "1"}], "sums.jsonl")
        given_ = manager(async_buffer_size=2, eval_prompt_data=("sums", sums))
        given_.generate(0)
        with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ended:
            ended.callback(over.set)  # whatever fails: the pool waits for the evaluation
            report = pool.submit(given_.evaluate, 1)
            assert evaluates.wait(20)
            assert not scored(given_)
            free[0] = 12  # the older of two rollouts finishes first
            wait_for(lambda: len(scored(given_)) == 6)
            free[0] = 600
            wait_for(lambda: len(scored(given_)) == 12)  # and a save may come meanwhile, too
            assert indices(given_.generate(1)) == list(range(6, 12))
            assert not report.done()
            over.set()
            assert report.result(20).scores == {"sums": 1.0}
        assert asked(engine)[:18] == list(range(18))

    def test_a_save_does_not_stop_generation(self, manager, engine, held):
        held["held"] = set(range(6, 600))
        given_ = manager(async_buffer_size=2)
        given_.generate(0)
        wait_for(lambda: engine.in_flight == 12)
        state = given_.state_dict()
        assert len(state["unfinished"]) == 4 and not scored(given_)
        assert engine.in_flight == 12 and asked(engine) == list(range(18))  # none was cut off, or sent again
        assert not engine.aborts

    def test_the_ledger_knows_what_is_in_flight(self, manager, engine, caplog):
        given_ = manager(async_buffer_size=2, dynamic_sampling_filter_path=None)
        for number in range(3):
            given_.generate(number)
        assert not [record for record in caplog.records if "ledger" in record.message]

    def test_a_reward_that_never_works_is_told(self, manager, tmp_path):
        (tmp_path / "own.py").write_text("def score(args, sample): raise ValueError('no')\n")
        given_ = manager(async_buffer_size=1, rm_type=None, custom_rm_path=f"{tmp_path}/own.py:score")
        with pytest.raises(RewardError, match="raised ValueError"):
            for number in range(64):
                given_.generate(number)


def scored(manager):
    """Samples in a state that wait for the trainer."""
    groups = manager.state_dict()["unfinished"]
    return [sample for group in groups for sample in group if sample["reward"] is not None]


def wait_for(condition, seconds=20):
    async def poll():
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    asyncio.run(poll())
