import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.flags import flag_values
from slime_rollout.config import RolloutConfig
from slime_rollout.eval_sets import KEYS, read_eval_config, read_eval_sets
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
        return read_eval_sets(RolloutConfig.of(**GIVEN, **flags))

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
        assert flag_values(one.config)[name] == value
        if name.startswith("rollout_") and name != "rollout_max_prompt_len":
            assert getattr(one, name.removeprefix("rollout_")) == value
    assert (one.n_samples_per_eval_prompt, one.min_new_tokens, one.metadata_overrides) == (1, 0, {})
    assert (read_eval_sets(one.config), one.config.evaluation.eval_config) == ((), None)


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
    config = RolloutConfig.of(
        **GIVEN,
        eval_config=str(path),
        **{ROLLOUT_FLAG[key]: value for key, value in rollout.items()},
        **{EVAL_FLAG[key]: value for key, value in evaluation.items()},
    )
    (one,) = read_eval_sets(config)
    expected = rollout | evaluation | defaults | own
    for key, value in expected.items():
        name = "rollout_max_prompt_len" if key == "max_prompt_len" else key
        assert (getattr(one, name) if hasattr(one, name) else flag_values(one.config)[name]) == value, key


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
        (
            one.config.rewards.rule,
            one.config.rewards.custom_rm_path,
            one.config.rewards.custom_rm_arguments,
            one.config.rewards.group_rm,
        )
        for one in (same, ruled, other, asked, back)
    ]
    assert reward == [
        (None, "own.py:Model", {"a": 1}, True),
        ("math", None, None, False),
        (None, "b.py", {"b": 2}, False),
        ("remote_rm", None, None, False),
        (None, "own.py:Model", {"a": 1}, False),
    ]
    assert asked.config.rewards.rm_url == "http://h/"
    assert {one.config.rewards.reward_key for one in (same, ruled, other)} == {"acc"}
    assert (ruled.config.rewards.reward_timeout, other.config.rewards.reward_timeout) == (10.0, 60.0)


