"""The settings reject what cannot work, and can be read without torch."""

import subprocess
import sys

import pytest

from slime_core.errors import ConfigError
from slime_core.flags import flag_specs
from slime_megatron.settings.config import MegatronConfig


def test_flags_carry_megatron_names_and_defaults():
    specs = {spec.name: spec for spec in flag_specs(MegatronConfig)}
    assert specs["--tensor-model-parallel-size"].default == 1
    assert (specs["--share-prompts"].default, specs["--share-prompts"].bare) == ("auto", "on")
    assert specs["--recompute-activations"].is_switch
    assert specs["--clip-grad"].default == 1.0
    assert specs["--seed"].default == 1234
    assert all(spec.help for spec in specs.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"virtual_pipeline_model_parallel_size": 2},
            "-parallel-size 2 has no effect without --pipeline-model-parallel-size; give",
        ),
        ({"virtual_pipeline_model_parallel_size": 1}, "--virtual-pipeline-model-parallel-size 1 must be 2 or more"),
        (
            {"context_parallel_size": 2, "share_prompts": "on"},
            "--share-prompts on does not work with --context-parallel-size 2, which cuts",
        ),
        ({"share_prompts": True}, "--share-prompts True is unknown; allowed: auto, on, off"),
        (
            {"profile": True, "profile_step_start": 3, "profile_step_end": 3},
            "--profile-step-end 3 must be above --profile-step-start 3",
        ),
        ({"profile_ranks": (0, -1)}, "--profile-ranks -1 must be 0 or more"),
        (
            {"save_debug_train_data": "a/{rollout_id}"},
            "--save-debug-train-data a/{rollout_id} must hold {rollout_id} and {rank}",
        ),
        ({"overlap_param_gather": "on"}, "needs --use-distributed-optimizer and --overlap-grad-reduce"),
        (
            {"use_distributed_optimizer": True, "overlap_param_gather": "on", "overlap_grad_reduce": "off"},
            "needs --use-distributed-optimizer and --overlap-grad-reduce",
        ),
        ({"overlap_grad_reduce": "maybe"}, "--overlap-grad-reduce maybe is unknown; allowed: auto, on, off"),
        (
            {"share_prompts": "on", "megatron_args": {"moe_aux_loss_coeff": 0.1}},
            "--share-prompts on does not work with moe_aux_loss_coeff 0.1, which counts a shared prompt once",
        ),
        ({"recompute_modules": ("mlp",)}, "--recompute-modules mlp has no effect without --recompute-granularity sel"),
        ({"recompute_modules": ("attention",)}, "--recompute-modules attention is unknown; allowed: core_attn, mlp"),
        (
            {
                "recompute_activations": True,
                "recompute_modules": ("core_attn", "layernorm"),
                "transformer_impl": "local",
            },
            "--recompute-modules layernorm works with Transformer Engine's layers alone, and local ones are built here",
        ),
        (
            {"recompute_activations": True, "recompute_modules": ("mla_up_proj",), "lora_rank": 1, "lora_alpha": 1.0},
            "--recompute-modules mla_up_proj works with Transformer Engine's layers alone",
        ),
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1 must be 0; log-probs"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1 must be 0;"),
        ({"optimizer": "sgd"}, "--optimizer sgd is unknown; allowed: adam"),
        ({"ckpt_format": "zarr"}, "allowed: torch_dist, torch; leave it out: torch_dist is written"),
        ({"lora_alpha": 16.0}, "--lora-alpha 16.0 has no effect without --lora-rank"),
        ({"lora_target_modules": ("q_proj",)}, "--lora-target-modules q_proj has no effect without --lora-rank"),
        ({"lr": float("nan")}, "--lr nan must be a finite number, 0 or more"),
        ({"clip_grad": float("inf")}, "--clip-grad inf must be a finite number, 0 or more"),
        ({"adam_eps": 0.0}, "--adam-eps 0.0 must be above 0"),
        ({"seed": -1}, "--seed -1 must be between 0 and 4294967295"),
        ({"seed": 2**32}, "--seed 4294967296 must be between 0 and 4294967295$"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0 must be 1 or more"),
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 0}, "--max-tokens-per-gpu 0 must be 1 or more"),
        ({"use_dynamic_batch_size": True}, "--use-dynamic-batch-size needs --max-tokens-per-gpu, its limit"),
        ({"max_tokens_per_gpu": 4096}, "--max-tokens-per-gpu 4096 has no effect without --use-dynamic-batch-size"),
        ({"lr": -1.0}, "--lr -1.0 must be 0 or more"),
        ({"lr_decay_style": "step"}, "constant, linear, cosine"),
        ({"lr_decay_style": "cosine"}, "--lr-decay-iters"),
        ({"lr_decay_style": "linear", "lr_decay_iters": 5, "lr_warmup_iters": 5}, "less than --lr-decay-iters 5"),
        ({"min_lr": 1.0}, "--min-lr 1.0 is above --lr 1e-06; give at most 1e-06"),
        ({"save_interval": 1}, "--save-interval 1 has no effect without --save"),
        ({"adam_beta2": 1.0}, "--adam-beta2 1.0 must be at least 0 and below 1"),
        ({"recompute_granularity": "full"}, "full needs --recompute-method and --recompute-num-layers"),
        ({"recompute_num_layers": 1}, "--recompute-num-layers 1 has no effect without --recompute-granularity full"),
        (
            {
                "recompute_activations": True,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            "--recompute-activations means --recompute-granularity selective, but full is given",
        ),
        ({"lr_warmup_init": 1.0}, "--lr-warmup-init 1.0 is above --lr"),
        ({"lr_warmup_fraction": 1.0, "lr_decay_iters": 5}, "--lr-warmup-fraction 1.0 must be at least 0 and below 1"),
        ({"lr_warmup_fraction": 0.5}, "needs --lr-decay-iters"),
        (
            {"lr_warmup_fraction": 0.5, "lr_decay_iters": 9, "lr_warmup_iters": 2},
            "--lr-warmup-fraction 0.5 and --lr-warmup-iters 2 both say",
        ),
    ],
)
def test_impossible_settings_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        MegatronConfig(**values)


