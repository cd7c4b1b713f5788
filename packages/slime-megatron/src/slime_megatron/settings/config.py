"""The trainer's settings, under Megatron's own flag names, checked when they are built. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slime_core.algorithms import loss_that
from slime_core.config import CRITIC, LOG_PROBS, POLICY
from slime_core.errors import ConfigError
from slime_core.flags import flag, template_problem
from slime_core.needs import GENERATES, TRAINERS, UPDATES, given, unless
from slime_megatron.settings.rates import RateConfig
from slime_megatron.settings.trained import Lora, Selection

RECOMPUTE_GRANULARITIES = ("full", "selective")
RECOMPUTE_METHODS = ("uniform", "block")
RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj", "moe_act")
_TE_MODULES = ("layernorm", "mla_up_proj", "moe_act")
AUTO_ON_OFF = ("auto", "on", "off")
TRANSFORMER_IMPLS = ("auto", "local", "transformer_engine")
OPTIMIZERS = ("adam",)
PEFT_ALPHA = 8.0
"""``lora_alpha`` of PEFT's `LoraConfig`, unless it is given."""
CKPT_FORMATS = ("torch_dist", "torch")
MAX_SEED = 2**32 - 1  # NumPy's
FUSED_ROUTERS = "does not work with --moe-router-fusion, whose kernel chooses experts by itself; leave one of them out"
_EXACT = "log-probs of the engine and of the trainer would differ"

CRITIC_TRAINS = (TRAINERS, *CRITIC)
FULL = given("recompute_granularity", "full")
SAVES = (UPDATES, given("save"))
OPTIMIZES = (TRAINERS, UPDATES)


def _only(value: float, help: str, advice: str) -> Any:
    """A flag of Megatron's that has one value here."""
    return flag(value, help=help, least=value, most=value, advice=advice)


def _mode(help: str) -> Any:
    """A flag that is on, off or as the device has it best."""
    return flag("auto", choices=AUTO_ON_OFF, help=help, may_change=True, bare="on")


