"""The file of --config, where each value came from, and what is written down of it."""

import dataclasses
import json
import platform
import sys

import pytest
import torch

import slime_launch.megatron_flags
from slime_core.errors import ConfigError
from slime_launch.config_file import with_config
from slime_launch.flags import parse_train
from slime_launch.preflight import Checked
from slime_launch.redact import HIDDEN, without_secrets
from slime_launch.resolved import FILE_NAME, installed, packages, write_resolved
from slime_launch.resume import StartWeights
from slime_launch.train import with_facts


def as_file(flags, path):
    """The flags of a command as a YAML file; JSON is YAML."""
    path.write_text(
        json.dumps({name.removeprefix("--").replace("-", "_"): value or True for name, value in flags.items()})
    )
    return str(path)


def test_a_file_gives_the_same_settings_as_words_and_the_command_line_wins(flags, to_words, tmp_path):
    file = as_file(flags | {"--lr": "2e-5"}, tmp_path / "run.yaml")
    settings = parse_train(["--config", file, "--lr", "1e-5"])
    words = parse_train([*to_words(flags), "--lr", "1e-5"])
    assert settings.flags() == words.flags() | {"config": file}
    assert settings.origins["lr"] == "command line"
    assert settings.origins["num_rollout"] == "config file"
    assert "seed" not in settings.origins


def test_forms_of_values(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "lr = 1e-6\nnum_rollout = 3\ncolocate = true\nuse-opd = false\nrollout-top-k = -1\n"
        'eval-prompt-data = [["a", "1.jsonl"], ["b", "2.jsonl"]]\napply_chat_template_kwargs = {thinking = false}\n'
    )
    assert with_config([f"--config={file}"]).from_file == [
        "--lr=1e-6", "--num-rollout=3", "--colocate", "--use-opd=false", "--rollout-top-k=-1",
        "--eval-prompt-data", "a", "1.jsonl", "b", "2.jsonl", '--apply-chat-template-kwargs={"thinking": false}',
    ]  # fmt: skip
    assert with_config(["--lr", "1"]).words == ["--lr", "1"]


VALUES = [
    # a value in TOML and in YAML (None: the format has no such value), and what --NAME=… has of it
    ("1e-6", "1e-6", "lr", "1e-6"),
    ('"1e-6"', '"1e-6"', "lr", "1e-6"),
    ("1.10", "1.10", "wandb-group", "1.10"),
    (None, "010", "seed", "010"),
    (None, "007", "input-key", "007"),
    (None, "1:30", "input-key", "1:30"),
    (None, "2026-11-27", "wandb-group", "2026-11-27"),
    ('"2026-11-27"', '"2026-11-27"', "wandb-group", "2026-11-27"),
    ('"null"', '"null"', "input-key", "null"),
    ('"true"', '"true"', "input-key", "true"),
    ("1_000", "1_000", "seed", ("1000", "1_000")),
    ("-1", "-1", "rollout-top-k", "-1"),
    ('""', '""', "input-key", ""),
    ("{a = 1, b = [true, 0.5]}", "{a: 1, b: [true, 0.5]}", "custom-rm-kwargs", '{"a": 1, "b": [true, 0.5]}'),
]


@pytest.mark.parametrize(("toml", "yaml", "name", "text"), VALUES)
def test_a_value_is_read_as_on_the_command_line(toml, yaml, name, text, tmp_path):
    texts = (text, text) if isinstance(text, str) else text
    for form, separator, value, expected in (("toml", " =", toml, texts[0]), ("yaml", ":", yaml, texts[1])):
        if value is not None:
            (tmp_path / f"run.{form}").write_text(f"{name}{separator} {value}\n")
            assert with_config(["--config", str(tmp_path / f"run.{form}")]).from_file == [f"--{name}={expected}"]


