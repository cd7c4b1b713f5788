import subprocess
import sys

import pytest

from slime_launch.config import Settings
from slime_launch.errors import FlagError
from slime_launch.flags import command, parse_train, sglang_python
from slime_launch.train import train
from slime_rollout.eval_sets import read_eval_sets

CLI = [sys.executable, "-m", "slime_launch.cli"]


def test_typed_records_per_package(flags, to_words):
    flags |= {"--lr": "2e-5", "--num-layers": "2", "--use-kl-loss": None, "--kl-loss-coef": "0.001", "--swiglu": None}
    settings = parse_train(to_words(flags))
    assert isinstance(settings, Settings)
    assert settings.megatron.lr == 2e-5
    assert settings.algorithm.use_kl_loss
    assert settings.algorithm.kl_loss_coef == 0.001
    assert settings.rollout.selection.rollout_batch_size == 4
    assert settings.cluster.colocate
    assert settings.run.num_rollout == 2
    assert settings.shape == {"num_layers": 2, "swiglu": True}


def test_held_out_sets_come_from_repeated_flags_and_a_file(flags, to_words, tmp_path):
    (tmp_path / "sets.yaml").write_text("eval: {datasets: {c: {path: 3.jsonl, temperature: 0}}}")
    words = ["--eval-prompt-data", "a", "1.jsonl", "--eval-temperature", "0.5", "--eval-prompt-data", "b", "2.jsonl"]
    settings = parse_train([*to_words(flags), *words, "--eval-config", str(tmp_path / "sets.yaml")])
    assert [(held_out.name, held_out.path, held_out.temperature) for held_out in read_eval_sets(settings.rollout)] == [
        ("a", "1.jsonl", 0.5),
        ("b", "2.jsonl", 0.5),
        ("c", "3.jsonl", 0.0),
    ]
    assert settings.flags()["eval_prompt_data"] == ["a", "1.jsonl", "b", "2.jsonl"]


def test_sglang_flags_reach_the_engine_under_their_own_names(flags, to_words):
    settings = parse_train([*to_words(flags), "--sglang-mem-fraction-static", "0.8", "--sglang-sleep-on-idle"])
    assert dict(settings.engine.sglang_args) == {"mem-fraction-static": "0.8", "sleep-on-idle": True}


def test_code_that_comes_with_a_model_is_trusted_by_one_flag(flags, to_words):
    settings = parse_train([*to_words(flags), "--trust-remote-code"])
    assert settings.rollout.data.trust_remote_code
    assert dict(settings.engine.sglang_args) == {"trust-remote-code": True}


def test_an_sglang_flag_with_several_values(flags, to_words):
    settings = parse_train([*to_words(flags), "--sglang-cuda-graph-bs", "1", "2", "--sglang-cuda-graph-bs", "4"])
    assert dict(settings.engine.sglang_args) == {"cuda-graph-bs": ("1", "2", "4")}


def test_an_sglang_flag_that_slime_sets_itself(flags, to_words):
    with pytest.raises(FlagError, match="--sglang-port cannot be given: slime chooses free ports"):
        parse_train([*to_words(flags), "--sglang-port", "1"])


def test_the_routers_flags_reach_it_under_its_own_names(flags, to_words):
    words = [*to_words(flags), "--router-cache-threshold", "0.5", "--router-disable-retries"]
    settings = parse_train(words)
    assert settings.engine.router_args == {"cache-threshold": 0.5, "disable-retries": True}
    assert settings.flags()["router_cache_threshold"] == 0.5
    assert not parse_train(to_words(flags)).engine.router_args


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--router-port", "1"], "--router-port cannot be given: use --sglang-router-port"),
        (
            ["--router-api-key", "x"],
            "--router-api-key cannot be given: the router takes the key of engines; use --sglang-api-key",
        ),
        (["--router-cache-treshold", "1"], "did you mean --router-cache-threshold"),
        (["--router-queue-size", "x"], "--router-queue-size: 'x' is not a whole number"),
        (["--router-log-level", "loud"], "--router-log-level"),
    ],
)
def test_what_is_wrong_with_the_routers_flags(flags, to_words, words, text):
    with pytest.raises(FlagError, match=text):
        parse_train([*to_words(flags), *words])


@pytest.mark.parametrize("word", ["--help-router", "--help-megatron"])
def test_the_flags_of_others_are_listed(word, capsys):
    assert train([word]) == 0
    listed = capsys.readouterr().out
    assert "--router-cache-threshold VALUE" in listed or "--moe-z-loss-coeff VALUE" in listed


def test_slimes_own_flags_need_no_sglang(flags, to_words, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    assert parse_train([*to_words(flags), "--sglang-router-port", "4000"]).engine.sglang_router_port == 4000


def test_a_mistyped_sglang_flag_is_caught(flags, to_words):
    with pytest.raises(FlagError, match="did you mean --sglang-mem-fraction-static"):
        parse_train([*to_words(flags), "--sglang-mem-fraction-statik", "0.8"])


def test_no_two_flags_have_the_same_name():
    groups, _ = command(["--seq-length", "1", "--router-queue-size", "1", "--sglang-mem-fraction-static", "1"])
    names = [spec.name for group in groups for spec in group.flags]
    dests = [spec.dest for group in groups for spec in group.flags]
    assert len(set(names)) == len(names)
    assert len(set(dests)) == len(dests)


def test_sglang_python_is_read_before_the_parser_exists():
    assert sglang_python(["--lr", "1"]) is None
    assert sglang_python(["--sglang-python", "/a/python", "--lr", "1"]) == "/a/python"
    assert sglang_python(["--sglang-python=/a/python"]) == "/a/python"
    assert sglang_python(["--sglang-python"]) is None


def test_help_groups_flags():
    done = subprocess.run([*CLI, "train", "--help"], capture_output=True, text=True, timeout=240, check=True)
    for title in ("run:", "cluster:", "evaluation:", "algorithm:", "Megatron: training:", "Megatron: model shape:"):
        assert f"\n{title}\n" in done.stdout
    for flag in (
        "--num-layers INT",
        "--tensor-model-parallel-size INT",
        "--sglang-router-port INT",
        "--kl-loss-coef FLOAT",
    ):
        assert flag in done.stdout
    assert "[prompts; required]" in done.stdout
    assert "TensorBoard's files unless --disable-tensorboard is given" in done.stdout


def test_help_imports_neither_torch_nor_ray():
    program = (
        "import sys; from slime_launch.cli import main; main(['train', '--help']);"
        "heavy = {'torch', 'ray', 'transformers', 'rich', 'matplotlib', 'tensorboard', 'sglang'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
