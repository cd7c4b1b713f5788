"""A command of another launcher is the same wherever it is read, is valid in a shell and in a file, and plans."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from slime_launch.answers import Outcome
from slime_launch.cli import main
from slime_launch.flags import known_sglang_specs, train_groups
from slime_launch.migrate import as_command, as_toml, migrated
from slime_launch.redact import is_secret
from slime_launch.shell_words import TrainCommand, read_command
from slime_launch.translate import items
from slime_rollout.engine.sglang_flags import CONTROLLED


def test_the_kinds_of_sglangs_flags_are_known_without_one():
    texts = {spec.name: spec for spec in known_sglang_specs()}
    typed = {spec.name: spec.type for spec in known_sglang_specs(typed=True)}
    assert len(texts) > 500 and texts["--sglang-mem-fraction-static"].type is str
    assert typed["--sglang-mem-fraction-static"] is float and typed["--sglang-enable-metrics"] is bool
    assert not {name.removeprefix("--sglang-") for name in texts} & CONTROLLED.keys()


@pytest.mark.parametrize("name", sorted(spec.name for group in train_groups() for spec in group.flags))
def test_every_flag_of_ours_stays(name):
    """Also those whose names begin as SGLang's and the router's do, such as --sglang-config and --router-policy."""
    if is_secret(name) or name in ("--config", "--use-wandb"):
        return
    done = migrated(TrainCommand("train.py", [name], []))
    assert [became.outcome for became in done.flags] == [Outcome.SAME] and done.words[0] == name


def test_a_topology_and_flags_of_sglangs_are_kept_wherever_it_is_asked(tmp_path, monkeypatch):
    words = ["--sglang-config", "engines.yaml", "--sglang-mem-fraction-static", "0.7", "--sglang-enable-metrics"]
    (tmp_path / "engines.yaml").write_text("nothing: of use")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slime_rollout.engine.python.importable_in", lambda *_: pytest.fail("SGLang is looked for"))
    done = migrated(TrainCommand("train.py", words, []))
    assert {became.outcome for became in done.flags} == {Outcome.SAME} and done.words[:5] == words
    assert tomllib.loads(as_toml(words)) == {
        "sglang-config": "engines.yaml", "sglang-mem-fraction-static": 0.7, "sglang-enable-metrics": True,
    }  # fmt: skip
    unknown = migrated(TrainCommand("train.py", ["--sglang-mem-fraction-statik", "0.7"], []))
    assert unknown.flags[0].outcome is Outcome.UNKNOWN and "--sglang-mem-fraction-static" in unknown.flags[0].note


def test_nothing_of_the_working_directory_is_read(tmp_path, monkeypatch):
    script = """source models/tiny.sh
    python train.py --hf-checkpoint hf --model-name qwen3 --prompt-data rows.jsonl --num-epoch 1 ${MODEL_ARGS[@]}"""
    there, away = tmp_path / "there", tmp_path / "away"
    (there / "models").mkdir(parents=True)
    (there / "hf").mkdir()
    away.mkdir()
    (there / "models" / "tiny.sh").write_text("MODEL_ARGS=(--seed 7)\n")
    (there / "hf" / "config.json").write_text('{"model_type": "llama"}')
    (there / "rows.jsonl").write_text('{"prompt": "1"}\n')
    found = []
    for directory in (there, away):
        monkeypatch.chdir(directory)
        found.append(migrated(read_command(script, None)))
    assert found[0] == found[1] and "--seed" not in found[0].words
    assert any("MODEL_ARGS is assigned in no file" in line for line in found[0].open)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('train.py --prompt-data "$HOME/my data/a.jsonl"', '--prompt-data "$HOME/my data/a.jsonl"'),
        ("train.py --prompt-data $HOME/a.jsonl", '--prompt-data "$HOME/a.jsonl"'),
        ('train.py --save "${DIR}/$(date +%s)"', '--save "${DIR}/$(date +%s)"'),
        ("train.py --save '$HOME/a'", "--save '$HOME/a'"),
        ('train.py --save "\\$HOME/a"', "--save '$HOME/a'"),
        ('train.py --save \'$5 `a`\'"$B\\"c"', '--save "\\$5 \\`a\\`$B\\"c"'),
        ("train.py --save it\\'s", "--save 'it'\"'\"'s'"),
    ],
)
def test_what_a_shell_expands_stays_what_a_shell_expands(text, line):
    done = migrated(read_command(f"python {text}", None))
    assert line in [part.strip() for part in as_command(done).split("\\\n")]
    expands = {"HOME": "/h", "DIR": "/d", "B": "b"}
    words = ["bash", "-c", f"date() {{ echo 1; }}; printf '%s\\n' {as_command(done)[len('slime-launch train') :]}"]
    printed = subprocess.run(words, env=expands, capture_output=True, text=True, check=True).stdout.splitlines()
    theirs = ["bash", "-c", f"date() {{ echo 1; }}; printf '%s\\n' {text.removeprefix('train.py ')}"]
    assert (
        printed[: len(done.flags[0].words)]
        == subprocess.run(theirs, env=expands, capture_output=True, text=True, check=True).stdout.splitlines()
    )


def test_in_a_file_what_a_shell_expands_is_named():
    done = migrated(read_command("python train.py --prompt-data \"$HOME/a\" b --lr $LR --save '$X'", None))
    lines = as_toml(done.words).splitlines()
    assert lines[:3] == [
        'prompt-data = ["$HOME/a", "b"]  # put the value of $HOME: nothing is expanded here',
        'lr = "$LR"  # put the value of $LR: nothing is expanded here',
        'save = "$X"',
    ]
    assert tomllib.loads("\n".join(lines))["save"] == "$X"


@pytest.mark.parametrize("argument", ["$@", '"$@"', "$*", "${@:2}"])
@pytest.mark.parametrize("text", ["train.py --num-epoch 15", "-m verl.trainer.main_ppo trainer.total_epochs=15"])
def test_what_a_script_is_called_with_is_left_out_with_a_line(argument, text):
    done = migrated(read_command(f"python3 {text} {argument}", None))
    place = done.words.index("--num-epoch")
    assert done.words[place + 1] == "15" and "@" not in as_command(done) and "*" not in as_command(done)
    assert any(line.endswith("is left out: add the flags that the script is called with") for line in done.open)


def test_a_variable_behind_a_whole_flag_is_left_out_with_a_line():
    for text in (
        "train.py --lr 1 $MORE",
        "train.py --colocate $MORE",
        "-m verl.trainer.main_ppo trainer.nnodes=1 $MORE",
    ):
        done = migrated(read_command(f"python3 {text}", None))
        assert "MORE" not in as_command(done)
        assert "$MORE is left out: what it holds is known only where the script runs; add that" in done.open
    kept = migrated(read_command("python3 train.py --lr $LR", None))
    assert kept.words[:2] == ["--lr", "$LR"] and any("$LR is known only where" in line for line in kept.open)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("grpo.py", "x = 1\n"),
        ("grpo", "#!/usr/bin/env python3\nx = 1\n"),
        ("grpo.txt", "from trl import GRPOConfig\nconfig = GRPOConfig(learning_rate=1e-6)\n"),
    ],
)
def test_a_python_script_is_refused_as_one(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert f"{name} is a Python script: its settings are made by code" in told and "migrate -- trl grpo" in told


def test_a_file_of_settings_is_not_read():
    done = migrated(TrainCommand("trl grpo", ["--config", "grpo.yaml", "--beta", "0"], []))
    assert done.flags[0].note == "it names a file of settings, which is not read; give them as flags" and not done.runs


def test_numbers_are_numbers_in_a_file():
    words = ["--lr", "2.0e-4", "--adam-eps", "1e-8", "--clip-grad", ".5", "--rollout-top-k", "-1", "--save", "1"]
    text = as_toml(words)
    assert tomllib.loads(text) == {"lr": 2e-4, "adam-eps": 1e-8, "clip-grad": 0.5, "rollout-top-k": -1, "save": "1"}


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["algorithm.adv_estimator=gae"], ["--advantage-estimator", "ppo", "--normalize-advantages"]),
        ([], ["--advantage-estimator", "ppo", "--normalize-advantages", "--eps-clip-c", "3.0", "--value-clip", "0.5"]),
        (["algorithm.adv_estimator=reinforce_plus_plus"], ["reinforce_plus_plus", "--normalize-advantages"]),
        (["actor_rollout_ref.actor.clip_ratio_c=10"], ["--eps-clip-c", "10"]),
        (["actor_rollout_ref.actor.use_kl_loss=True"], ["--kl-loss-coef", "0.001", "--kl-loss-type", "low_var_kl"]),
        ([], ["--rollout-shuffle", "--apply-chat-template", "--num-epoch", "30", "--critic-lr", "1e-5"]),
        (["algorithm.rollout_correction.rollout_is=token"], ["--use-mis", "--mis-level", "token"]),
    ],
)
def test_what_verl_does_without_being_asked(words, becomes):
    done = migrated(TrainCommand("verl.trainer.main_ppo", words, []))
    assert [word for word in becomes if word not in done.words] == []
    assert done.words.count("--eps-clip-c") == done.words.count("--normalize-advantages") == 1


def test_verls_defaults_that_do_not_apply_are_left_out():
    words = ["algorithm.adv_estimator=grpo", "trainer.total_training_steps=5", "actor_rollout_ref.actor.kl_loss_coef=1"]
    done = migrated(TrainCommand("verl.trainer.main_ppo", words, []))
    without = {
        "--kl-loss-coef",
        "--kl-loss-type",
        "--num-epoch",
        "--critic-lr",
        "--value-clip",
        "--normalize-advantages",
    }
    assert not without & {*done.words} and "--max-tokens-per-gpu" not in done.words


def test_verls_bounds_of_rejection_are_said_to_be_of_the_inverse_ratio():
    names = ["rollout_rs=token_k1", "rollout_rs_threshold=2.0", "rollout_rs_threshold_lower=0.5"]
    words = [f"algorithm.rollout_correction.{name}" for name in names]
    done = migrated(TrainCommand("verl.trainer.main_ppo", words, []))
    assert "slime the inverse, so 1 / verl's upper bound is the lower one" in done.flags[0].note
    assert all("of the inverse ratio" in became.note for became in done.flags[1:]) and not done.runs


def test_settings_of_programs_that_train_on_rows_have_their_own_meaning():
    done = migrated(read_command("trl dpo --beta 0.2 --per_device_train_batch_size 4 --max_length 512", None))
    assert done.words[:6] == ["--dpo-beta", "0.2", "--micro-batch-size", "8", "--rollout-max-context-len", "512"]
    assert "--use-kl-loss" not in done.words and done.words[-2:] == ["--loss-type", "dpo_loss"]
    sft = migrated(read_command("trl sft --per_device_train_batch_size 4", None))
    assert sft.words[:2] == ["--micro-batch-size", "4"]
    assert [sft.words[sft.words.index(name) + 1] for name in ("--lr", "--num-epoch")] == ["2e-5", "3"]
    opened = migrated(
        read_command("deepspeed --module openrlhf.cli.train_sft --max_epochs 3 --train_batch_size 8", None)
    )
    assert opened.words[:4] == ["--num-epoch", "3", "--rollout-batch-size", "8"]


def test_what_others_decide_without_a_flag_is_said():
    def said(text):
        return " ".join(migrated(read_command(text, None)).open)

    assert "give --min-lr" in said("python3 -m openrlhf.cli.train_ppo_ray --train.batch_size 8")
    assert "TRL corrects for its engine" in said("trl grpo --use_vllm") and "TRL corrects" not in said(
        "trl grpo --bf16"
    )
    assert "data_source" in said("python3 -m verl.trainer.main_ppo trainer.nnodes=1")
    assert "data_source" not in said("python3 -m verl.trainer.main_ppo custom_reward_function.path=a.py")


PUBLIC = json.loads((Path(__file__).parent / "data" / "public_scripts.json").read_text())


def written(script):
    """A script with these flags, laid out as its launcher's scripts are."""
    flags = [
        f"{name}={json.dumps(value)}" if not name.startswith("--") else f'{name} "{value}"' if value else name
        for name, value in script["flags"].items()
    ]
    command = " \\\n   ".join([script["entry"], *flags, *([script["tail"]] if "tail" in script else [])])
    if script.get("document"):  # whose quotes stay quotes
        plain = command.replace('"', "")
        return f"read -r -d '' words <<EOF\n{plain}\nEOF\n    # --ipo\ntorchrun --nproc_per_node 8 -m $words\n"
    return f"set -x\n{'' if script['entry'].startswith('trl') else 'python3 -m '}{command}\n"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_script_becomes_a_command_that_plans_or_whose_lines_are_listed(
    name, workspace, tokenizer, monkeypatch, capsys
):
    done = migrated(read_command(written(PUBLIC[name]), None))
    assert [became.item.name for became in done.flags if became.outcome is Outcome.UNKNOWN] == []
    stopped = [became.item.name for became in done.flags if became.outcome in (Outcome.NOT_BUILT, Outcome.REFUSED)]
    assert stopped == PUBLIC[name].get("not built", [])
    monkeypatch.chdir(workspace)
    (workspace / "hf" / "model.safetensors").unlink()
    rows = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    row = {"prompt": rows[:1], "context_messages": rows[:1], "messages": rows, "label": "2"}
    row |= {"chosen": rows, "rejected": [rows[0], {"role": "assistant", "content": "3"}]}
    config = json.loads((workspace / "hf" / "config.json").read_text())
    (workspace / "hf" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    (workspace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4096)))
    words = done.words
    for flag, values in (("--hf-checkpoint", ["hf"]), ("--prompt-data", ["rows.jsonl"])):
        item = next(item for item in items(words) if item.name == flag)
        place = words.index(flag)
        words = [*words[:place], flag, *values, *words[place + 1 + len(item.values) :]]
    words = ["rows.jsonl" if word.startswith("$HOME") else word for word in words]
    code = main(["plan", "--device", "h100", "--json", *words])
    told = json.loads(capsys.readouterr().out)["problems"]
    assert [line for line in told if line not in done.open] == []
    assert code == (2 if told else 0)