def test_a_whole_number_with_a_zero_in_front_is_that_of_the_command_line(flags, tmp_path, to_words):
    (tmp_path / "run.yaml").write_text("seed: 010\nlr: 1e-6\n")
    settings = parse_train([*to_words(flags), "--config", str(tmp_path / "run.yaml")])
    assert (settings.megatron.seed, settings.megatron.lr) == (10, 1e-6)


def test_null_and_an_empty_list_leave_a_flag_out(flags, tmp_path, to_words):
    plain = parse_train(to_words(flags)).flags()
    for name, text in {
        "run.yaml": "lr: null\nseed: ~\nrollout-stop: []\ncolocate:\n", "run.toml": "rollout-stop = []\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
        settings = parse_train([*to_words(flags), "--config", str(tmp_path / name)])
        assert settings.flags() == plain | {"config": str(tmp_path / name)}
        assert "rollout_stop" not in settings.origins


def test_values_of_a_list_may_begin_with_dashes(flags, tmp_path, to_words):
    (tmp_path / "run.toml").write_text('rollout-stop = ["---", "a", "-x", "b", "c", "--lr"]\n')
    settings = parse_train([*to_words(flags), "--config", str(tmp_path / "run.toml")])
    assert settings.rollout.sampling.rollout_stop == ("---", "a", "-x", "b", "c", "--lr")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = true", "lr true in the run file must be a number"),
        ("save = false", "save false in the run file must be a text; leave it out .* put false or off or no in quotes"),
        ("rollout-stop = false", "rollout-stop false in the run file must be a list"),
        ("loss-type = false", "loss-type false in the run file must be one of policy_loss"),
        ("lr = []", "lr \\[\\] must be a number; to leave it open, leave it out"),
        ("rollout-stop = [true]", "rollout-stop True cannot be the value of a flag; .* put a text in quotes"),
        ("lr = [1, 2]", "unexpected '2' after --lr"),
        ('lr = "none"', "--lr: 'none' is not a number"),
        ("wandb-group = 2026-11-27", "wandb-group datetime.date.* put a text in quotes"),
        ("num_rollout = 3\nnum-rollout = 4", "has num-rollout twice, as num-rollout, too; give it once"),
        ("colocate = 1", "--colocate=1 must be true or false; --colocate alone is true"),
    ],
)
def test_a_value_that_is_none_of_the_flag_is_refused_by_name(text, message, flags, tmp_path, to_words):
    name = text.partition(" ")[0].replace("_", "-")
    words = to_words({flag: value for flag, value in flags.items() if flag != f"--{name}"})
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_train([*words, "--config", str(tmp_path / "run.toml")])


TABLES = [
    # a run file in TOML and in YAML, and the keys that are named
    ("[optimizer]\nlr = 1e-5", "optimizer:\n  lr: 1e-5", "optimizer.lr is in a table"),
    ("train.lr = 1e-6", "train: {lr: 1e-6}", "train.lr is in a table"),
    ("[train]\n[train.optim]\nlr = 1e-6", "train: {optim: {lr: 1e-6}}", "train.optim.lr is in a table"),
    ("[[train]]\nlr = 1e-6", "train: [{lr: 1e-6}]", "train.lr is in a table"),
    ("[train]\nday = 1979-05-27", "train: {day: 1979-05-27}", "train.day is in a table"),
    ("[optimizer]", "optimizer: {}", "optimizer is in a table"),
    ("lr = {a = 1}", "lr: {a: 1}", "lr.a is in a table"),
    ("[load]\nstep = 1", "load: {step: 1}", "load.step is in a table"),
    ("[colocate]\nnow = true", "colocate: {now: true}", "colocate.now is in a table"),
    (
        "[rollout]\na = 1\nb = 2\nc = 3\n[train]\nd = 4\ne = 5\nf = 6",
        "rollout: {a: 1, b: 2, c: 3}\ntrain: {d: 4, e: 5, f: 6}",
        "rollout.a, rollout.b, rollout.c, train.d, 2 more are in a table",
    ),
]


