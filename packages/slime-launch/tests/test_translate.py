"""Words of upstream slime's command as words of ours."""

import pytest

from slime_launch.answers import table
from slime_launch.errors import FlagError
from slime_launch.flags import parse_train
from slime_launch.translate import family_problem, items, translate_upstream
from support.known_flags import KNOWN


def test_flags_without_effect_are_accepted_and_said_in_one_line(flags, to_words):
    words = [*to_words(flags), "--use-tensorboard", "--train-backend", "megatron"]
    settings = parse_train([*words, "--log-probs-chunk-size", "1024", "--sglang-server-concurrency", "64"])
    assert settings.rollout.sampling.rollout_concurrency == 64
    line, renamed = settings.notes
    for name in ("--use-tensorboard", "--train-backend", "--log-probs-chunk-size"):
        assert f"{name} (" in line
    assert renamed == "--sglang-server-concurrency 64 is --rollout-concurrency 64 here"
    assert parse_train(to_words(flags)).notes == ()


def test_a_value_that_would_have_an_effect_is_refused(flags, to_words):
    with pytest.raises(FlagError, match="--train-backend fsdp is not built; allowed: megatron") as caught:
        parse_train([*to_words(flags), "--train-backend", "fsdp", "--num-rolout", "3"])
    assert "did you mean --num-rollout" in str(caught.value)


def test_a_model_name_must_be_of_the_same_family(workspace):
    hf = str(workspace / "hf")
    for name in ("qwen3", "Qwen3Config", "Qwen3ForCausalLM"):
        assert family_problem(name, hf) is None
    assert "is another family than" in family_problem("glm4", hf)
    assert family_problem("glm4", None) is None


@pytest.mark.parametrize("name", ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"])
def test_upstreams_own_filters_are_ours(name):
    flag = "--dynamic-sampling-filter-path"
    translated = translate_upstream([flag, f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}"], KNOWN)
    assert translated.words == [flag, f"slime_rollout.filters.{name}"]


@pytest.mark.parametrize("flag", ["--rollout-function-path", "--eval-function-path"])
@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("slime.rollout.sleep_rollout.sleep", "leave it out"),
        ("slime.rollout.sglang_streaming_rollout.generate_rollout_streaming", "leave it out; with --partial-rollout"),
        ("slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout", "use --data-source-path or"),
        ("slime.rollout.none.of_these", "give a function of your own, or leave it out"),
    ],
)
def test_upstreams_other_rollouts_are_refused_with_what_to_do(flag, path, advice, flags, to_words):
    with pytest.raises(FlagError, match=f"^{flag} {path} is upstream's own; {advice}") as caught:
        parse_train([*to_words(flags), flag, path])
    assert len(str(caught.value).splitlines()) == 1


def test_upstreams_fully_asynchronous_rollout_is_a_buffer(flags, to_words):
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    settings = parse_train([*to_words(flags), "--rollout-function-path", path])
    assert settings.rollout.selection.async_buffer_size == 1 and settings.rollout.rollout_function is None
    assert settings.notes == (f"--rollout-function-path {path} is --async-buffer-size 1 here",)
    given = parse_train([*to_words(flags), "--rollout-function-path", path, "--async-buffer-size", "3"])
    assert given.rollout.selection.async_buffer_size == 3 and len(given.notes) == 1


def test_upstreams_distillation_needs_no_functions():
    module = "slime.rollout.on_policy_distillation"
    words = ["--custom-rm-path", f"{module}.reward_func", "--custom-reward-post-process-path"]
    translated = translate_upstream([*words, f"{module}.post_process_rewards", "--lr", "1"], KNOWN)
    assert translated.words == ["--lr", "1"]
    assert translated.problems == []


def test_other_functions_of_upstreams_are_refused_with_what_to_give():
    translated = translate_upstream(["--custom-rm-path", "slime.rollout.rm_hub.math"], KNOWN)
    assert translated.problems == [
        "--custom-rm-path slime.rollout.rm_hub.math is upstream's own; give --rm-type with the name of the rule"
    ]


def test_paths_of_ours_that_upstreams_became():
    from slime_core.user_functions import load_function

    for row in table()["paths"].values():
        if "to" in row:
            assert callable(load_function(row["to"], "--x"))


def test_items():
    found = items(["a.b=1", "++c.d=[2,3]", "--x=4", "--y", "5", "-6", "e.f=7"])
    assert [(item.name, item.values) for item in found] == [
        ("a.b", ("1",)),
        ("c.d", ("[2,3]",)),
        ("--x", ("4",)),
        ("--y", ("5", "-6", "e.f=7")),
    ]
