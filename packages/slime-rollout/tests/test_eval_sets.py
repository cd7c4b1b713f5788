import pickle
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.http import HttpError

GIVEN = {"hf_checkpoint": "model", "prompt_data": "train.jsonl", "rollout_batch_size": 4}


@pytest.fixture
def sets(tmp_path):
    """Builds the held-out sets of flags and of a file."""

    def build(*, defaults=None, datasets=None, **flags):
        if datasets is not None:
            path = tmp_path / "sets.yaml"
            path.write_text(
                yaml.safe_dump({"eval": {"defaults": defaults or {}, "datasets": datasets}}, sort_keys=False)
            )
            flags["eval_config"] = str(path)
        return RolloutConfig(**GIVEN, **flags).eval_sets

    return build


def places(sets):
    return [(one.name, one.path) for one in sets]


def test_flags_name_sets(sets):
    assert sets() == ()
    assert places(sets(eval_prompt_data=("x.jsonl",))) == [("eval", "x.jsonl")]
    both = sets(eval_prompt_data=("b", "1.jsonl", "a", "2.jsonl@[3:]"))
    assert places(both) == [("b", "1.jsonl"), ("a", "2.jsonl@[3:]")]


def test_those_of_the_file_come_after_those_of_the_flags(sets):
    given = sets(eval_prompt_data=("z", "1.jsonl"), datasets={"b": {"path": "2.jsonl"}, "a": {"path": "3.jsonl"}})
    assert places(given) == [("z", "1.jsonl"), ("b", "2.jsonl"), ("a", "3.jsonl")]


def test_without_settings_a_set_is_sampled_and_scored_as_rollouts_are(sets):
    rollout = {
        "rollout_temperature": 0.7,
        "rollout_top_p": 0.9,
        "rollout_top_k": 40,
        "rollout_max_response_len": 64,
        "rollout_max_context_len": 96,
        "rollout_max_prompt_len": 32,
        "rollout_stop": ("\n",),
        "rollout_stop_token_ids": (7,),
        "input_key": "question",
        "apply_chat_template": True,
        "apply_chat_template_kwargs": '{"enable_thinking": false}',
        "rm_type": "dapo",
        "reward_key": "acc",
        "n_samples_per_prompt": 8,
    }
    (one,) = sets(**rollout, datasets={"a": {"path": "x"}})
    for name, value in rollout.items():
        assert getattr(one.config, name) == value
        if name.startswith("rollout_") and name != "rollout_max_prompt_len":
            assert getattr(one, name.removeprefix("rollout_")) == value
    assert (one.n_samples_per_eval_prompt, one.min_new_tokens, one.metadata_overrides) == (1, 0, {})
    assert (one.config.eval_sets, one.config.eval_config) == ((), None)


SETTINGS = {
    "n_samples_per_eval_prompt": st.integers(1, 64),
    "temperature": st.sampled_from([0.5, 1.0, 2.0]),
    "top_p": st.sampled_from([0.1, 0.5, 1.0]),
    "top_k": st.sampled_from([-1, 1, 50]),
    "max_response_len": st.integers(100, 200),
    "max_context_len": st.integers(300, 400),
    "min_new_tokens": st.integers(0, 100),
    "stop": st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
    "stop_token_ids": st.lists(st.integers(0, 9), max_size=2).map(tuple),
    "input_key": st.sampled_from("pqr"),
    "label_key": st.sampled_from("pqr"),
    "tool_key": st.sampled_from("pqr"),
    "metadata_key": st.sampled_from("pqr"),
    "reward_key": st.sampled_from("pqr"),
    "max_prompt_len": st.integers(1, 99),
}
ROLLOUT_FLAG = {
    key: f"rollout_{key}"
    for key in ("temperature", "top_p", "top_k", "max_response_len", "max_context_len", "max_prompt_len", "stop")
} | {key: key for key in ("input_key", "label_key", "tool_key", "metadata_key", "reward_key")}
ROLLOUT_FLAG["stop_token_ids"] = "rollout_stop_token_ids"
EVAL_FLAG = {key: f"eval_{key}" for key in SETTINGS.keys() - {"stop", "stop_token_ids", "metadata_key"}} | {
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt"
}
LAYER = st.fixed_dictionaries({}, optional=SETTINGS)