@pytest.mark.parametrize(("toml", "yaml", "named"), TABLES)
def test_flags_in_tables_are_one_error_that_names_them(toml, yaml, named, tmp_path):
    for form, text in (("toml", toml), ("yaml", yaml)):
        path = tmp_path / f"run.{form}"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            parse_train(["--config", str(path)])
        assert str(caught.value) == (
            f"--config {path}: {named}, and tables (sections, nested keys) are not read; write a flag on each line, "
            "such as `lr = 1e-6` in TOML or `lr: 1e-6` in YAML, at the top of the file"
        )


def test_a_flag_of_json_takes_a_table(tmp_path, flags, to_words):
    (tmp_path / "run.toml").write_text(
        '[train-env-vars]\nA = "b"\n[apply-chat-template-kwargs]\nenable_thinking = false\n[sglang-log-level]\na = 1\n'
    )
    settings = parse_train([*to_words(flags), "--apply-chat-template", "--config", str(tmp_path / "run.toml")])
    assert settings.cluster.train_environment == {"A": "b"}
    assert settings.rollout.data.apply_chat_template_kwargs == '{"enable_thinking": false}'
    assert settings.engine.sglang_args["log-level"] == '{"a": 1}'


def test_what_the_command_line_says_replaces_a_table(tmp_path, flags, to_words):
    (tmp_path / "run.toml").write_text("[lr]\nstart = 1\n")
    assert parse_train([*to_words(flags), "--config", str(tmp_path / "run.toml"), "--lr", "2"]).megatron.lr == 2


