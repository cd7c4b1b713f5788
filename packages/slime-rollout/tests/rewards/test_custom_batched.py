import asyncio

import pytest

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import RewardError
from slime_rollout.rewards import VerifierError, make_scorer
from slime_rollout.rewards.custom import BatchedReward

LOOP = asyncio.Runner()  # one event loop for all calls, as in a run
SOURCE = """
import asyncio, time
sizes = []

def batched(args, samples):
    sizes.append(len(samples))
    time.sleep(0.05)
    return [float(sample.response) for sample in samples]

async def waits(args, samples):
    await asyncio.sleep(0)
    return [{"score": sample.index, "limit": args.rm_timeout} for sample in samples]

class CustomRewardModel:
    made = 0
    def __init__(self, model_path, scale=1):
        CustomRewardModel.made += 1
        self.model_path, self.scale = model_path, scale
    def compute_reward(self, prompts, responses):
        assert prompts == ["a"] * len(responses) and self.model_path == "m"
        return [self.scale * float(response) for response in responses]

class Tensor:
    def compute_reward(self, prompts, responses):
        import numpy
        return numpy.array([float(response) for response in responses])

class Slow:
    def __init__(self): time.sleep(3)
    def compute_reward(self, prompts, responses): return [1.0] * len(responses)

class Broken:
    def __init__(self): raise OSError("no such model")
    def compute_reward(self, prompts, responses): return [1.0] * len(responses)

class Nothing: pass
class NeedsMore:
    def __init__(self, name, model_path): pass
    def compute_reward(self, prompts, responses): return [1.0] * len(responses)
class OneArgument:
    def compute_reward(self, prompts): return []

def single(args, sample): return 1.0
def short(args, samples): return [1.0] * (len(samples) - 1)
def number(args, samples): return 1.0
def bad_entry(args, samples): return [float("nan") for _ in samples]
def broken(args, samples): return 1 / 0
def slow(args, samples): time.sleep(30)
def only_samples(samples): return []
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "custom_rm.py"
    path.write_text(SOURCE)
    return path


def config(path, **changes):
    return RolloutConfig.of(
        prompt_data="p",
        rollout_batch_size=1,
        custom_rm_path=str(path),
        **{"hf_checkpoint": "m", "rm_timeout": 20.0} | changes,
    )


def make(path, strict=False, **changes):
    given = config(path, **changes)
    return make_scorer(given, HookArgs.from_configs(given), strict=strict).reward


def samples(count):
    return [Sample(index=index, group_index=0, prompt="a", response=str(index)) for index in range(count)]


def score(reward, count):
    async def all_of_them():
        return await asyncio.gather(*map(reward, samples(count)), return_exceptions=True)

    return LOOP.run(asyncio.wait_for(all_of_them(), 60))


def test_samples_that_wait_are_scored_together(file):
    reward = make(f"{file}:batched")
    assert isinstance(reward, BatchedReward)
    for _ in range(2):
        assert score(reward, 300) == [float(index) for index in range(300)]


def test_batches_hold_64_at_most(file):
    asked = []

    async def function(group):
        asked.append(len(group))
        await asyncio.sleep(0)
        return [1.0] * len(group)

    assert score(BatchedReward(function), 300) == [1.0] * 300
    assert asked == [64, 64, 64, 64, 44]


def test_an_async_function_with_rewards_by_name(file):
    assert score(make(f"{file}:waits"), 2) == [{"score": 0.0, "limit": 20.0}, {"score": 1.0, "limit": 20.0}]


def test_a_class_with_compute_reward(file):
    reward = make(file, custom_rm_kwargs='{"model_path": "m", "scale": 2}')
    assert score(reward, 5) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert score(reward, 2) == [0.0, 2.0]
    assert score(make(f"{file}:Tensor"), 3) == [0.0, 1.0, 2.0]


def test_a_class_gets_the_runs_model_where_it_needs_one(file):
    assert score(make(f"{file}:CustomRewardModel"), 3) == [0.0, 1.0, 2.0]
    own = make(f"{file}:CustomRewardModel", hf_checkpoint="other", custom_rm_kwargs='{"model_path": "m"}')
    assert score(own, 3) == [0.0, 1.0, 2.0]


def test_a_class_is_made_once_and_not_before_it_is_needed(tmp_path):
    path, made = tmp_path / "own.py", tmp_path / "made"
    path.write_text(
        f"class CustomRewardModel:\n    def __init__(self): open({str(made)!r}, 'a').write('x')\n"
        "    def compute_reward(self, prompts, responses): return [1.0] * len(responses)\n"
    )
    reward = make(path)
    assert not made.exists()
    assert score(reward, 200) == [1.0] * 200
    assert made.read_text() == "x"


def test_a_file_alone_means_its_custom_rm_first(file):
    file.write_text("def custom_rm(args, sample): return 5.0\nclass CustomRewardModel: pass\n")
    reward = make(file)
    assert score(reward, 1) == [5.0]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("NeedsMore", {}, "missing a required argument: 'name'; it is made with --custom-rm-kwargs"),
        ("CustomRewardModel", {"custom_rm_kwargs": '{"path": 1}'}, "--custom-rm-kwargs (path)"),
        ("Nothing", {}, "is a class without compute_reward(self, prompts, responses)"),
        ("OneArgument", {}, "too many positional arguments"),
        ("single", {"custom_rm_kwargs": "{}"}, "--custom-rm-kwargs is for a class"),
        ("only_samples", {"group_rm": True}, "it is called with 2 arguments, (args, samples)"),
    ],
)
def test_what_cannot_serve_is_refused_before_the_run(file, name, changes, words):
    with pytest.raises(ConfigError) as caught:
        make(f"{file}:{name}", **changes)
    assert words in str(caught.value)


def test_a_file_without_the_usual_names(file):
    file.write_text("def score(args, sample): return 1.0\n")
    with pytest.raises(ConfigError, match="has no function custom_rm or CustomRewardModel; it has score"):
        make(file)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "for 3 samples, 0 to 2; return a list of 3 rewards"),
        ("number", "returned 1.0 for 3 samples"),
        ("bad_entry", "returned nan for sample 0"),
        ("broken", "raised ZeroDivisionError for 3 samples, 0 to 2"),
        ("slow", "took more than 0.5 s for 3 samples, 0 to 2"),
    ],
)
def test_a_function_that_fails_is_named_with_its_samples(file, name, words):
    errors = score(make(f"{file}:{name}", rm_timeout=0.5, strict=True), 3)
    assert all(isinstance(error, VerifierError) and words in str(error) for error in errors)


@pytest.mark.parametrize("name", ["short", "number", "broken", "slow"])
def test_a_call_that_fails_costs_its_samples_and_one_log_line(file, name, caplog):
    reward, given = make(f"{file}:{name}", rm_timeout=0.5, rm_on_failure="drop", reward_key="score"), samples(3)

    async def all_of_them():
        return await asyncio.gather(*map(reward, given))

    assert LOOP.run(asyncio.wait_for(all_of_them(), 60)) == [{"score": 0.0}] * 3
    assert [sample.remove_sample for sample in given] == [True] * 3
    assert all(f"--custom-rm-path {file}:{name} " in sample.metadata["reward_failure"] for sample in given)
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("3 samples, 0 to 2 could not be scored and count as wrong: --custom-rm-path ")


def test_an_entry_that_is_no_number_costs_its_own_sample_alone(file, caplog):
    file.write_text("def custom_rm(args, samples): return [2.0, None, float('nan'), 3.0][: len(samples)]\n")
    assert score(make(file), 4) == [2.0, 0.0, 0.0, 3.0]
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("Broken", "cannot be made: OSError: no such model"), ("Slow", "takes more than 0.5 s to be made")],
)
def test_an_object_that_cannot_be_made_ends_the_run_at_once(file, name, words):
    errors = score(make(f"{file}:{name}", rm_timeout=0.5), 3)
    assert all(isinstance(error, RewardError) and not isinstance(error, VerifierError) for error in errors)
    assert f"--custom-rm-path {file}:{name} {words}" in str(errors[0])


@pytest.mark.parametrize("group", [False, True])
def test_a_function_that_never_scores_ends_the_run(file, group):
    given = config(f"{file}:broken", group_rm=group)
    scorer = make_scorer(given, HookArgs.from_configs(given))
    reward = scorer.group_reward or scorer.reward

    async def rounds():
        for number in range(200):
            try:
                await (reward(samples(2)) if group else asyncio.gather(*map(reward, samples(2))))
            except RewardError as error:
                return number, str(error)

    number, message = LOOP.run(asyncio.wait_for(rounds(), 60))
    calls = 64 if group else 32  # of 2 samples; groups are scored at the same time, batches one after the other
    assert number == calls - 1
    assert (
        f"--custom-rm-path {file}:broken has failed {calls} times in a row and has never given a reward; at last: "
        in message
    )


def test_a_function_that_never_scores_batches_ends_the_run_within_eight_of_them(file):
    reward = make(f"{file}:broken")
    answers = score(reward, 64 * 7)
    assert answers == [0.0] * (64 * 7)
    errors = score(reward, 64)
    assert all(isinstance(error, RewardError) for error in errors)
    assert "has failed 8 times in a row" in str(errors[0])


def test_one_that_is_cancelled_in_a_batch_takes_no_other_with_it():
    async def function(group):
        await asyncio.sleep(0.05)
        return [float(sample.index) for sample in group]

    async def run():
        reward = BatchedReward(function)
        asked = [asyncio.create_task(reward(sample)) for sample in samples(4)]
        await asyncio.sleep(0.01)
        asked[0].cancel()
        return await asyncio.gather(*asked[1:])

    assert LOOP.run(asyncio.wait_for(run(), 20)) == [1.0, 2.0, 3.0]


def test_one_that_is_cancelled_while_it_waits_is_not_scored():
    asked = []

    async def run():
        release = asyncio.Event()

        async def function(group):
            asked.extend(sample.index for sample in group)
            await release.wait()
            return [1.0] * len(group)

        reward = BatchedReward(function)
        first = asyncio.create_task(reward(samples(1)[0]))
        while not asked:
            await asyncio.sleep(0)
        waiting = [asyncio.create_task(reward(sample)) for sample in samples(3)[1:]]
        while len(reward._waiting) < 2:
            await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        release.set()
        return await asyncio.gather(first, waiting[1])

    assert LOOP.run(asyncio.wait_for(run(), 20)) == [1.0, 1.0]
    assert asked == [0, 2]


def test_a_group_is_scored_in_one_call(file):
    given = config(f"{file}:single", group_rm=True)  # whatever the second argument is called
    assert LOOP.run(make_scorer(given, HookArgs.from_configs(given)).group_reward(samples(3))) == [0.0] * 3
    reward = make_scorer(given, HookArgs.from_configs(given), strict=True).group_reward
    with pytest.raises(VerifierError, match=r"returned 1\.0 for 3 samples"):
        LOOP.run(reward(samples(3)))
    given = config(f"{file}:waits", group_rm=True)
    reward = make_scorer(given, HookArgs.from_configs(given)).group_reward
    assert [value["score"] for value in LOOP.run(reward(samples(3)))] == [0.0, 1.0, 2.0]
    assert make_scorer(config(f"{file}:waits"), HookArgs({})).group_reward is None
