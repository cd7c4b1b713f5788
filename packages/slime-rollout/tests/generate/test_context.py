import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from slime_rollout.config import RolloutConfig
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.generate import SamplingParams, sampling_seed

GIVEN = {
    "hf_checkpoint": "m",
    "prompt_data": "p",
    "rollout_batch_size": 1,
    "rollout_temperature": 0.7,
    "rollout_top_p": 0.9,
    "rollout_top_k": 40,
    "rollout_max_response_len": 64,
    "rollout_stop": ("\n",),
    "rollout_stop_token_ids": (7,),
}
ROLLOUT = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=64, stop=("\n",), stop_token_ids=(7,))


def evaluation(**changes):
    (held_out,) = read_eval_sets(RolloutConfig.of(**GIVEN, eval_prompt_data=("held_out.jsonl",), **changes))
    return SamplingParams.for_evaluation(held_out)


def test_rollout_and_evaluation():
    assert SamplingParams.for_rollout(RolloutConfig.of(**GIVEN)) == ROLLOUT
    assert evaluation() == ROLLOUT
    own = {"eval_temperature": 0.0, "eval_top_p": 1.0, "eval_top_k": -1, "eval_max_response_len": 8}
    assert evaluation(**own, eval_max_context_len=9, eval_min_new_tokens=2) == SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=8,
        max_context=9,
        stop=("\n",),
        stop_token_ids=(7,),
        min_new_tokens=2,
    )


def test_request():
    assert ROLLOUT.to_request(5) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "max_new_tokens": 64,
        "stop": ["\n"],
        "stop_token_ids": [7],
        "sampling_seed": 5,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "ignore_eos": False,
    }


def test_the_least_length_yields_to_the_longest():
    params = evaluation(eval_min_new_tokens=10)
    assert params.to_request(5)["min_new_tokens"] == 10
    assert params.to_request(5, max_new_tokens=4)["min_new_tokens"] == 4


def test_the_seed_is_what_it_was():
    assert sampling_seed(1234, 7) == 77130567019160112  # written down: must not change between versions


def test_other_processes_agree():
    code = "from slime_rollout.generate import sampling_seed; print(sampling_seed(1234, 7))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": "5"},
    )
    assert int(done.stdout) == sampling_seed(1234, 7)


@given(st.integers(), st.integers(0), st.integers(0))
def test_fits_a_signed_64_bit_number(run_seed, index, turn):
    assert 0 <= sampling_seed(run_seed, index, turn) < 2**63


def test_all_parts_count():
    seeds = [
        sampling_seed(run, index, turn, stream)
        for run in range(5)
        for index in range(40)
        for turn in range(5)
        for stream in ("rollout", "eval/a")
    ]
    assert len(set(seeds)) == len(seeds)
