import asyncio
import dataclasses
import subprocess
import sys
import time

import pytest

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.rewards import VerifierError, make_scorer
from slime_rollout.rewards.custom import CustomReward

LOOP = asyncio.Runner()  # one event loop for all calls, as in a run
ARGS = HookArgs({"bonus": 2})
SAMPLE = Sample(index=3, group_index=0, prompt="2 + 2 =", label="4", response="4")

SOURCE = """
import asyncio, threading, time
from functools import partial

def plain(args, sample):
    return args.bonus + (sample.response == sample.label)

async def waits(args, sample):
    await asyncio.sleep(0)
    return {"score": 1, "style": True}

def returns_awaitable(args, sample):
    return waits(args, sample)

def thread(args, sample):
    return {"main": threading.current_thread() is threading.main_thread()}

def one(sample): return 1.0
def three(args, sample, extra): return 1.0
def optional(args, sample, extra=None): return 1.0
def broken(args, sample): return 1 / 0
def leaves(args, sample): raise SystemExit(3)
def nothing(args, sample): return None
def text(args, sample): return "1.0"
def not_finite(args, sample): return float("nan")
def huge(args, sample): return 10**400
def empty(args, sample): return {}
class Odd:
    def __float__(self): raise AttributeError("unset")
    def __repr__(self): raise AttributeError("unset")
def odd(args, sample): return Odd()
def interrupts(args, sample): raise KeyboardInterrupt
def stuck(args, sample): time.sleep(30); return 1.0
async def stuck_waiting(args, sample): await asyncio.sleep(30)
async def stuck_in_thread(args, sample): await asyncio.to_thread(time.sleep, 30)
async def by_thread(args, sample): return await asyncio.to_thread(plain, args, sample)
not_callable = 5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(SOURCE)
    return path


def score(path, timeout=20.0):
    return LOOP.run(CustomReward(str(path), ARGS, timeout=timeout)(SAMPLE))


def test_plain_and_async_functions(file):
    assert score(f"{file}:plain") == 3.0
    assert score(f"{file}:by_thread") == 3.0
    assert score(f"{file}:optional") == 1.0
    assert score(f"{file}:waits") == {"score": 1.0, "style": 1.0}
    assert score(f"{file}:returns_awaitable") == {"score": 1.0, "style": 1.0}


def test_a_plain_function_runs_off_the_event_loop(file):
    assert score(f"{file}:thread") == {"main": 0.0}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{file}:nope", "has no function nope; it has broken, "),
        ("{file}:one", "takes (sample); it is called with 2 arguments, (args, sample)"),
        ("{file}:three", "takes (args, sample, extra)"),
    ],
)
def test_a_function_that_cannot_serve_is_refused_before_the_run(file, path, words):
    given = path.format(file=file, dir=file.parent)
    with pytest.raises(ConfigError) as caught:
        CustomReward(given, ARGS, timeout=1.0)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--custom-rm-path {given}")


def test_a_file_that_ends_the_program_when_it_is_loaded(file):
    file.write_text("import sys; sys.exit('usage: …')")
    with pytest.raises(ConfigError, match="does not load: SystemExit: usage"):
        CustomReward(f"{file}:plain", ARGS, timeout=1.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "raised ZeroDivisionError for sample 3: division by zero"),
        ("leaves", "raised SystemExit for sample 3"),
        ("nothing", "returned None for sample 3; return a finite number"),
        ("text", "returned '1.0'"),
        ("not_finite", "returned nan"),
        ("huge", "returned 1000"),
        ("empty", "returned {}"),
        ("odd", "returned a Odd that cannot be shown (AttributeError)"),
        ("interrupts", "raised KeyboardInterrupt for sample 3"),
    ],
)
def test_a_function_that_fails_is_named_with_the_sample(file, name, words):
    with pytest.raises(VerifierError) as caught:
        score(f"{file}:{name}")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["stuck", "stuck_waiting", "stuck_in_thread"])
def test_a_slow_function_ends_at_the_time_limit_and_keeps_nobody_waiting(file, name):
    code = f"""
import asyncio, time
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.errors import RewardError
from slime_rollout.rewards.custom import CustomReward
reward = CustomReward({f"{file}:{name}"!r}, HookArgs({{}}), timeout=0.2)
try:
    asyncio.run(reward(Sample(index=3, group_index=0, prompt="a")))
except RewardError as error:
    print(error)
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=True)
    assert "took more than 0.2 s for sample 3; make it faster or raise --rm-timeout" in done.stdout
    assert time.monotonic() - start < 25  # `stuck` sleeps for 30 s


def test_waiting_for_a_turn_is_not_counted(file):
    file.write_text("import time\ndef naps(args, sample): time.sleep(0.2); return 1.0\n")
    reward = CustomReward(f"{file}:naps", ARGS, timeout=5.0)

    async def many():
        return await asyncio.gather(*(reward(SAMPLE) for _ in range(100)))

    assert LOOP.run(many()) == [1.0] * 100


def test_the_settings_choose(file):
    config = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1}
    rule = make_scorer(RolloutConfig.of(**config, rm_type="first_integer"), ARGS).reward
    assert LOOP.run(rule(SAMPLE)) == 1.0
    own = make_scorer(RolloutConfig.of(**config, custom_rm_path=f"{file}:plain"), ARGS).reward
    assert LOOP.run(own(SAMPLE)) == 3.0


@pytest.mark.parametrize("name", ["broken", "nothing", "interrupts"])
def test_a_failure_costs_the_sample(file, name, caplog):
    given = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1, "rm_on_failure": "zero"}
    config = RolloutConfig.of(**given, custom_rm_path=f"{file}:{name}")
    sample = dataclasses.replace(SAMPLE, metadata={})
    assert LOOP.run(make_scorer(config, ARGS).reward(sample)) == 0.0
    assert "--custom-rm-path" in sample.metadata["reward_failure"]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "sample 3 could not be scored and counts as wrong"
    ]
