import re
import subprocess
import sys

import pytest

from slime_core.errors import ConfigError
from slime_core.flags import flag_specs, flag_values
from slime_rollout.config import RolloutConfig
from slime_rollout.reward_config import RULES

GOOD = {"hf_checkpoint": "model", "prompt_data": "train.jsonl", "rollout_batch_size": 4}


def make(**changes):
    return RolloutConfig.of(**{**GOOD, **changes})


def test_every_field_is_a_flag_with_help():
    specs = {spec.dest: spec for spec in flag_specs(RolloutConfig)}
    assert len(specs) == 85 and set(specs) == flag_values(make()).keys()
    assert all(spec.help for spec in specs.values())
    assert specs["rollout_stop_token_ids"].type is int
    assert specs["eval_prompt_data"].nargs == "+"
    assert (specs["prompt_data"].type, specs["prompt_data"].nargs) == (str, "+")
    assert specs["apply_chat_template"].is_switch
    assert specs["rm_type"].choices == RULES


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_batch_size": 0}, "--rollout-batch-size 0"),
        ({"n_samples_per_prompt": -1}, "--n-samples-per-prompt -1"),
        ({"rollout_max_response_len": 0}, "--rollout-max-response-len 0"),
        ({"rollout_max_prompt_len": 0}, "--rollout-max-prompt-len 0"),
        ({"rollout_concurrency": 0}, "--rollout-concurrency 0"),
        ({"n_samples_per_eval_prompt": 0}, "--n-samples-per-eval-prompt 0"),
        ({"rollout_temperature": 0.0}, "--rollout-temperature 0.0 must be above 0"),
        ({"rollout_temperature": float("nan")}, "--rollout-temperature nan"),
        ({"eval_temperature": -0.5}, "--eval-temperature -0.5"),
        ({"rollout_top_p": 0.0}, "--rollout-top-p 0.0"),
        ({"eval_top_p": 1.5}, "--eval-top-p 1.5"),
        ({"rollout_top_k": 0}, "--rollout-top-k 0"),
        ({"rollout_stop": ("\n", "")}, "--rollout-stop has an empty string"),
        ({"rollout_stop_token_ids": (3, -2)}, "--rollout-stop-token-ids -2"),
        ({"rollout_request_timeout": 0.0}, "--rollout-request-timeout 0.0"),
        ({"rm_timeout": float("inf")}, "--rm-timeout inf"),
        ({"rm_type": "telepathy"}, "allowed: exact, first_integer"),
        ({"rm_type": "exact", "custom_rm_path": "a.b"}, "give one of them"),
        ({"prompt_data": ("",)}, "--prompt-data names no data set"),
        ({"prompt_data": ("a", "b"), "prompt_data_weights": (1.0,)}, "has 1 values and --prompt-data 2 paths"),
        ({"prompt_data_weights": (0.0,)}, "--prompt-data-weights 0.0 must be above 0"),
        ({"prompt_data_weights": (float("nan"),)}, "--prompt-data-weights nan must be a finite number, above 0"),
        (
            {"streaming_shuffle_buffer": 100},
            "--streaming-shuffle-buffer 100 has no effect without --streaming-data; give",
        ),
        (
            {"streaming_shuffle_buffer": 0, "streaming_data": True, "rollout_shuffle": True},
            "--streaming-shuffle-buffer 0 must be 1 or more",
        ),
        ({"over_sampling_batch_size": 1}, "--over-sampling-batch-size 1 is less than --rollout-batch-size 4"),
        ({"over_sampling_batch_size": 0}, "--over-sampling-batch-size 0 must be 1 or more"),
        ({"dynamic_sampling_max_prompts": 1}, "is less than the 4 prompts in flight"),
        ({"max_weight_staleness": -1}, "--max-weight-staleness -1 must be 0 or more"),
        ({"partial_rollout": True}, "--partial-rollout has no effect without --over-sampling-batch-size or --dynamic"),
        (
            {"mask_offpolicy_in_partial_rollout": True},
            "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout",
        ),
        ({"async_buffer_size": 0}, "--async-buffer-size 0 must be 1 or more"),
        ({"async_buffer_size": 1, "over_sampling_batch_size": 8}, "leave out --over-sampling-batch-size"),
        ({"num_data_workers": -1}, "--num-data-workers -1 must be 0 or more"),
        ({"on_bad_data": "ignore"}, "--on-bad-data ignore is unknown; allowed: error, skip"),
        ({"apply_chat_template_kwargs": "{"}, "--apply-chat-template-kwargs { is not JSON"),
        ({"apply_chat_template_kwargs": "[]"}, "--apply-chat-template-kwargs [] is not a JSON object"),
        ({"apply_chat_template_kwargs": '{"a": 1}'}, "no effect without --apply-chat-template"),
        ({"apply_chat_template": True, "apply_chat_template_kwargs": '{"tokenize": true}'}, "sets tokenize, which"),
        ({"rm_type": "boxed_random"}, "--rm-type boxed_random is unknown"),
        ({"rm_type": "remote_rm"}, "--rm-type remote_rm needs --rm-url"),
        ({"rm_type": "exact", "rm_url": "http://a"}, "--rm-url http://a has no effect without --rm-type remote_rm"),
        ({"rm_type": "remote_rm", "rm_url": "a:80"}, "--rm-url a:80 is not an address"),
        ({"rm_type": "remote_rm", "rm_url": "http:///score"}, "--rm-url http:///score is not an address"),
        ({"rm_type": "remote_rm", "rm_url": "http://a:99999/score"}, "--rm-url http://a:99999/score is not an address"),
        ({"rm_type": "remote_rm", "rm_url": "http://a:8O/score"}, "--rm-url http://a:8O/score is not an address"),
        ({"opd_type": "sglang"}, "--opd-type sglang needs --rm-url, the address of a SGLang server"),
        ({"opd_type": "sglang", "rm_url": "a:80"}, "--rm-url a:80 is not an address"),
        ({"opd_type": "megatron", "rm_url": "http://a"}, "--rm-url http://a has no effect without --rm-type remote"),
        ({"opd_type": "vllm"}, "--opd-type vllm is unknown; allowed: sglang, megatron"),
        (
            {"opd_type": "sglang", "rm_type": "remote_rm", "rm_url": "http://a"},
            "--rm-url is the teacher's address with --opd-type sglang, so --rm-type remote_rm cannot have it too",
        ),
        ({"rm_type": "dapo"}, "--rm-type dapo gives score (1 or -1) and acc (1 or 0)"),
        ({"rm_type": "dapo", "reward_key": "scor"}, "and acc (1 or 0), no scor; choose one with --reward-key"),
        ({"group_rm": True}, "--group-rm has no effect without --custom-rm-path; give --custom-rm-path"),
        ({"custom_rm_kwargs": "{}"}, "--custom-rm-kwargs {} has no effect without --custom-rm-path"),
        ({"custom_rm_path": "a.b", "custom_rm_kwargs": "{"}, "--custom-rm-kwargs { is not JSON"),
        ({"custom_rm_path": "a.b", "custom_rm_kwargs": "[1]"}, "--custom-rm-kwargs [1] is not a JSON object"),
        ({"rm_workers": 0}, "--rm-workers 0"),
        ({"rm_memory_limit": 0.1}, "--rm-memory-limit 0.1 must be between 0.5 and 1024"),
        ({"rm_on_failure": "cry"}, "--rm-on-failure cry"),
        ({"eval_max_context_len": 0}, "--eval-max-context-len 0"),
        ({"eval_max_prompt_len": 0}, "--eval-max-prompt-len 0"),
        ({"eval_min_new_tokens": -1}, "--eval-min-new-tokens -1 must be 0 or more"),
        ({"eval_prompt_data": ("a", "a.jsonl", "b")}, "give pairs of NAME PATH"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make(**changes)


def test_one_data_set_or_several():
    assert make().data.prompt_paths == ("train.jsonl",)
    assert make(prompt_data=("a", "b@[1:]"), prompt_data_weights=(3.0, 1.0)).data.prompt_paths == ("a", "b@[1:]")


def test_arguments_of_the_template_are_json():
    assert make().data.chat_template_kwargs == {}
    given = make(apply_chat_template=True, apply_chat_template_kwargs='{"enable_thinking": false}')
    assert given.data.chat_template_kwargs == {"enable_thinking": False}


def test_reading_the_flag_table_imports_no_framework():
    code = "import sys, slime_rollout.config; print({'torch', 'transformers', 'aiohttp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "set()"


def test_weights_that_are_sent_less_often_lag():
    assert not make().may_lag and make(update_weights_interval=3).may_lag
    assert make(update_weights_interval=3, max_weight_staleness=2).selection.most_behind == 2
    assert make(update_weights_interval=3, async_buffer_size=2).selection.most_behind == 4
    assert make().selection.most_behind == 1
    with pytest.raises(
        ConfigError, match="leaves engines 2 updates behind, and --max-weight-staleness 1 allows 1; give 2"
    ):
        make(update_weights_interval=3, max_weight_staleness=1)
