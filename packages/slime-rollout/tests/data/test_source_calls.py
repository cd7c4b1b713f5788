"""User-defined data sources and buffer filters that hang or return nonsense, in whole rollouts."""

import time

import pytest

from slime_core.errors import DataError
from slime_rollout.errors import GenerationError, HookTimeoutError

HEAD = "import threading\nfrom slime_rollout.data import RolloutDataSource, RolloutDataSourceWithBuffer\n"
WAIT = "threading.Event().wait(40)"  # longer than it may, shorter than anybody waits

SOURCES = {
    "get_samples": f"class Own(RolloutDataSource):\n    def get_samples(self, num_samples): {WAIT}\n",
    "buffer_filter": (
        f"class Own(RolloutDataSourceWithBuffer):\n    def buffer_filter(self, args, buffer, num_samples): {WAIT}\n"
    ),
}


@pytest.fixture
def own(manager, tmp_path):
    """A manager with a user-defined data source."""

    def build(source, **changes):
        (tmp_path / "own.py").write_text(HEAD + source)
        return manager(data_source_path=f"{tmp_path}/own.py:Own", **changes)

    return build


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("continuous", [None, 1], ids=["in turn", "beside the trainer"])
def test_a_source_that_hangs_ends_the_run(own, name, continuous, engine):
    given = own(SOURCES[name], hook_timeout=0.3, async_buffer_size=continuous)
    if name == "buffer_filter":
        given.source.add_samples(given.source.get_samples(1))
    start = time.monotonic()
    message = r"^--data-source-path .*own\.py:Own: get_samples was not done after 0\.3 s; .* a higher --hook-timeout$"
    with pytest.raises(HookTimeoutError, match=message):
        given.generate(0)
    # Its thread may still change the source, so nothing is taken from there any more.
    for use in (lambda: given.generate(0), given.state_dict):
        with pytest.raises(HookTimeoutError, match=message):
            use()
    given.close()
    assert time.monotonic() - start < 20
    assert not engine.bodies


def test_a_filter_that_hangs_is_named(manager, tmp_path):
    (tmp_path / "own.py").write_text(f"{HEAD}def pick(args, buffer, num_samples): {WAIT}\n")
    kind = "slime_rollout.data.RolloutDataSourceWithBuffer"
    given = manager(data_source_path=kind, buffer_filter_path=f"{tmp_path}/own.py:pick", hook_timeout=0.3)
    given.source.add_samples(given.source.get_samples(1))
    with pytest.raises(
        HookTimeoutError, match=rf"--data-source-path {kind} with --buffer-filter-path .*own\.py:pick: get_samples was"
    ):
        given.generate(0)


def test_a_source_that_takes_nothing_back_in_time(own):
    given = own(
        f"class Own(RolloutDataSource):\n    def add_samples(self, groups): {WAIT}\n",
        hook_timeout=0.3,
        over_sampling_batch_size=3,
    )
    with pytest.raises(HookTimeoutError, match=r"add_samples was not done after 0\.3 s"):
        given.generate(0)


def test_a_source_that_works_is_called_in_a_thread_of_its_own(own):
    given = own(
        "class Own(RolloutDataSource):\n"
        "    def get_samples(self, num_samples):\n"
        "        assert threading.current_thread() is not threading.main_thread()\n"
        "        return super().get_samples(num_samples)\n"
    )
    assert [sample.index for sample in given.generate(0).samples] == list(range(6))


@pytest.mark.parametrize(
    "returned", ["[]", "None", "super().get_samples(num_samples)[:1]", "[[]] * num_samples", "['a'] * num_samples"]
)
def test_a_source_that_returns_something_else_ends_the_run(own, returned):
    """Nothing would be in flight, and the rollout would wait forever."""
    given = own(f"class Own(RolloutDataSource):\n    def get_samples(self, num_samples): return {returned}\n")
    with pytest.raises(
        DataError, match=r"own\.py:Own: get_samples\(2\) returned .*; return a list of 2 groups of samples"
    ):
        given.generate(0)


def test_a_source_that_raises_is_named(own):
    given = own("class Own(RolloutDataSource):\n    def get_samples(self, num_samples): return {}['key']\n")
    with pytest.raises(DataError, match=r"^--data-source-path .*own\.py:Own: get_samples raised KeyError: 'key'$"):
        given.generate(0)


@pytest.mark.parametrize("continuous", [None, 1], ids=["in turn", "beside the trainer"])
def test_a_cancelled_error_of_a_source_ends_the_run(own, continuous, engine, reply):
    """It is no `Exception`, and a callback of the event loop that raises it is not heard of."""
    given = own(
        "import asyncio\n"
        "class Own(RolloutDataSource):\n"
        "    calls = 0\n"
        "    def get_samples(self, num_samples):\n"
        "        self.calls += 1\n"
        "        if self.calls > 1: raise asyncio.CancelledError\n"
        "        return super().get_samples(num_samples)\n",
        dynamic_sampling_filter_path="slime_rollout.filters.check_reward_nonzero_std",
        async_buffer_size=continuous,
    )
    engine.answer = lambda number, body: reply(text="no number")  # so that other groups are needed
    with pytest.raises(DataError, match="get_samples raised CancelledError"):
        given.generate(0)
    given.close()


def test_a_source_that_ends_while_generation_looks_ahead_costs_no_rollout(own):
    """The groups that are there are trained on; the next rollout has the error."""
    given = own(
        "class Own(RolloutDataSource):\n"
        "    def get_samples(self, num_samples):\n"
        "        if self.ledger.counts['trained']: raise ValueError('no more')\n"
        "        return super().get_samples(num_samples)\n",
        async_buffer_size=1,
    )
    assert [sample.index for sample in given.generate(0).samples] == list(range(6))
    with pytest.raises(DataError, match="get_samples raised ValueError: no more"):
        given.generate(1)
    given.close()
    assert given.source.check_ledger() is None


def test_a_source_that_derives_from_nothing_of_ours_loses_nothing(own, engine, reply):
    given = own(
        "from slime_core.types import Sample\n"
        "class Own:\n"
        "    def __init__(self, args): self.next, self.size = 0, args.n_samples_per_prompt\n"
        "    def get_samples(self, num_samples): return [self.group() for _ in range(num_samples)]\n"
        "    def group(self):\n"
        "        first, self.next = self.next * self.size, self.next + 1\n"
        "        numbers = range(first, first + self.size)\n"
        "        return [Sample(index=n, group_index=n // 3, prompt='p', tokens=[1], label='1') for n in numbers]\n"
        "    def add_samples(self, groups): raise ValueError('takes nothing back')\n"
        "    def state_dict(self): return {'next': self.next}\n"
        "    def load_state_dict(self, state): self.next = state['next']\n"
    )
    engine.answer = lambda number, body: 400 if number == 4 else reply(text="1")
    with pytest.raises(GenerationError, match="refused a request"):
        given.generate(0)
    assert [sample.index for sample in given.generate(0).samples] == list(range(6))
    state = given.state_dict()
    assert [sample.index for sample in given.generate(1).samples] == list(range(6, 12))
    given.load_state_dict(state)
    assert [sample.index for sample in given.generate(1).samples] == list(range(6, 12))
    assert given.source.check_ledger() is None and given.source.ledger.counts["trained"] == 12
