"""The trainer's settings, under Megatron's own flag names, checked when they are built. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_core.flags import Config, flag

LR_DECAY_STYLES = ("constant", "linear", "cosine")
RECOMPUTE_GRANULARITIES = ("full", "selective")
RECOMPUTE_METHODS = ("uniform", "block")
OPTIMIZERS = ("adam",)
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
CKPT_FORMATS = ("torch_dist",)
MAX_SEED = 2**32 - 1  # NumPy's
_USE_TP = "use --tensor-model-parallel-size"
_DENSE = "the supported models have no experts"
_EXACT = "log-probs of the engine and of the trainer would differ"


def _only(value: float, help: str, advice: str) -> Any:
    """A flag of Megatron's that has one value here."""
    return flag(value, help=help, least=value, most=value, advice=advice)


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(Config):
    """How the model is trained: parallelism, optimizer, checkpoints.

    Flags that many Megatron command lines carry, and that say what is so here anyway, are accepted; their help says
    so. A value that would change something is refused.

    Raises:
        ConfigError: A value, or a combination of values, cannot work; the message says which and what to do.
    """

    tensor_model_parallel_size: int = flag(1, help="ranks that share each layer's weights", least=1, may_change=True)
    pipeline_model_parallel_size: int = _only(1, "ranks that share the stack of layers; 1 is supported now", _USE_TP)
    context_parallel_size: int = _only(1, "ranks that share a sequence; 1 is supported now", _USE_TP)
    expert_model_parallel_size: int = _only(1, "ranks that share a layer's experts; 1 is supported now", _DENSE)
    expert_tensor_parallel_size: int = _only(1, "ranks that share an expert's weights; 1 is supported now", _DENSE)
    sequence_parallel: bool = flag(
        False,
        help="split norms and residuals over the tensor-parallel ranks too; one rank has nothing to split",
        may_change=True,
    )
    micro_batch_size: int = flag(
        1, unit="samples", help="samples per forward and backward pass of one rank", least=1, may_change=True
    )
    global_batch_size: int | None = flag(
        None,
        unit="samples",
        help="samples per optimizer step over all ranks; all of a rollout's, in equal steps, unless given",
        least=1,
    )
    use_dynamic_batch_size: bool = flag(
        False, help="limit a micro-batch by --max-tokens-per-gpu instead of --micro-batch-size"
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        unit="tokens",
        help="most tokens in a micro-batch of one rank; a longer sample gets one to itself",
        least=1,
    )
    balance_by_flops: bool = flag(
        False, help="balance ranks and micro-batches by operations, in which long sequences weigh more, not by tokens"
    )
    balance_data: bool = flag(False, help="no effect: the work is always balanced over the data-parallel ranks")
    share_prompts: bool = flag(
        False,
        help="compute the prompt that a group's samples share once per micro-batch; the gradients are the same",
        may_change=True,
    )

    bf16: bool = flag(False, help="compute in bfloat16, with fp32 master weights and gradients; without it, fp32")
    recompute_granularity: str | None = flag(
        None,
        choices=RECOMPUTE_GRANULARITIES,
        help="what the backward pass computes again instead of keeping it",
        may_change=True,
    )
    recompute_method: str | None = flag(
        None, choices=RECOMPUTE_METHODS, help="which layers a full recomputation covers", may_change=True
    )
    recompute_num_layers: int | None = flag(
        None, unit="layers", help="layers per block of a full recomputation", least=1, may_change=True
    )
    recompute_activations: bool = flag(False, help="the same as --recompute-granularity selective", may_change=True)

    optimizer: str = flag("adam", choices=OPTIMIZERS, help="adam is AdamW: the weight decay is decoupled")
    lr: float = flag(1e-6, help="peak learning rate", least=0)
    min_lr: float = flag(0.0, help="learning rate at the end of a linear or cosine decay", least=0)
    lr_decay_style: str = flag("constant", choices=LR_DECAY_STYLES, help="course of the learning rate after warm-up")
    lr_warmup_iters: int = flag(
        0, unit="steps", help="optimizer steps of linear warm-up; the first has the rate --lr-warmup-init", least=0
    )
    lr_warmup_fraction: float | None = flag(
        None, help="warm-up as a part of --lr-decay-iters, below 1", least=0, below=1
    )
    lr_warmup_init: float = flag(0.0, help="learning rate of the first step of a warm-up", least=0)
    lr_decay_iters: int | None = flag(
        None,
        unit="steps",
        help="optimizer steps after which the rate is --min-lr; a constant rate has no decay",
        least=1,
    )
    weight_decay: float = flag(0.01, help="decoupled weight decay of matrices; vectors get none", least=0)
    adam_beta1: float = flag(0.9, help="Adam's decay rate of the mean gradient", least=0, below=1)
    adam_beta2: float = flag(0.999, help="Adam's decay rate of the mean squared gradient", least=0, below=1)
    adam_eps: float = flag(
        1e-8,
        help="term added to Adam's denominator",
        above=0,
        advice="where a gradient is 0, Adam divides by it; 1e-8 is usual",
    )
    clip_grad: float = flag(1.0, help="largest norm of the global gradient; 0 for no clipping", least=0)
    use_distributed_optimizer: bool = flag(False, help="split the optimizer's state over the data-parallel ranks")
    seed: int = flag(
        1234, help="seed of everything random: initial weights, dropout, the samples drawn", least=0, most=MAX_SEED
    )

    load: str | None = flag(None, metavar="DIR", help="checkpoint to start from: of an earlier run, or a converted one")
    ref_load: str | None = flag(None, metavar="DIR", help="checkpoint of the reference model; --load's unless given")
    save: str | None = flag(None, metavar="DIR", help="directory that checkpoints are written to", may_change=True)
    save_interval: int | None = flag(
        None, unit="rollouts", help="rollouts between two checkpoints", least=1, may_change=True
    )
    no_save_optim: bool = flag(False, help="leave the optimizer's state out of checkpoints; they cannot be resumed")
    ckpt_format: str = flag(
        "torch_dist", choices=CKPT_FORMATS, help="format of checkpoints; slime-convert makes others"
    )

    update_weight_buffer_size: int = flag(
        512 * 2**20, unit="bytes", help="largest bucket of a weight sync", least=1, may_change=True
    )
    distributed_timeout_minutes: int = flag(
        10, unit="minutes", help="how long a rank waits for the others", least=1, may_change=True
    )
    trainer_threads: int | None = flag(
        None,
        unit="threads",
        help="CPU threads per rank; the launcher shares out the cores unless given",
        least=1,
        may_change=True,
    )

    attention_dropout: float = _only(
        0.0, "dropout of attention weights; only 0 is supported (Megatron has 0.1)", _EXACT
    )
    hidden_dropout: float = _only(0.0, "dropout of hidden states; only 0 is supported (Megatron has 0.1)", _EXACT)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, help="no effect: gradients are accumulated and reduced in fp32 always", may_change=True
    )
    attention_softmax_in_fp32: bool = flag(
        False, help="no effect: attention's softmax is computed in fp32 always", may_change=True
    )
    no_gradient_accumulation_fusion: bool = flag(
        False, help="no effect: gradient accumulation is never fused", may_change=True
    )
    attention_backend: str = flag(
        "auto",
        choices=ATTENTION_BACKENDS,
        help="no effect: the attention over packed rows is slime's own",
        may_change=True,
    )

    @property
    def recompute(self) -> str | None:
        """The granularity of recomputation, from either of the two flags that say it."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    @property
    def splits_sequences(self) -> bool:
        """Whether sequence parallelism has ranks to split over. Megatron refuses it on one."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def lr_warmup_steps(self) -> float:
        """Optimizer steps of warm-up, from either of the two flags that say it. Need not be whole."""
        if self.lr_warmup_fraction is None or self.lr_decay_iters is None:
            return self.lr_warmup_iters
        return self.lr_warmup_fraction * self.lr_decay_iters

    def contradictions(self) -> Iterator[str]:
        """Settings that need, repeat or undo each other."""
        yield from self._learning_rate_contradictions()
        if self.use_dynamic_batch_size != (self.max_tokens_per_gpu is not None):
            yield ("--use-dynamic-batch-size and --max-tokens-per-gpu, its limit, go together; give both or none")
        if self.save_interval is not None and self.save is None:
            yield f"--save-interval {self.save_interval} needs --save, the directory to write to"
        if self.recompute_activations and self.recompute_granularity == "full":
            yield (
                "--recompute-activations means --recompute-granularity selective, but full is given; "
                "leave one of the two out"
            )
        full = self.recompute_granularity == "full"
        if full != (self.recompute_method is not None) or full != (self.recompute_num_layers is not None):
            yield (
                "--recompute-granularity full, --recompute-method and --recompute-num-layers go together; "
                "give all three or none"
            )

    def _learning_rate_contradictions(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"--min-lr {self.min_lr} is above --lr {self.lr}; give at most {self.lr}"
        if self.lr_warmup_init > self.lr:
            yield f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}; give at most {self.lr}"
        if self.lr_decay_style != "constant" and self.lr_decay_iters is None:
            yield (f"--lr-decay-style {self.lr_decay_style} needs --lr-decay-iters, the number of optimizer steps")
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            yield (f"--lr-warmup-iters {self.lr_warmup_iters} must be less than --lr-decay-iters {self.lr_decay_iters}")
        if self.lr_warmup_fraction is None:
            return
        if self.lr_decay_iters is None:
            yield "--lr-warmup-fraction needs --lr-decay-iters, the number of steps that it is a part of"
        if self.lr_warmup_iters:
            yield (
                f"--lr-warmup-fraction {self.lr_warmup_fraction} and --lr-warmup-iters {self.lr_warmup_iters} both say "
                "how long the warm-up is; give one of them"
            )

    def data_parallel_size(self, world_size: int) -> int:
        """How many data-parallel ranks ``world_size`` processes make.

        Raises:
            ConfigError: ``world_size`` is not a multiple of the model-parallel size.
        """
        model_parallel = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % model_parallel:
            raise ConfigError(
                f"{world_size} trainer ranks are not a multiple of --tensor-model-parallel-size "
                f"{self.tensor_model_parallel_size}; change one of them"
            )
        return world_size // model_parallel

    def check_fits(self, shape: ModelShape) -> None:
        """Check that the model can be trained and divides over the tensor-parallel ranks. Can be asked before a run.

        Raises:
            ConfigError: It has experts or other parts that :mod:`slime_megatron.model` lacks, or a size does not
                divide; the message says which, and which numbers of ranks would do.
        """
        if shape.num_experts is not None:
            raise ConfigError(
                f"the model is of the family {shape.family} and has {shape.num_experts} experts in a layer, which "
                "cannot be trained yet; give --hf-checkpoint a dense model (slime-convert converts both kinds)"
            )
        others = [
            f"{field.name} {getattr(shape, field.name)}"
            for field in fields(shape)
            if field.default is not MISSING
            and field.name not in _TRAINED
            and getattr(shape, field.name) != field.default
        ]
        if others:
            raise ConfigError(
                f"the model is of the family {shape.family} and has {', '.join(others)}, which cannot be trained yet; "
                "give --hf-checkpoint a model without (slime-convert converts both kinds)"
            )
        sizes = {
            "num_attention_heads": shape.num_attention_heads,
            "num_query_groups": shape.num_query_groups,
            "ffn_hidden_size": shape.ffn_hidden_size,
        }
        for name, size in sizes.items():
            if size % self.tensor_model_parallel_size:
                limit = shape.num_query_groups
                fitting = [str(n) for n in range(1, limit + 1) if all(s % n == 0 for s in sizes.values())]
                raise ConfigError(
                    f"--tensor-model-parallel-size {self.tensor_model_parallel_size} does not divide the model's "
                    f"{name} {size}; allowed: {', '.join(fitting)}"
                )


# What a shape may say and the model here does; all else must be as it is by default.
_TRAINED = {
    *("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor"),
    *("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position_embeddings"),
    *("norm_epsilon", "add_qkv_bias", "qk_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    "untie_embeddings_and_output_weights",
}