@given(rollout=LAYER, evaluation=LAYER, defaults=LAYER, own=LAYER)
def test_the_set_wins_over_defaults_over_flags_of_evaluation_over_those_of_rollouts(
    rollout, evaluation, defaults, own, tmp_path_factory
):
    rollout = {key: value for key, value in rollout.items() if key in ROLLOUT_FLAG}
    evaluation = {key: value for key, value in evaluation.items() if key in EVAL_FLAG}
    path = tmp_path_factory.getbasetemp() / "precedence.yaml"
    layers = [
        {key: list(value) if isinstance(value, tuple) else value for key, value in layer.items()}
        for layer in (defaults, own)
    ]
    path.write_text(
        yaml.safe_dump({"eval": {"defaults": layers[0], "datasets": [{"name": "a", "path": "x", **layers[1]}]}})
    )
    (one,) = RolloutConfig(
        **GIVEN,
        eval_config=str(path),
        **{ROLLOUT_FLAG[key]: value for key, value in rollout.items()},
        **{EVAL_FLAG[key]: value for key, value in evaluation.items()},
    ).eval_sets
    expected = rollout | evaluation | defaults | own
    for key, value in expected.items():
        name = "rollout_max_prompt_len" if key == "max_prompt_len" else key
        holder = one if hasattr(one, name) else one.config
        assert getattr(holder, name) == value, key


def test_a_reward_of_its_own_leaves_the_runs_behind(sets, tmp_path):
    run = {"custom_rm_path": "own.py:Model", "custom_rm_kwargs": '{"a": 1}', "group_rm": True}
    same, ruled, other, asked, back = sets(
        **run,
        defaults={"reward_key": "acc"},
        datasets={
            "same": {"path": "x"},
            "ruled": {"path": "x", "rm_type": "math"},
            "other": {"path": "x", "custom_rm_path": "b.py", "custom_rm_kwargs": {"b": 2}},
            "asked": {"path": "x", "rm_type": "remote_rm", "rm_url": "http://h/"},
            "back": {"path": "x", "group_rm": False},
        },
    )
    reward = [
        (one.config.rule, one.config.custom_rm_path, one.config.custom_rm_arguments, one.config.group_rm)
        for one in (same, ruled, other, asked, back)
    ]
    assert reward == [
        (None, "own.py:Model", {"a": 1}, True),
        ("math", None, None, False),
        (None, "b.py", {"b": 2}, False),
        ("remote_rm", None, None, False),
        (None, "own.py:Model", {"a": 1}, False),
    ]
    assert asked.config.rm_url == "http://h/"
    assert {one.config.reward_key for one in (same, ruled, other)} == {"acc"}
    assert (ruled.config.reward_timeout, other.config.reward_timeout) == (10.0, 60.0)


def test_the_rule_of_the_defaults_yields_to_a_sets_function(sets):
    (one,) = sets(
        rm_type="remote_rm",
        rm_url="http://h/",
        defaults={"rm_type": "math"},
        datasets={"a": {"path": "x", "custom_rm_path": "b.py"}},
    )
    assert (one.config.rule, one.config.rm_url, one.config.custom_rm_path) == (None, None, "b.py")


