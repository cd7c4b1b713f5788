"""Scripts of other launchers are read without being run, and become commands of ours."""

import tomllib
from pathlib import Path

import pytest

from slime_launch.answers import Outcome
from slime_launch.cli import main
from slime_launch.config_file import with_config
from slime_launch.migrate import as_toml, migrated
from slime_launch.shell_words import TrainCommand, read_command

SCRIPT = """#!/bin/bash
# for rerun the task
pkill -9 sglang; sleep 3
set -ex
export NUM_GPUS=${NUM_GPUS:-8}
NVLINK_COUNT=$(nvidia-smi | grep -o "NVLink" | wc -l)
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
BASE=/data
CKPT_ARGS=(
   --hf-checkpoint ${BASE}/hf   # the model
   #--load /other
   --load "$BASE/my dist/"
)
ROLLOUT_ARGS=( --prompt-data $BASE/a.jsonl --num-rollout 3000
   --apply-chat-template-kwargs '{"enable_thinking": false}'
)
ROLLOUT_ARGS+=(--rollout-batch-size 32)
WANDB_ARGS=(
   # --use-wandb
)
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {\\"A\\": \\"1\\"}
}"
if [ "$NVLINK_COUNT" -gt 0 ]; then
    HAS_NVLINK=1
fi
ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node ${NUM_GPUS} \\
   ${MODEL_ARGS[@]} \\
   ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" ${WANDB_ARGS[@]} \\
   --colocate \\
   --no-offload-train ${OTHER[@]} --multimodal-keys '{"image": "images"}'
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text('N=2\nMODEL_ARGS=(\n  --num-layers "$N"\n  --swiglu\n)\n')
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path / "run.sh"


def test_a_script_is_read_with_its_arrays_variables_and_sourced_files(script):
    found = read_command(script.read_text(), script.parent)
    assert found == TrainCommand(
        "train.py",
        [
            "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "8", "--num-layers", "2", "--swiglu",
            "--hf-checkpoint", "/data/hf", "--load", "/data/my", "dist/", "--prompt-data", "/data/a.jsonl",
            "--num-rollout", "3000", "--apply-chat-template-kwargs", '{"enable_thinking": false}',
            "--rollout-batch-size", "32", "--colocate", "--no-offload-train", "--multimodal-keys",
            '{"image": "images"}',
        ],
        ["OTHER"],
    )  # fmt: skip


def outcomes(done):
    return {became.item.name: became.outcome for became in done.flags}


def test_each_flag_of_upstreams_gets_its_outcome(script):
    done = migrated(read_command(script.read_text(), script.parent))
    assert outcomes(done)["--num-rollout"] is Outcome.SAME
    assert outcomes(done)["--no-offload-train"] is Outcome.SAME
    assert outcomes(done)["--multimodal-keys"] is Outcome.NOT_BUILT
    assert not done.runs
    assert "--input-key" in done.words  # upstream's default is another one


def test_verls_settings_become_flags():
    words = [
        "algorithm.adv_estimator=grpo", "data.train_files=/d/train.parquet", "data.train_batch_size=256",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.rollout.n=5",
        "actor_rollout_ref.model.path=/m", "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.name=vllm", "data.val_files=['/d/a.parquet']", "trainer.total_training_steps=100",
        "actor_rollout_ref.actor.use_dynamic_bsz=False", "algorithm.adv_estimator=remax",
    ]  # fmt: skip
    done = migrated(TrainCommand("verl.trainer.main_ppo", words, []))
    assert done.words == [
        "--advantage-estimator", "grpo", "--prompt-data", "/d/train.parquet", "--rollout-batch-size", "256",
        "--global-batch-size", "320", "--n-samples-per-prompt", "5", "--hf-checkpoint", "/m", "--use-kl-loss",
        "--eval-prompt-data", "eval", "/d/a.parquet", "--num-rollout", "100", "--eps-clip-c", "3.0",
        "--kl-loss-coef", "0.001", "--kl-loss-type", "low_var_kl", "--calculate-per-token-loss",
        "--rollout-max-prompt-len", "512", "--rollout-max-response-len", "512", "--rollout-shuffle",
        "--apply-chat-template", "--colocate",
    ]  # fmt: skip
    refused = [became.note for became in done.flags if became.outcome is Outcome.REFUSED]
    assert len(refused) == 1
    assert refused[0].startswith("algorithm.adv_estimator remax is not built")


KL = "algorithm.use_kl_in_reward"


KL_COEF = "algorithm.kl_ctrl.kl_coef"


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ([f"{KL}=True"], ["--kl-coef", "0.001"]),  # verl's default
        ([f"{KL}=True", f"{KL_COEF}=0.02"], ["--kl-coef", "0.02"]),
        ([f"++{KL_COEF}=0.02", f"+{KL}=true"], ["--kl-coef", "0.02"]),
        ([f"{KL}=False", f"{KL_COEF}=0.02", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_penalty=abs"], []),
        ([f"{KL_COEF}=0.02", "algorithm.kl_penalty=k2"], []),
        ([f"{KL}=True", "algorithm.kl_ctrl.type=fixed"], ["--kl-coef", "0.001"]),
        ([f"{KL}=True", "algorithm.kl_penalty=mse"], ["--kl-coef", "0.001", "--kl-loss-type", "k2"]),
        (["actor_rollout_ref.actor.kl_loss_type=low_var_kl"], []),
    ],
)
def test_verls_penalty_in_the_reward(words, becomes):
    done = migrated(TrainCommand("verl.trainer.main_ppo", words, []))
    assert [word for became in done.flags for word in became.words] == becomes and done.runs


def test_verls_adaptive_penalty_and_several_epochs_are_refused():
    words = [f"{KL}=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_penalty=full"]
    words += ["actor_rollout_ref.actor.ppo_epochs=4", "critic.ppo_epochs=1"]
    done = migrated(TrainCommand("verl.trainer.main_ppo", words, []))
    kept, adaptive, full, epochs, once = done.flags
    assert kept.words == ("--kl-coef", "0.001") and once.outcome is Outcome.NO_EFFECT
    assert adaptive.outcome is Outcome.NOT_BUILT and adaptive.note.startswith("the coefficient of the divergence does")
    assert full.note == "algorithm.kl_penalty full is not built; --kl-loss-type has low_var_kl, k1, k2"
    assert "ppo_epochs 4 is not built; allowed: 1 (a rollout is trained on once, in --num-steps-per" in epochs.note


def test_trls_flags_become_ours():
    words = ["--model_name_or_path", "/m", "--learning_rate", "1e-6", "--num_generations", "8", "--bf16", "--use_vllm"]
    done = migrated(read_command(f"trl grpo {' '.join(words)}", None))
    assert done.words == [
        "--hf-checkpoint", "/m", "--lr", "1e-6", "--n-samples-per-prompt", "8", "--bf16", "--calculate-per-token-loss",
        "--lr-decay-style", "linear", "--rollout-max-response-len", "512", "--num-epoch", "3", "--rollout-shuffle",
        "--weight-decay", "0.0", "--colocate",
    ]  # fmt: skip
    assert done.runs
    assert any("missing" in line for line in done.open)


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["--loss_type", "grpo"], []),
        (["--loss_type", "dapo"], ["--calculate-per-token-loss"]),
        (["--beta", "0.04"], ["--use-kl-loss", "--kl-loss-coef", "0.04"]),
        (["--beta", "0"], []),
        (["--scale_rewards", "none"], ["--disable-grpo-std-normalization"]),
        (["--scale_rewards", "group"], []),
        (["--vllm_gpu_memory_utilization", "0.4"], ["--sglang-mem-fraction-static", "0.4"]),
        (["--vllm_importance_sampling_correction"], ["--use-tis"]),
        (["--vllm_importance_sampling_correction", "True"], ["--use-tis"]),
        (["--vllm_importance_sampling_correction", "False"], []),
        (["--no_vllm_importance_sampling_correction"], []),
        (["--mask_truncated_completions", "False"], []),
        (["--importance_sampling_level", "token"], []),
        (["--importance_sampling_level", "sequence"], ["--advantage-estimator", "gspo"]),
        (["--num_iterations", "1"], []),
    ],
)
def test_what_trls_flags_mean(words, becomes):
    done = migrated(TrainCommand("trl grpo", words, []))
    assert list(done.flags[0].words) == becomes and done.runs
    assert done.words.count("--calculate-per-token-loss") == (words != ["--loss_type", "grpo"])


def test_a_loss_of_trls_that_is_not_built():
    done = migrated(TrainCommand("trl grpo", ["--loss_type", "sapo"], []))
    assert done.flags[0].note.startswith("--loss_type sapo is not built; allowed: dapo, bnpo, grpo")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--loss_type", "cispo"], "give --advantage-estimator cispo --calculate-per-token-loss --eps-clip 1 and"),
        (["--loss_type", "dr_grpo"], "give --loss-divisor with the number of --rollout-max-response-len"),
        (["--loss_type", "luspo"], "give --advantage-estimator gspo --loss-divisor 1"),
        (["--mask_truncated_completions"], "give --rollout-sample-filter-path, a function that marks"),
        (["--mask_truncated_completions", "true"], "give --rollout-sample-filter-path, a function that marks"),
        (["--vllm_importance_sampling_mode", "sequence_mask"], "give --use-mis --mis-level sequence --mis-mode mask"),
        (["--num_iterations", "2"], "--num_iterations 2 is not built; allowed: 1 (a rollout is trained on once"),
    ],
)
def test_what_is_to_be_given_in_place_of_trls(words, advice):
    done = migrated(TrainCommand("trl grpo", words, []))
    assert done.flags[0].note.startswith(advice) and not done.flags[0].words and not done.runs


def test_trls_correction_with_its_mode_and_bounds():
    words = ["--vllm_importance_sampling_mode", "token_mask", "--vllm_importance_sampling_clip_max", "3.0"]
    assert "--tis-mode" not in migrated(TrainCommand("trl grpo", words, [])).words
    done = migrated(TrainCommand("trl grpo", [*words, "--vllm_importance_sampling_correction"], []))
    assert done.words[:5] == ["--tis-mode", "icepop", "--tis-clip", "3.0", "--use-tis"]


OPENRLHF = {
    "now": """python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 --vllm.num_engines 4
        --vllm.tensor_parallel_size 2 --train.colocate_all --algo.kl.use_loss --algo.kl.init_coef 1e-3
        --algo.advantage.estimator group_norm --actor.eps_clip_low_high 0.2 0.27 --actor.model_name_or_path m
        --train.batch_size 128 --rollout.batch_size 64 --train.num_episodes 2 --actor.adam.lr 5e-7 --eval.steps -1
        --data.input_key q --ds.zero_stage 3 --train.max_epochs 1 --logger.wandb.key planted0secret1""",
    "before": """python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 8 --vllm_num_engines 4
        --vllm_tensor_parallel_size 2 --colocate_all_models --use_kl_loss --init_kl_coef 1e-3
        --advantage_estimator group_norm --eps_clip_low_high 0.2 0.27 --pretrain m --train_batch_size 128
        --rollout_batch_size 64 --num_episodes 2 --actor_learning_rate 5e-7 --eval_steps -1 --input_key q
        --zero_stage 3 --max_epochs 1 --use_wandb planted0secret1""",
}


@pytest.mark.parametrize("names", OPENRLHF)
def test_openrlhfs_flags_become_ours_by_their_names_of_now_and_before(names):
    done = migrated(read_command(OPENRLHF[names].replace("\n", " "), None))
    assert done.words == [
        "--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "2", "--colocate", "--use-kl-loss",
        "--kl-loss-coef", "1e-3", "--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.27",
        "--hf-checkpoint", "m", "--global-batch-size", "128", "--rollout-batch-size", "64", "--num-epoch", "2",
        "--lr", "5e-7", "--input-key", "q", "--use-wandb", "--adam-beta1", "0.9", "--adam-beta2", "0.95",
        "--weight-decay", "0.0", "--calculate-per-token-loss", "--lr-decay-style", "cosine",
        "--lr-warmup-fraction", "0.03",
    ]  # fmt: skip
    assert done.runs
    assert "planted0secret1" not in str(done)


def test_openrlhfs_engines_beside_the_trainer_a_penalty_in_the_reward_and_ppo():
    words = ["--vllm.num_engines", "4", "--vllm.tensor_parallel_size", "2", "--reward.remote_url", "f.py"]
    words += ["--train.max_epochs", "2", "--actor.policy_loss_type", "gspo", "--actor.loss_agg_mode"]
    done = migrated(TrainCommand("openrlhf.cli.train_ppo_ray", [*words, "seq-mean-token-mean"], []))
    assert done.words[:4] == ["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "2"]
    assert "--colocate" not in done.words and "--calculate-per-token-loss" not in done.words
    for given in (["--kl-coef", "0.01"], ["--advantage-estimator", "ppo", "--normalize-advantages"]):
        place = done.words.index(given[0])
        assert done.words[place : place + len(given)] == given
    found = outcomes(done)
    assert found["--reward.remote_url"] is Outcome.NOT_BUILT and not done.runs
    assert found["--train.max_epochs"] is found["--actor.policy_loss_type"] is Outcome.REFUSED


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["--train.async_enable", "--train.async_queue_size", "4"], ["--async-buffer-size", "4"]),
        (["--async_queue_size", "4", "--async_train"], ["--async-buffer-size", "4"]),
        (["--train.async_enable"], ["--async-buffer-size", "1"]),
        (["--train.async_queue_size", "4"], []),
    ],
)
def test_openrlhfs_queue_is_given_once(words, becomes):
    done = migrated(TrainCommand("openrlhf.cli.train_ppo_ray", words, []))
    assert [word for became in done.flags for word in became.words] == becomes and done.runs


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("trl sft --model m", "sft_loss"),
        ("trl dpo --model m", "dpo_loss"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer optim.lr=1e-5", "sft_loss"),
        ("deepspeed --module openrlhf.cli.train_dpo --model.beta 0.1", "dpo_loss"),
        ("deepspeed --module openrlhf.cli.train_rm --adam.lr 1e-5", "rm_loss"),
    ],
)
def test_training_on_a_data_set_gets_its_loss(text, loss):
    done = migrated(read_command(text, None))
    assert done.words[-2:] == ["--loss-type", loss] and "--colocate" not in done.words


WANDB = ["--use-wandb", "--wandb-project", "p", "--wandb-group", "e", "--max-checkpoints-kept", "3"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("trl", ["--report_to", "wandb", "--run_name", "e", "--save_total_limit", "3"]),
        ("trl", ["--report_to", "tensorboard", "wandb", "--run_name", "e", "--save_total_limit", "3"]),
        (
            "verl.trainer.main_ppo",
            [
                "trainer.logger=['console','wandb']", "trainer.project_name=p", "trainer.experiment_name=e",
                "trainer.max_actor_ckpt_to_keep=3",
            ],
        ),
        (
            "verl.trainer.main_ppo",
            [
                "trainer.logger=[console,wandb]", "trainer.project_name=p", "trainer.experiment_name=e",
                "trainer.max_actor_ckpt_to_keep=3",
            ],
        ),
    ],
)  # fmt: skip
def test_tracking_and_kept_checkpoints_of_others(entry, words):
    done = migrated(TrainCommand(entry, words, []))
    assert done.runs
    wanted = [word for word in WANDB if entry != "trl" or word not in ("--wandb-project", "p")]
    assert done.words[: len(wanted)] == wanted


def test_what_is_for_wandb_alone_is_left_out_where_it_is_not_used():
    words = ["trainer.logger=[console,tensorboard]", "trainer.project_name=p", "trainer.experiment_name=e"]
    done = migrated(TrainCommand("verl.trainer.main_ppo", words, []))
    assert {became.outcome for became in done.flags} == {Outcome.NO_EFFECT} and "--wandb-project" not in done.words
    assert done.flags[1].note == "it is --wandb-project beside --use-wandb, which is not given"
    refused = migrated(TrainCommand("verl.trainer.main_ppo", ["trainer.logger=[console,mlflow]"], []))
    assert refused.flags[0].note == "trainer.logger mlflow is not built; allowed: wandb, console, tensorboard, file"


def test_the_command_prints_the_table_and_a_command(script, capsys):
    assert main(["migrate", str(script)]) == 1
    printed = capsys.readouterr()
    assert "--no-offload-train" in printed.out
    assert "not built" in printed.out
    assert "slime-launch train \\\n    --actor-num-nodes 1" in printed.out
    assert "OTHER is assigned in no file" in printed.err


def test_a_toml_file_has_the_same_words(tmp_path, capsys):
    words = ["--lr", "1e-6", "--num-rollout", "3", "--colocate", "--eval-prompt-data", "a", "1.jsonl"]
    file = tmp_path / "run.toml"
    assert main(["migrate", "--toml", str(file), "--", *words]) == 0
    assert "slime-launch train --config" in capsys.readouterr().out
    assert tomllib.loads(file.read_text()) == {
        "lr": 1e-6, "num-rollout": 3, "colocate": True, "eval-prompt-data": ["a", "1.jsonl"],
    }  # fmt: skip
    assert with_config(["--config", str(file)]).from_file == [
        "--lr=1e-6", "--num-rollout=3", "--colocate", "--eval-prompt-data", "a", "1.jsonl",
    ]  # fmt: skip
    assert as_toml([]) == ""


def test_a_script_that_is_not_there(capsys):
    assert main(["migrate", "no/such/run.sh"]) == 2
    assert "no/such/run.sh does not exist" in capsys.readouterr().err


def test_a_key_is_neither_shown_nor_written_down(tmp_path, capsys):
    words = ["--num-rollout", "1", "--use-wandb", "--wandb-key", "planted0secret1", "--optimizer-cpu-offload"]
    main(["migrate", "--toml", str(tmp_path / "run.toml"), "--", "python3", "train.py", *words])
    main(["migrate", "--", "python3", "train.py", *words])
    shown = "".join(capsys.readouterr())
    assert "planted0secret1" not in shown + (tmp_path / "run.toml").read_text()
    assert "set WANDB_API_KEY" in shown


def test_an_argument_of_megatrons_without_effect_is_called_so():
    done = migrated(TrainCommand("train.py", ["--moe-shared-expert-overlap"], []))
    assert [became.outcome for became in done.flags] == [Outcome.NO_EFFECT]
    assert "--moe-shared-expert-overlap" not in done.words


def test_an_argument_that_is_given_to_megatron_stays():
    done = migrated(TrainCommand("train.py", ["--optimizer-cpu-offload"], []))
    assert [became.outcome for became in done.flags] == [Outcome.SAME] and done.runs
    assert "--optimizer-cpu-offload" in done.words


@pytest.mark.parametrize(
    "command",
    ["trl grpo --model_name_or_path m --lora_r 8", "python -m openrlhf.cli.train_ppo_ray --ds.lora.rank 8"],
)
def test_adapters_have_the_alpha_of_the_launcher_that_they_come_from(command):
    theirs = read_command(command, Path())
    entry, words = theirs.entry, theirs.words
    for more, alpha in (([], "16"), (["--lora_alpha" if "trl" in command else "--ds.lora.alpha", "4"], "4")):
        made = migrated(TrainCommand(entry, [*words, *more], [])).words
        assert made.count("--lora-alpha") == 1 and made[made.index("--lora-alpha") + 1] == alpha
    assert "--lora-alpha" not in migrated(TrainCommand(entry, words[:-2], [])).words


def test_what_is_no_text_is_no_script(script, capsys):
    script.write_bytes(b"\xff" + SCRIPT.encode())
    assert main(["migrate", str(script)]) == 2
    assert "cannot be read as a script" in capsys.readouterr().err


def test_a_sourced_file_that_is_no_text_is_left_out(script, capsys):
    (script.parent / "models" / "tiny.sh").write_bytes(b"\xff")
    assert main(["migrate", str(script)]) == 1
    assert "MODEL_ARGS is assigned in no file that could be read" in capsys.readouterr().err


def test_a_name_that_no_file_can_have_is_left_out(script, capsys):
    script.write_text(f"source {'x' * 5000}\n{SCRIPT}")
    assert main(["migrate", str(script)]) == 1
    assert "--hf-checkpoint /data/hf" in capsys.readouterr().out