def test_an_unknown_name_is_answered_as_a_flag_is(flags, tmp_path):
    file = as_file(flags | {"--num-rolout": "3"}, tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="unknown flag --num-rolout; did you mean --num-rollout"):
        parse_train(["--config", file])
    (tmp_path / "dotted.yaml").write_text("train.num_rollout: 3\n")
    with pytest.raises(ConfigError, match=r"unknown flag --train\.num-rollout; did you mean --num-rollout\?"):
        parse_train(["--config", str(tmp_path / "dotted.yaml")])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no.toml", None, "no.toml does not exist"),
        ("run.toml", "lr = ", "cannot be read"),
        ("run.yaml", "[1]", "holds no flags"),
        ("run.yaml", "lr: 1\nlr: 2", "line 2: invalid YAML: the key lr is there twice"),
        ("run.json", "{}", "must end in .toml, .yaml or .yml"),
        ("run.toml", "lr = 1979-05-27", "cannot be the value of a flag"),
        ("run.toml", 'config = "other.toml"', "names another file"),
    ],
)
def test_a_file_that_cannot_be_used(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        with_config(["--config", str(tmp_path / name)])


def a_checked(settings):
    return Checked(
        settings=settings, shape=None, manifest=None, weights=StartWeights(load="l", ref_load="r"), overrides={},
        topology=None, num_engines=1,
    )  # fmt: skip


def test_what_is_written_has_values_origins_and_no_secrets(flags, to_words, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef-secret")
    monkeypatch.setenv("SLIME_TEST_VALUE", "here 0123456789abcdef-secret there")
    file = as_file({"--lr": "2e-5"}, tmp_path / "run.yaml")
    words = [*to_words({name: value for name, value in flags.items() if name != "--global-batch-size"})]
    settings = parse_train([*words, "--config", file, "--rm-url", "http://me:hunter22@h:1/x", "--rm-type", "remote_rm"])
    checked = a_checked(settings)
    write_resolved(checked, tmp_path)
    text = (tmp_path / FILE_NAME).read_text()
    write_resolved(dataclasses.replace(checked, packages=packages(settings)), tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == text
    text = (tmp_path / FILE_NAME).read_text()
    rows = json.loads(text)["settings"]
    assert rows["lr"] == {"value": 2e-5, "origin": "config file"}
    assert rows["num_rollout"] == {"value": 2, "origin": "command line"}
    assert rows["global_batch_size"] == {"value": 8, "origin": "derived"}
    assert rows["seed"]["origin"] == "default"
    assert rows["rm_url"]["value"] == f"http://{HIDDEN}@h:1/x"
    assert "abcdef-secret" not in text
    assert "hunter22" not in text
    assert json.loads(text)["packages"] == installed(sys.executable)


def test_what_is_written_is_the_environment_of_the_command_and_not_what_ray_adds(
    flags, to_words, tmp_path, monkeypatch
):
    for name in ("RAY_AUTH_MODE", "SLIME_TEST_VALUE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLIME_TEST_VALUE", "1")
    settings = parse_train([*to_words(flags)])
    monkeypatch.setattr(slime_launch.megatron_flags, "argument_notes", lambda *_: [])  # which needs a model
    checked = with_facts(a_checked(settings))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    write_resolved(checked, tmp_path)
    environment = json.loads((tmp_path / FILE_NAME).read_text())["environment"]
    assert environment["SLIME_TEST_VALUE"] == "1" and "RAY_AUTH_MODE" not in environment


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--no-colocate", "--rollout-num-gpus", "1"], (False, False, True)),
        (["--colocate"], (True, True, True)),
        (["--colocate", "--no-offload-train", "--no-rollout-skip-special-tokens"], (False, True, False)),
        (["--no-colocate", "--rollout-num-gpus", "1", "--offload"], (True, True, True)),
    ],
)
def test_switches_that_are_on_by_default_are_written_as_they_are_in_effect(words, expected, flags, to_words, tmp_path):
    write_resolved(a_checked(parse_train([*to_words(flags), *words])), tmp_path)
    rows = json.loads((tmp_path / FILE_NAME).read_text())["settings"]
    names = ("offload_train", "offload_rollout", "rollout_skip_special_tokens")
    assert tuple(rows[name]["value"] for name in names) == expected


def test_versions_of_an_interpreter_that_is_here(tmp_path):
    found = installed(sys.executable)
    assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    assert installed(str(tmp_path / "python")) is None and installed("/bin/false") is None


def test_secrets_are_known_by_name_by_form_and_by_the_environment():
    values = {
        "wandb_key": "abc", "sglang_api_key": "k", "input_key": "prompt", "max_tokens_per_gpu": 9,
        "train_env_vars": '{"OPENAI_API_KEY": "sk-x", "A": "b"}', "note": "hf_0123456789abcdefXYZ", "plain": "text",
        "url": "http://h/x?api_key=12345&y=1", "list": ["Bearer zzzz", "fine"], "empty_token": None,
    }  # fmt: skip
    assert without_secrets(values, {}) == {
        "wandb_key": HIDDEN, "sglang_api_key": HIDDEN, "input_key": "prompt", "max_tokens_per_gpu": 9,
        "train_env_vars": f'{{"OPENAI_API_KEY": "{HIDDEN}", "A": "b"}}', "note": HIDDEN, "plain": "text",
        "url": f"http://h/x?api_key={HIDDEN}&y=1", "list": [f"Bearer {HIDDEN}", "fine"], "empty_token": None,
    }  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "a = " + "[" * 100_000, "nested too deeply"),
        ("a.toml", "a = " + "9" * 5000, "cannot be read: .*4300 digits"),
        ("a.toml", "a = 0x" + "f" * 5000, "a cannot be read: .*4300 digits"),
        ("a.toml", "# " + "x" * 2**20, "cannot be read: .*at most 524,288"),
        ("a.yaml", "a: {!!binary aGk= : 1}", "a is not what JSON holds"),
    ],
    ids=range(5),
)
def test_what_no_command_line_can_have_is_refused(name, text, problem, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^--config .*{name}.*{problem}"):
        with_config(["--config", str(tmp_path / name)])
