from slime_rollout.config import RolloutConfig
from slime_rollout.generate import SamplingParams

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


def test_rollout_and_evaluation():
    assert SamplingParams.for_rollout(RolloutConfig(**GIVEN)) == ROLLOUT
    assert SamplingParams.for_evaluation(RolloutConfig(**GIVEN)) == ROLLOUT
    own = RolloutConfig(**GIVEN, eval_temperature=0.0, eval_top_p=1.0, eval_top_k=-1, eval_max_response_len=8)
    assert SamplingParams.for_evaluation(own) == SamplingParams(
        temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=8, stop=("\n",), stop_token_ids=(7,)
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
