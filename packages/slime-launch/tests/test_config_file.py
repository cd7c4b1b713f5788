"""The file of --config, where each value came from, and what is written down of it."""

import pytest

from slime_core.errors import ConfigError
from slime_launch.config_file import with_config
from slime_launch.flags import parse_train
from support.config_files import as_file


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