def test_recompute_activations_is_megatrons_short_form():
    assert MegatronConfig().recompute is None
    assert MegatronConfig(recompute_activations=True).recompute == "selective"
    assert MegatronConfig(recompute_activations=True, recompute_granularity="selective").recompute == "selective"
    full = MegatronConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    assert full.recompute == "full"


def test_overlap_is_for_gpus_unless_it_is_asked_for():
    def overlaps(on_gpu, **values):
        config = MegatronConfig(**values)
        return config.overlaps_gradients(on_gpu), config.overlaps_weights(on_gpu)

    distributed = {"use_distributed_optimizer": True}
    assert overlaps(True) == (True, False)
    assert overlaps(True, **distributed) == (True, True)
    assert overlaps(True, **distributed, overlap_grad_reduce="off") == (False, False)
    assert overlaps(True, **distributed, overlap_param_gather="off") == (True, False)
    assert overlaps(False, **distributed) == (False, False)
    assert overlaps(False, **distributed, overlap_param_gather="on") == (True, True)


def test_sequence_parallelism_over_one_rank_splits_nothing():
    assert not MegatronConfig(sequence_parallel=True).splits_sequences
    assert MegatronConfig(sequence_parallel=True, tensor_model_parallel_size=2).splits_sequences


def test_warm_up_is_a_number_of_steps_or_a_part_of_the_decay():
    assert MegatronConfig(lr_warmup_iters=3).lr_warmup_steps == 3
    assert MegatronConfig(lr_warmup_fraction=0.25, lr_decay_iters=10).lr_warmup_steps == 2.5


def test_what_is_so_anyway_may_be_said():
    """The optimizer and miscellaneous flags of an ordinary Megatron command line."""
    MegatronConfig(
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        optimizer="adam",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        no_gradient_accumulation_fusion=True,
        ckpt_format="torch_dist",
    )


def test_data_parallel_size():
    assert MegatronConfig(tensor_model_parallel_size=2).data_parallel_size(4) == 2
    with pytest.raises(ConfigError, match=r"3 trainer .* --tensor-model-parallel-size 2; give 2 or 4 ranks"):
        MegatronConfig(tensor_model_parallel_size=2).data_parallel_size(3)
    config = MegatronConfig(pipeline_model_parallel_size=2, context_parallel_size=3, expert_model_parallel_size=4)
    assert config.data_parallel_size(24) == 4
    sizes = "--pipeline-model-parallel-size 2 × --context-parallel-size 3"
    with pytest.raises(ConfigError, match=rf"8 trainer .* {sizes}; give 24 ranks .*, or change one of these sizes"):
        config.data_parallel_size(8)
    with pytest.raises(
        ConfigError, match=r"30 trainer .* --expert-model-parallel-size 4 × --pipe.* 2; give 24 or 48 ranks"
    ):
        config.data_parallel_size(30)
    with pytest.raises(
        ConfigError, match=r"12 trainer .* --expert-model-parallel-size 4 × --pipeline-.*-size 2; give 24 ranks"
    ):
        config.data_parallel_size(12)


def test_the_flag_table_needs_no_torch():
    code = "import sys, slime_megatron.settings.config; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_adapters_have_pefts_alpha_unless_one_is_given():
    from peft import LoraConfig

    assert MegatronConfig(lora_rank=4).lora == MegatronConfig(lora_rank=4, lora_alpha=LoraConfig().lora_alpha).lora
    assert MegatronConfig(lora_rank=4, lora_alpha=2.0).lora.scale == 0.5 and MegatronConfig().lora is None


def test_the_format_of_checkpoints_may_be_said_as_megatron_has_it():
    assert MegatronConfig(ckpt_format="torch").ckpt_format == "torch"