def test_the_rule_of_the_defaults_yields_to_a_sets_function(sets):
    (one,) = sets(
        rm_type="remote_rm",
        rm_url="http://h/",
        defaults={"rm_type": "math"},
        datasets={"a": {"path": "x", "custom_rm_path": "b.py"}},
    )
    assert (one.config.rewards.rule, one.config.rewards.rm_url, one.config.rewards.custom_rm_path) == (
        None,
        None,
        "b.py",
    )


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
    assert [one.config.data.chat_template_kwargs for one in (plain, own, same)] == [
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
            "set a: rm_type remote_rm needs rm_url",
        ),
        ({"datasets": {"a": {"path": "x", "rm_type": "dapo"}}}, "choose one with reward_key"),
        (
            {"datasets": {"a": {"path": "x", "group_rm": True}}},
            "group_rm has no effect without custom_rm_path; give custom_rm_path",
        ),
        (
            {"datasets": {"a": {"path": "x", "apply_chat_template_kwargs": {"x": 1}}}},
            'apply_chat_template_kwargs {"x": 1} has no effect without apply_chat_template',
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


def test_a_config_is_built_without_reading_the_file(tmp_path):
    config = RolloutConfig.of(**GIVEN, eval_config=str(tmp_path / "sets.yaml"))
    assert config.evaluation.has_eval_sets and not RolloutConfig.of(**GIVEN).evaluation.has_eval_sets
    with pytest.raises(ConfigError, match=r"sets\.yaml does not exist"):
        read_eval_sets(config)
    (tmp_path / "sets.yaml").write_text("eval: {datasets: {a: {path: x}}}")
    assert places(read_eval_sets(config)) == [("a", "x")]


def test_what_goes_wrong_with_a_set_is_told_with_its_name(sets):
    (one,) = sets(eval_prompt_data=("aime", "x"))
    with pytest.raises(DataError, match=r"^held-out set aime: it broke$"), one.named():
        raise DataError("it broke")


def test_an_error_of_any_form_gets_the_sets_name(sets):
    (one,) = sets(eval_prompt_data=("sums", "sums.jsonl"))
    with pytest.raises(HttpError, match=r"^held-out set sums: GET .*broken$") as caught, one.named():
        raise HttpError("GET", "http://tool", 500, "broken")
    assert caught.value.status == 500


EVERY_KEY = {
    "n_samples_per_eval_prompt": 16,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": -1,
    "max_prompt_len": 100,
    "max_response_len": 200,
    "max_context_len": 300,
    "min_new_tokens": 0,
    "stop": ["\n", "END"],
    "stop_token_ids": [7, 8],
    "skip_special_tokens": False,
    "input_key": "question",
    "label_key": "answer",
    "metadata_key": "extra",
    "tool_key": "functions",
    "apply_chat_template": True,
    "apply_chat_template_kwargs": {"enable_thinking": False},
    "custom_generate_function_path": "own.py:generate",
    "custom_rm_path": "own.py:score",
    "custom_rm_kwargs": {"model": "m"},
    "group_rm": True,
    "reward_key": "acc",
    "metadata_overrides": {"source": "aime", "levels": [1, None]},
    "rm_type": "math",
    "rm_url": "http://h",
}


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "sets.yaml"
        path.write_text(text, encoding="utf-8")
        return read_eval_config(str(path))

    return read


def test_every_key_can_stand_in_a_set_and_in_the_defaults(read):
    assert EVERY_KEY.keys() | {"name", "path"} == KEYS.keys()
    entry = {"name": "aime", "path": "a.jsonl", **EVERY_KEY}
    given = read(yaml.safe_dump({"eval": {"defaults": EVERY_KEY, "datasets": [entry]}}))
    (one,) = given.sets
    assert given.defaults.items() <= one.items()
    assert (one["name"], one["path"], one["temperature"], one["stop"]) == ("aime", "a.jsonl", 0.0, ("\n", "END"))
    assert isinstance(one["temperature"], float)
    assert one["apply_chat_template_kwargs"] == '{"enable_thinking": false}'  # as its flag has it


def test_a_list_and_a_mapping_say_the_same(read):
    as_list = read("eval: {datasets: [{name: a, path: 1.jsonl, stop: x}, {name: b, path: 2.jsonl}]}")
    as_mapping = read("eval:\n  datasets:\n    a: {path: 1.jsonl, stop: [x]}\n    b:\n      path: 2.jsonl\n")
    assert as_list == as_mapping
    assert [one["name"] for one in as_list.sets] == ["a", "b"]


def test_what_yaml_can_share_is_shared(read):
    given = read("eval:\n  datasets:\n    a: &a {path: 1.jsonl, top_k: 5, top_p: 0.5}\n    b: {<<: *a, top_k: 6}\n")
    assert given.sets[1] == {"name": "b", "path": "1.jsonl", "top_k": 6, "top_p": 0.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ": the file must be a mapping of keys to values, got null"),
        ("a: [", ", line 1: invalid YAML: "),
        ("eval: {}\neval: {}", ", line 2: invalid YAML: the key eval is there twice"),
        ("eval: {datasets: {a: {path: x}, a: {path: y}}}", ", line 1: invalid YAML: the key a is there twice"),
        ("? [a]\n: b", ", line 1: invalid YAML: found unhashable key"),
        ("eval: !!python/object/apply:os.getcwd []", ", line 1: invalid YAML: "),
        ("[" * 1000, ", line 1: invalid YAML: brackets are nested too deeply"),
        ("{}", " has no key eval; write eval: {datasets: [{name: …, path: …}]}"),
        ("evals: {}", ": the key evals is unknown; did you mean eval?"),
        ("eval: {dataset: []}", ": eval: the key dataset is unknown; did you mean datasets?"),
        ("eval: [a]", ': eval must be a mapping of keys to values, got ["a"]'),
        ("eval: {defaults: {}}", ": eval needs datasets: a list of {name: …, path: …}, or a mapping by name"),
        ("eval: {datasets: {}}", ": eval needs datasets"),
        ("eval: {datasets: a.jsonl}", ": eval needs datasets"),
    ],
)
def test_a_file_of_another_form_is_told_in_a_line(read, tmp_path, text, words):
    with pytest.raises(ConfigError) as told:
        read(text)
    assert str(told.value).startswith(f"--eval-config {tmp_path / 'sets.yaml'}{words}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("datasets", "words"),
    [
        ("[a.jsonl]", 'entry 1 of datasets must be a mapping of keys to values, got "a.jsonl"'),
        ("{a: x.jsonl}", 'set a must be a mapping of keys to values, got "x.jsonl"'),
        ("[{path: x}]", "entry 1 of datasets has no name; give one"),
        ("[{name: a, path: x}, {name: b}]", "entry 2 of datasets has no path; give one"),
        ("{a: {name: b, path: x}}", "set a: name is given twice; leave it out, the key before it is the name"),
        ("{2024: {path: x}}", "set 2024: name 2024 must be a text that is not empty; put it in quotes"),
        ("{a: {path: x, temprature: 1}}", "set a: the key temprature is unknown; did you mean temperature?"),
        ("{a: {path: x, xyz: 1}}", "set a: the key xyz is unknown; there are apply_chat_template, "),
        ("{a: {path: }}", "set a: path null must be a text"),
        ("{a: {path: x, n_samples_per_eval_prompt: 0}}", "set a: n_samples_per_eval_prompt 0 must be a whole number"),
        ("{a: {path: x, n_samples_per_eval_prompt: 2.0}}", "n_samples_per_eval_prompt 2.0 must be a whole number"),
        ("{a: {path: x, max_response_len: true}}", "max_response_len true must be a whole number, 1 or more"),
        ("{a: {path: x, max_context_len: 1e3}}", 'max_context_len "1e3" must be a whole number, 1 or more'),
        ("{a: {path: x, max_prompt_len: -1}}", "max_prompt_len -1 must be a whole number, 1 or more"),
        ("{a: {path: x, min_new_tokens: -1}}", "min_new_tokens -1 must be a whole number, 0 or more"),
        ("{a: {path: x, temperature: hot}}", 'temperature "hot" must be a number, 0 (greedy) or more'),
        ("{a: {path: x, temperature: -0.1}}", "temperature -0.1 must be a number, 0 (greedy) or more"),
        ("{a: {path: x, temperature: .nan}}", "temperature NaN must be a number"),
        ("{a: {path: x, temperature: .inf}}", "temperature Infinity must be a number"),
        ("{a: {path: x, top_p: 0}}", "top_p 0 must be a number above 0 and at most 1"),
        ("{a: {path: x, top_p: 1.01}}", "top_p 1.01 must be a number above 0 and at most 1"),
        ("{a: {path: x, top_k: 0}}", "top_k 0 must be a whole number, 1 or more, or -1 to leave no token out"),
        ("{a: {path: x, stop: ['a', '']}}", 'stop ["a", ""] must be a list of texts that are not empty, or one of'),
        ("{a: {path: x, stop: 5}}", "stop 5 must be a list of texts"),
        ("{a: {path: x, stop_token_ids: [-1]}}", "stop_token_ids [-1] must be a list of token ids, which count from 0"),
        ("{a: {path: x, apply_chat_template: 'yes'}}", 'apply_chat_template "yes" must be true or false'),
        ("{a: {path: x, group_rm: 1}}", "group_rm 1 must be true or false"),
        ("{a: {path: x, metadata_overrides: [1]}}", "metadata_overrides [1] must be a mapping of what JSON can hold"),
        ("{a: {path: x, metadata_overrides: {day: 2024-01-01}}}", 'metadata_overrides {"day": "2024-01-01"} must be'),
        ("{a: {path: x, metadata_overrides: {1: a}}}", "metadata_overrides"),
        ("{a: {path: x, metadata_overrides: {a: .nan}}}", "metadata_overrides"),
        ("{a: {path: x, custom_rm_kwargs: a}}", 'custom_rm_kwargs "a" must be a mapping'),
        ("{a: {path: x, apply_chat_template_kwargs: '{}'}}", "apply_chat_template_kwargs"),
        ("{a: {path: x, rm_type: null}}", "set a: rm_type null must be a text that is not empty"),
    ],
)
def test_a_bad_entry_is_told_by_file_set_and_key(read, tmp_path, datasets, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as told:
        read(f"eval: {{datasets: {datasets}}}")
    assert str(told.value).startswith(f"{tmp_path / 'sets.yaml'}: ")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ("{name: a}", "defaults: the key name is unknown"),
        ("{path: a}", "defaults: the key path is unknown"),
        ("{top_p: 2}", "defaults: top_p 2 must be a number above 0 and at most 1"),
        ("[a]", 'defaults must be a mapping of keys to values, got ["a"]'),
    ],
)
def test_bad_defaults(read, defaults, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(f"eval: {{defaults: {defaults}, datasets: {{a: {{path: x}}}}}}")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"--eval-config .*none\.yaml does not exist"):
        read_eval_config(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_eval_config(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"eval: \xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml cannot be read: .* in UTF-8"):
        read_eval_config(str(tmp_path / "latin.yaml"))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_a_value_is_taken_or_refused_in_words_of_its_own(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value.yaml"
    for key in KEYS.keys() - {"name", "path"}:
        path.write_text(yaml.safe_dump({"eval": {"datasets": {"a": {"path": "x", key: value}}}}))
        try:
            read_eval_config(str(path))
        except ConfigError as error:
            assert f"set a: {key} " in str(error) and " must be " in str(error)
