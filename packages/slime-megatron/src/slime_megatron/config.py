"""The trainer's settings, under Megatron's own flag names, checked when they are built. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_core.flags import flag

LR_DECAY_STYLES = ("constant", "linear", "cosine")
RECOMPUTE_GRANULARITIES = ("full", "selective")
RECOMPUTE_METHODS = ("uniform", "block")

_POSITIVE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "save_interval",
    "distributed_timeout_minutes",
    "recompute_num_layers",
    "update_weight_buffer_size",
    "trainer_threads",
    "lr_decay_iters",
)
_NOT_NEGATIVE = ("lr", "min_lr", "lr_warmup_iters", "weight_decay", "adam_eps", "clip_grad")


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """How the model is trained: parallelism, optimizer, checkpoints.

    Raises:
        ConfigError: A value, or a combination of values, cannot work; the message says which and what to do.
    """

    tensor_model_parallel_size: int = flag(1, help="ranks that share each layer's weights")
    pipeline_model_parallel_size: int = flag(1, help="ranks that share the stack of layers; 1 is supported now")
    sequence_parallel: bool = flag(False, help="split norms and residuals over the tensor-parallel ranks too")
    micro_batch_size: int = flag(1, unit="samples", help="samples per forward and backward pass of one rank")
    global_batch_size: int | None = flag(None, unit="samples", help="samples per optimizer step over all ranks")
    share_prompts: bool = flag(
        False, help="compute the prompt that a group's samples share once per micro-batch; the gradients are the same"
    )

    bf16: bool = flag(False, help="compute in bfloat16, with fp32 master weights and gradients; without it, fp32")
    recompute_granularity: str | None = flag(
        None, choices=RECOMPUTE_GRANULARITIES, help="what the backward pass computes again instead of keeping it"
    )
    recompute_method: str | None = flag(
        None, choices=RECOMPUTE_METHODS, help="which layers a full recomputation covers"
    )
    recompute_num_layers: int | None = flag(None, unit="layers", help="layers per block of a full recomputation")

    lr: float = flag(1e-6, help="peak learning rate")
    min_lr: float = flag(0.0, help="learning rate at the end of the decay")
    lr_decay_style: str = flag("constant", choices=LR_DECAY_STYLES, help="course of the learning rate after warm-up")
    lr_warmup_iters: int = flag(0, unit="steps", help="optimizer steps of linear warm-up from zero")
    lr_decay_iters: int | None = flag(None, unit="steps", help="optimizer steps until --min-lr is reached")
    weight_decay: float = flag(0.01, help="decoupled weight decay of matrices; vectors get none")
    adam_beta1: float = flag(0.9, help="Adam's decay rate of the mean gradient")
    adam_beta2: float = flag(0.999, help="Adam's decay rate of the mean squared gradient")
    adam_eps: float = flag(1e-8, help="term added to Adam's denominator")
    clip_grad: float = flag(1.0, help="largest norm of the global gradient; 0 for no clipping")
    use_distributed_optimizer: bool = flag(False, help="split the optimizer's state over the data-parallel ranks")
    seed: int = flag(1234, help="seed of everything random in training")

    load: str | None = flag(None, metavar="DIR", help="checkpoint to start from: of an earlier run, or a converted one")
    ref_load: str | None = flag(None, metavar="DIR", help="checkpoint of the reference model; --load's unless given")
    save: str | None = flag(None, metavar="DIR", help="directory that checkpoints are written to")
    save_interval: int | None = flag(None, unit="rollouts", help="rollouts between two checkpoints")
    no_save_optim: bool = flag(False, help="leave the optimizer's state out of checkpoints; they cannot be resumed")

    update_weight_buffer_size: int = flag(512 * 2**20, unit="bytes", help="largest bucket of a weight sync")
    distributed_timeout_minutes: int = flag(10, unit="minutes", help="how long a rank waits for the others")
    trainer_threads: int | None = flag(
        None, unit="threads", help="CPU threads per rank; torch's own choice unless given"
    )

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} {value} must be at least 1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} is negative; give 0 or more")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} must be at least 0 and less than 1")
        choices = {
            "lr_decay_style": LR_DECAY_STYLES,
            "recompute_granularity": (None, *RECOMPUTE_GRANULARITIES),
            "recompute_method": (None, *RECOMPUTE_METHODS),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                names = ", ".join(choice for choice in allowed if choice)
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} is unknown; allowed: {names}")

    def _check_combinations(self) -> None:
        if self.pipeline_model_parallel_size != 1:
            raise ConfigError(
                f"--pipeline-model-parallel-size {self.pipeline_model_parallel_size} is not supported yet; "
                "leave it at 1 and use --tensor-model-parallel-size"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("--sequence-parallel needs --tensor-model-parallel-size 2 or more; it is 1")
        if self.lr_decay_style != "constant" and self.lr_decay_iters is None:
            raise ConfigError(
                f"--lr-decay-style {self.lr_decay_style} needs --lr-decay-iters, the number of optimizer steps"
            )
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            raise ConfigError(
                f"--lr-warmup-iters {self.lr_warmup_iters} must be less than --lr-decay-iters {self.lr_decay_iters}"
            )
        if self.min_lr > self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} is above --lr {self.lr}; give at most {self.lr}")
        if self.save_interval is not None and self.save is None:
            raise ConfigError(f"--save-interval {self.save_interval} needs --save, the directory to write to")
        full = self.recompute_granularity == "full"
        if full != (self.recompute_method is not None) or full != (self.recompute_num_layers is not None):
            raise ConfigError(
                "--recompute-granularity full, --recompute-method and --recompute-num-layers go together; "
                "give all three or none"
            )

    def data_parallel_size(self, world_size: int) -> int:
        """How many data-parallel ranks ``world_size`` processes make.

        Raises:
            ConfigError: ``world_size`` is no multiple of the model-parallel size.
        """
        model_parallel = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % model_parallel:
            raise ConfigError(
                f"{world_size} trainer ranks are no multiple of --tensor-model-parallel-size "
                f"{self.tensor_model_parallel_size}; change one of them"
            )
        return world_size // model_parallel

    def check_fits(self, shape: ModelShape) -> None:
        """Check that the model divides over the tensor-parallel ranks. Can be asked before a run starts.

        Raises:
            ConfigError: It does not; the message says which size does not, and which numbers of ranks would do.
        """
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