def test_a_set_without_the_template_has_no_arguments_for_it(sets):
    run = {"apply_chat_template": True, "apply_chat_template_kwargs": '{"enable_thinking": false}'}
    plain, own, same = sets(
        **run,
        datasets={
            "plain": {"path": "x", "apply_chat_template": False},
            "own": {"path": "x", "apply_chat_template_kwargs": {"enable_thinking": True}},
            "same": {"path": "x", "apply_chat_template": True},
        },
    )
    assert [one.config.chat_template_kwargs for one in (plain, own, same)] == [
        {},
        {"enable_thinking": True},
        {"enable_thinking": False},
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"eval_prompt_data": ("a", "1.jsonl", "b")}, "--eval-prompt-data got 3 values (a 1.jsonl b); give pairs"),
        ({"eval_prompt_data": ("1.jsonl", "2.jsonl")}, "--eval-prompt-data 1.jsonl 2.jsonl: 1.jsonl looks like a path"),
        ({"eval_prompt_data": ("a.parquet@[1:]", "b")}, "a.parquet@[1:] looks like a path; give pairs of NAME PATH"),
        ({"eval_prompt_data": ("dir/a", "b")}, "dir/a looks like a path"),
        ({"eval_prompt_data": ("1.bz2", "b")}, "1.bz2 looks like a path"),
        ({"eval_prompt_data": ("1.JSONL.XZ@[:9]", "b")}, "1.JSONL.XZ@[:9] looks like a path"),
        ({"eval_prompt_data": (" a", "b")}, "--eval-prompt-data: set  a: the name ' a' is empty, or has white space"),
        ({"eval_prompt_data": ("a-pass@2", "b")}, "the name 'a-pass@2' has '-pass@2', which the names of its metrics"),
        ({"datasets": {"a/b": {"path": "x"}}}, "sets.yaml: set a/b: the name 'a/b' has '/'"),
        (
            {"eval_prompt_data": ("a", "1", "a", "2")},
            "--eval-prompt-data: the name a is given twice; give every set its",
        ),
        ({"datasets": [{"name": "a", "path": "x"}] * 2}, "sets.yaml: the name a is given twice"),
        (
            {"eval_prompt_data": ("a", "1"), "datasets": {"a": {"path": "x"}}},
            "sets.yaml and --eval-prompt-data: the name a is given twice",
        ),
        (
            {"datasets": {"a": {"path": "x", "rm_type": "maths"}}},
            "sets.yaml: set a: rm_type maths is unknown; allowed:",
        ),
        (
            {"datasets": {"a": {"path": "x", "rm_type": "math", "custom_rm_path": "b.py"}}},
            "set a: rm_type math and custom_rm_path b.py are both given; give one of them",
        ),
        (
            {"rm_type": "remote_rm", "rm_url": "http://h", "datasets": {"a": {"path": "x", "rm_type": "remote_rm"}}},
            "set a: rm_type remote_rm and rm_url belong together; give both or neither",
        ),
        ({"datasets": {"a": {"path": "x", "rm_type": "dapo"}}}, "choose one with reward_key"),
        ({"datasets": {"a": {"path": "x", "group_rm": True}}}, "group_rm is for an own function; give custom_rm_path"),
        (
            {"datasets": {"a": {"path": "x", "apply_chat_template_kwargs": {"x": 1}}}},
            "apply_chat_template_kwargs has no effect without apply_chat_template",
        ),
        (
            {"datasets": {"a": {"path": "x", "min_new_tokens": 9, "max_response_len": 8}}},
            "set a: min_new_tokens 9 is more than max_response_len 8; raise that, or lower this",
        ),
        (
            {"eval_prompt_data": ("a", "x"), "eval_min_new_tokens": 9, "eval_max_response_len": 8},
            "--eval-prompt-data: set a: min_new_tokens 9 is more than max_response_len 8",
        ),
        (
            {"eval_prompt_data": ("a", "x"), "rm_type": "dapo", "reward_key": "acc", "eval_reward_key": "f"},
            "--eval-prompt-data: set a: --rm-type dapo gives score (1 or -1) and acc (1 or 0)",
        ),
    ],
)
def test_sets_that_cannot_be_are_told_in_a_line(sets, given, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as told:
        sets(**given)
    assert "\n" not in str(told.value)


def test_the_sets_are_those_of_the_time_when_the_file_was_read(tmp_path):
    """The workers of a run get the settings pickled; the file may have changed by then."""
    path = tmp_path / "sets.yaml"
    path.write_text("eval: {datasets: {a: {path: x}}}")
    config = RolloutConfig(**GIVEN, eval_config=str(path))
    path.unlink()
    assert places(pickle.loads(pickle.dumps(config)).eval_sets) == [("a", "x")]


def test_what_goes_wrong_with_a_set_is_told_with_its_name(sets):
    (one,) = sets(eval_prompt_data=("aime", "x"))
    with pytest.raises(DataError, match=r"^held-out set aime: it broke$"), one.named():
        raise DataError("it broke")


def test_an_error_of_any_form_gets_the_sets_name(sets):
    (one,) = sets(eval_prompt_data=("sums", "sums.jsonl"))
    with pytest.raises(HttpError, match=r"^held-out set sums: GET .*broken$") as caught, one.named():
        raise HttpError("GET", "http://tool", 500, "broken")
    assert caught.value.status == 500