# Flags of one kind, by when they matter.
_of_steps = partial(flag, needs=OPTIMIZES)
_of_full = partial(flag, may_change=True, needs=FULL)
_of_critic = partial(flag, needs=CRITIC_TRAINS)
_of_saving = partial(flag, may_change=True, needs=SAVES)
_of_profile = partial(flag, may_change=True, needs=given("profile"))
_hook = partial(flag, None, metavar="PATH", may_change=True)


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(RateConfig, needs=TRAINERS):
    """How the model is trained: parallelism, optimizer, checkpoints.

    Flags that many Megatron command lines carry, and that say what is so here anyway, are accepted; their help says
    so. A value that would change something is refused.

    Attributes:
        megatron_args: Megatron's other arguments, by the names of their fields in its configs; only those that were
            given. They are checked, and merged, when a worker starts. They are not flags.

    Raises:
        ConfigError: A value, or a combination of values, cannot work; the message says which and what to do.
    """

    tensor_model_parallel_size: int = flag(1, help="ranks that share each layer's weights", least=1, may_change=True)
    pipeline_model_parallel_size: int = flag(1, help="ranks that share the stack of layers", least=1, may_change=True)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None,
        help="stages of the pipeline that each of its ranks holds",
        least=2,
        may_change=True,
        needs=given("pipeline_model_parallel_size"),
    )
    context_parallel_size: int = flag(1, help="ranks that share each sequence", least=1, may_change=True)
    expert_model_parallel_size: int = flag(1, help="ranks that share each layer's experts", least=1, may_change=True)
    expert_tensor_parallel_size: int | None = flag(
        None,
        help="ranks that share each expert's weights; as many as --tensor-model-parallel-size unless given",
        least=1,
        may_change=True,
    )
    sequence_parallel: bool = flag(
        False,
        help="split norms and residuals over the tensor-parallel ranks too; one rank has nothing to split",
        may_change=True,
        needs=given("tensor_model_parallel_size"),
        harmless=True,
    )
    micro_batch_size: int = flag(
        1,
        unit="samples",
        help="samples per forward and backward pass of one rank",
        least=1,
        may_change=True,
        needs=(TRAINERS, unless("use_dynamic_batch_size")),
        harmless=True,
    )
    global_batch_size: int | None = _of_steps(
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
        needs=given("use_dynamic_batch_size"),
    )
    balance_by_flops: bool = flag(
        False, help="balance ranks and micro-batches by operations, in which long sequences weigh more, not by tokens"
    )
    share_prompts: str = _mode(
        "compute the prompt that a group's samples share, and a beginning that all prompts share, once per "
        "micro-batch; the gradients are the same; auto: where it saves a tenth of the tokens; without a value, on"
    )

    use_routing_replay: bool = flag(
        False,
        help="train with the experts that routers chose where old log-probs were computed (R2); with "
        "--use-rollout-routing-replay with the engine's",
        may_change=True,
        needs=(TRAINERS, *POLICY),
    )

    only_train_params_name_list: tuple[str, ...] | None = _of_steps(
        None,
        metavar="PATTERN",
        help="train only weights in whose Megatron name one of these regular expressions is found",
    )
    freeze_params_name_list: tuple[str, ...] | None = _of_steps(
        None, metavar="PATTERN", help="do not train weights in whose Megatron name one of these is found"
    )
    lora_rank: int | None = flag(None, help="train adapters of this rank (LoRA) instead of the weights", least=1)
    lora_alpha: float | None = flag(
        None,
        help="the adapters' product is multiplied by this over --lora-rank; 8 unless given, as in PEFT",
        above=0,
        needs=given("lora_rank"),
    )
    lora_target_modules: tuple[str, ...] | None = flag(
        None,
        metavar="MODULE",
        help="layers that get adapters: Megatron's names, such as linear_qkv, or Hugging Face's of all that one holds; "
        "every linear layer unless given, but those of routed experts",
        needs=given("lora_rank"),
    )

    bf16: bool = flag(
        False,
        help="compute in bfloat16, with fp32 master weights and gradients; the launcher's default on CUDA",
        needs=(),
    )
    no_use_distributed_optimizer: bool = flag(False, help="keep the optimizer's whole state on every rank, on CUDA too")
    fp32: bool = flag(False, help="compute in fp32 on CUDA, too", may_change=True, needs=())
    transformer_impl: str = flag(
        "auto",
        choices=TRANSFORMER_IMPLS,
        help="the layers: Megatron-core's own, or Transformer Engine's; auto: the latter on CUDA where they are "
        "installed, with --bf16 and without LoRA",
        may_change=True,
    )
    recompute_granularity: str | None = _of_steps(
        None,
        choices=RECOMPUTE_GRANULARITIES,
        help="what the backward pass computes again instead of keeping it",
        may_change=True,
    )
    recompute_method: str | None = _of_full(
        None, choices=RECOMPUTE_METHODS, help="which layers a full recomputation covers"
    )
    recompute_num_layers: int | None = _of_full(
        None, unit="layers", help="layers per block of a full recomputation", least=1
    )
    recompute_activations: bool = _of_steps(
        False, help="the same as --recompute-granularity selective", may_change=True
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        choices=RECOMPUTE_MODULES,
        metavar="MODULE",
        help="what a selective recomputation covers: core_attn unless given, mlp, moe (whole layers of experts), "
        "shared_experts; with Transformer Engine's layers also layernorm, mla_up_proj, moe_act",
        may_change=True,
        needs=given("recompute_granularity", "selective") | given("recompute_activations"),
    )
    deterministic_mode: bool = flag(
        False, help="compute every sum in the same order in each run; slower on a GPU", may_change=True
    )

    optimizer: str = _of_steps("adam", choices=OPTIMIZERS, help="adam is AdamW: weight decay is decoupled")
    weight_decay: float = _of_steps(0.01, help="decoupled weight decay of matrices; vectors get none", least=0)
    adam_beta1: float = _of_steps(0.9, help="Adam's decay rate of the mean gradient", least=0, below=1)
    adam_beta2: float = _of_steps(0.999, help="Adam's decay rate of the mean squared gradient", least=0, below=1)
    adam_eps: float = _of_steps(
        1e-8,
        help="term added to Adam's denominator",
        above=0,
        advice="where a gradient is 0, Adam divides by it; 1e-8 is usual",
    )
    reset_optimizer_states: bool = _of_steps(
        False, help="begin every rollout's steps with Adam's moments and step count at 0", may_change=True
    )
    clip_grad: float = _of_steps(1.0, help="largest global gradient norm; 0 for no clipping", least=0)
    use_distributed_optimizer: bool = flag(
        False, help="split the optimizer's state over the data-parallel ranks; the launcher's default on CUDA"
    )
    overlap_grad_reduce: str = _mode(
        "reduce gradients while others are still computed; auto: on a GPU; without a value, on"
    )
    overlap_param_gather: str = _mode(
        "gather the distributed optimizer's weights while the forward pass runs; auto: on a GPU, where gradients "
        "overlap too; without a value, on"
    )
    seed: int = flag(
        1234,
        help="seed of everything random: initial weights, dropout, the samples drawn",
        least=0,
        most=MAX_SEED,
        needs=(),
    )

    load: str | None = flag(
        None,
        metavar="DIR",
        help="weights to start from: a torch_dist or legacy torch checkpoint, or a Hugging Face model; --ref-load's "
        "unless given, or else --hf-checkpoint's",
        needs=(),
    )
    ref_load: str | None = flag(
        None, metavar="DIR", help="checkpoint of the reference model; --load's unless given", needs=()
    )
    ref_ckpt_step: int | None = flag(
        None,
        unit="rollouts",
        help="number of the checkpoint in --ref-load; the newest unless given",
        least=0,
        needs=given("ref_load"),
    )
    ref_update_interval: int | None = flag(
        None,
        unit="rollouts",
        help="rollouts after which the policy becomes the reference model",
        least=1,
        needs=(TRAINERS, given("use_kl_loss") | given("kl_coef") | loss_that(lambda row: row.has_reference)),
    )
    critic_load: str | None = _of_critic(
        None, metavar="DIR", help="checkpoint that the critic starts from; the policy's, with a new head, unless given"
    )
    critic_save: str | None = flag(
        None,
        metavar="DIR",
        help="directory of the critic's checkpoints; critic in --save unless given",
        may_change=True,
        needs=(*CRITIC_TRAINS, given("save")),
    )
    critic_lr: float | None = _of_critic(None, help="the critic's learning rate; --lr unless given", least=0)
    critic_lr_warmup_iters: int | None = _of_critic(
        None, unit="steps", help="the critic's --lr-warmup-iters; the policy's unless given", least=0
    )
    num_critic_only_steps: int = _of_critic(
        0, unit="rollouts", help="rollouts at first from which the critic alone learns", least=0
    )
    opd_teacher_load: str | None = flag(
        None,
        metavar="DIR",
        help="checkpoint of a teacher of the policy's shape, for --use-opd inside the trainer",
        needs=(TRAINERS, given("use_opd")),
    )
    opd_teacher_ckpt_step: int | None = flag(
        None,
        unit="rollouts",
        help="number of the checkpoint in --opd-teacher-load; the newest unless given",
        least=0,
        needs=given("opd_teacher_load"),
    )
    save: str | None = flag(None, metavar="DIR", help="directory of the checkpoints", may_change=True, needs=())
    save_interval: int | None = _of_saving(None, unit="rollouts", help="rollouts between two checkpoints", least=1)
    async_save: bool = _of_saving(
        False, help="write a checkpoint while the run goes on, where memory and disk have room; the launcher's default"
    )
    no_async_save: bool = _of_saving(False, help="have the run wait until a checkpoint is written")
    no_save_optim: bool = flag(
        False, help="leave the optimizer's state out of checkpoints; they cannot be resumed", needs=SAVES
    )
    ckpt_format: str = flag(
        "torch_dist",
        choices=CKPT_FORMATS,
        help="accepted and not needed: what is read is detected, and torch_dist is written, also with torch",
        advice="leave it out: torch_dist is written, and --load reads torch_dist, torch and Hugging Face's, not zarr, "
        "torch_dcp or fsdp_dtensor, which the Megatron-LM that wrote them can save as torch_dist",
    )

    update_weight_buffer_size: int = flag(
        512 * 2**20,
        unit="bytes",
        help="largest bucket of a weight sync",
        least=1,
        may_change=True,
        needs=(GENERATES, TRAINERS),
    )
    distributed_timeout_minutes: float = flag(
        10.0, unit="minutes", help="how long a rank waits for the others", least=0.1, may_change=True
    )
    trainer_threads: int | None = flag(
        None,
        unit="threads",
        help="CPU threads per rank; the launcher shares out the cores unless given",
        least=1,
        may_change=True,
    )

    profile: bool = flag(
        False, help="write traces of torch's profiler, a file per rank and rollout in profile/", may_change=True
    )
    profile_step_start: int = _of_profile(
        10, unit="rollouts", help="first rollout that --profile is about, from 0", least=0
    )
    profile_step_end: int = _of_profile(
        12, unit="rollouts", help="first rollout after those that --profile is about", least=1
    )
    profile_ranks: tuple[int, ...] = _of_profile((0,), help="ranks that --profile is about", least=0)
    save_debug_train_data: str | None = flag(
        None,
        metavar="TEMPLATE",
        help="file, with {rollout_id} and {rank} in its name, of what a rank trains on: its shard with advantages and "
        "log-probs",
        may_change=True,
    )

    custom_megatron_init_path: str | None = _hook(
        help="function (args) that each trainer rank calls before it builds its models"
    )
    custom_megatron_before_log_prob_hook_path: str | None = _hook(
        help="function (args, model, store_prefix) that each trainer rank calls before it computes log-probs",
        needs=(TRAINERS, LOG_PROBS),
    )
    custom_megatron_before_train_step_hook_path: str | None = _hook(
        help="function (args, rollout_id, step_id, model, optimizer, opt_param_scheduler) that each trainer rank calls "
        "before the gradients of an optimizer step",
        needs=UPDATES,
    )

    attention_dropout: float = _only(
        0.0, "dropout of attention weights; only 0 is supported (Megatron has 0.1)", _EXACT
    )
    hidden_dropout: float = _only(0.0, "dropout of hidden states; only 0 is supported (Megatron has 0.1)", _EXACT)
    no_gradient_accumulation_fusion: bool = flag(
        False,
        help="do not add weights' gradients up in the matrix product; done on a GPU by Transformer "
        "Engine's layers or Apex's kernels",
        may_change=True,
    )

    megatron_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recompute(self) -> str | None:
        """The granularity of recomputation, from either of the two flags that say it."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    @property
    def te_modules(self) -> list[str]:
        """The parts of ``--recompute-modules`` that Megatron-core 0.16.1 knows in Transformer Engine's layers alone."""
        return [module for module in self.recompute_modules or () if module in _TE_MODULES]

    def no_te_modules(self, why: str) -> str:
        """The refusal of :attr:`te_modules` where local layers are built."""
        others = ", ".join(module for module in RECOMPUTE_MODULES if module not in _TE_MODULES)
        return (
            f"--recompute-modules {' '.join(self.te_modules)} works with Transformer Engine's layers alone, and "
            f"local ones are built here ({why}); allowed: {others}"
        )

    @property
    def offload_fraction(self) -> float:
        """The part of the optimizer that ``--optimizer-cpu-offload`` has in host memory, on a GPU."""
        given = self.megatron_args
        return given.get("optimizer_offload_fraction", 1.0) if given.get("optimizer_cpu_offload") else 0.0

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert's weights."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def splits_sequences(self) -> bool:
        """Whether sequence parallelism has ranks to split over. Megatron refuses it on one."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def may_share_prompts(self) -> bool:
        """Whether a micro-batch may compute a prompt once for several samples."""
        return self.share_prompts != "off" and not self.sharing_obstacles

    @property
    def sharing_obstacles(self) -> list[str]:
        """Settings under which a prompt that is computed once gives another result, and why."""
        cut = [f"--context-parallel-size {self.context_parallel_size}, which cuts each sample by itself"]
        counted = [f"{given}, which counts a shared prompt once" for given in regulating(self.megatron_args)]
        return (cut if self.context_parallel_size > 1 else []) + counted

    def overlaps_gradients(self, on_gpu: bool) -> bool:
        """Whether gradients are reduced while others are still computed."""
        return self.overlap_grad_reduce == "on" or (
            self.overlap_grad_reduce == "auto" and (on_gpu or self.overlap_param_gather == "on")
        )

    def overlaps_weights(self, on_gpu: bool) -> bool:
        """Whether the distributed optimizer's weights are gathered while the forward pass runs."""
        follows = on_gpu and self.use_distributed_optimizer and self.overlaps_gradients(on_gpu)
        return self.overlap_param_gather == "on" or (self.overlap_param_gather == "auto" and follows)

    @property
    def selection(self) -> Selection:
        """Which weights train."""
        return Selection(self.only_train_params_name_list, self.freeze_params_name_list)

    @property
    def lora(self) -> Lora | None:
        """The adapters that train instead of the weights."""
        if self.lora_rank is None:
            return None
        alpha = PEFT_ALPHA if self.lora_alpha is None else self.lora_alpha
        return Lora(self.lora_rank, alpha, self.lora_target_modules)

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the model without its adapters."""
        return self.lora is not None and (self.load is None or self.ref_load in (None, self.load))

    def contradictions(self) -> Iterator[str]:
        """Settings that need, repeat or undo each other."""
        yield from super().contradictions()
        yield from self.selection.contradictions()
        if self.lora_rank is not None and self.transformer_impl == "transformer_engine":
            yield (
                "--lora-rank puts adapters on Megatron-core's own layers, but --transformer-impl transformer_engine is "
                "given; give auto or local"
            )
        if self.lora_rank is not None and self.selection != Selection():
            yield (
                "--lora-rank trains adapters alone, so no weights can be chosen to train; leave out "
                "--only-train-params-name-list and --freeze-params-name-list"
            )
        if self.bf16 and self.fp32:
            yield "--bf16 and --fp32 are two precisions; give one of them"
        if self.use_distributed_optimizer and self.no_use_distributed_optimizer:
            yield "--use-distributed-optimizer and --no-use-distributed-optimizer contradict each other; give one"
        if self.async_save and self.no_async_save:
            yield "--async-save and --no-async-save contradict each other; give one"
        if self.use_dynamic_batch_size and self.max_tokens_per_gpu is None:
            yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, its limit; add that"
        if self.recompute_activations and self.recompute_granularity == "full":
            yield (
                "--recompute-activations means --recompute-granularity selective, but full is given; "
                "leave one of the two out"
            )
        if self.overlap_param_gather == "on" and (
            not self.use_distributed_optimizer or self.overlap_grad_reduce == "off"
        ):
            yield "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; give them too"
        if self.share_prompts == "on":
            for obstacle in self.sharing_obstacles:
                yield f"--share-prompts on does not work with {obstacle}; leave one of the two out"
        if self.use_routing_replay and self.megatron_args.get("moe_router_fusion"):
            yield f"--use-routing-replay {FUSED_ROUTERS}"
        if self.profile and self.profile_step_end <= self.profile_step_start:
            yield (
                f"--profile-step-end {self.profile_step_end} must be above --profile-step-start "
                f"{self.profile_step_start}"
            )
        if problem := template_problem("--save-debug-train-data", self.save_debug_train_data, ("rollout_id", "rank")):
            yield problem
        if self.recompute_granularity == "full" and None in (self.recompute_method, self.recompute_num_layers):
            yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers; add these"
        if self.te_modules and (self.transformer_impl == "local" or self.lora_rank is not None):
            yield self.no_te_modules("--transformer-impl local" if self.lora_rank is None else "--lora-rank")

    def data_parallel_size(self, world_size: int) -> int:
        """How many data-parallel ranks ``world_size`` processes make.

        Raises:
            ConfigError: ``world_size`` is not a multiple of the model-parallel size, or of the experts'.
        """
        dense = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        sizes = {flag_name(name): getattr(self, name) for name in dense}
        experts = {
            "--expert-tensor-parallel-size": self.expert_tensor_size,
            "--expert-model-parallel-size": self.expert_model_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_model_parallel_size,
        }
        fitting = math.lcm(math.prod(sizes.values()), math.prod(experts.values()))
        below = world_size // fitting * fitting
        nearest = " or ".join(str(ranks) for ranks in (below, below + fitting) if ranks)
        for group in (sizes, experts):
            if world_size % math.prod(group.values()):
                product = " × ".join(f"{name} {size}" for name, size in group.items() if size > 1)
                raise ConfigError(
                    f"{world_size} trainer ranks are not a multiple of {product}; give {nearest} ranks "
                    "(--actor-num-nodes × --actor-num-gpus-per-node), or change one of these sizes"
                )
        return world_size // int(math.prod(sizes.values()))


def regulating(megatron_args: Mapping[str, Any]) -> list[str]:
    """Those of Megatron's arguments, with their values, that regulate how evenly experts are loaded."""
    names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_expert_capacity_factor")
    given = {name: megatron_args[name] for name in names if name in megatron_args}
    return [f"{name} {value}" for name, value in given.items() if isinstance(value, int | float) and value > 0]


def flag_name(dest: str) -> str:
    """The flag of a setting."""
    return f"--{dest.replace('_', '-')}"
