"""Megatron-core's arguments that are not flags here: which may be given by name, and their effect. No torch.

A name is a field of one of Megatron's configs. Each is in one class: forwarded to Megatron; of the model's shape, with
which it is compared; without effect, because the result is the same; a flag of slime's own; or refused, because slime
sets it or because it would break what it computes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from slime_convert.shape import MEGATRON_NAMES, ModelShape
from slime_core.flags import flag_specs
from slime_core.former_names import renamed
from slime_megatron.settings.config import MegatronConfig, regulating
from slime_megatron.settings.megatron_fields import megatron_fields
from slime_megatron.settings.overrides import has_type, shown

_TE = "it is a setting of Transformer Engine's layers, which are used as they are"
_PART = "the models that are trained have no such part"
_INFERENCE = "it is for inference"
_OFFLOAD = "activations stay on the device"
# Forwarded to Megatron as they are.
_FORWARDED = (
    "decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm config_logger_dir align_param_gather bucket_size",
    "pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation average_in_collective batch_p2p_sync",
    "deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush init_method_std embedding_init_method_std",
    "disable_bf16_reduced_precision_matmul bias_activation_fusion bias_dropout_fusion distribute_saved_activations",
    "moe_router_load_balancing_type moe_router_dtype moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff",
    "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy",
    "moe_grouped_gemm moe_permute_fusion moe_router_fusion",
    "clone_scatter_output_in_embedding num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
    "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
)
# Of these, what has an effect in Transformer Engine's layers alone.
_TE_LAYERS = {"moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"}
# And what has one on a GPU alone: why there is none elsewhere.
_OFFLOAD_OPTIMIZER = {
    "optimizer_cpu_offload": "on a CPU the optimizer's state is in host memory already",
    "optimizer_offload_fraction overlap_cpu_* pin_cpu_*": "it is for --optimizer-cpu-offload on a GPU",
}
# Fields, * for any end of the name, that have one value: the one that slime sets, or else Megatron's default.
_FIXED = {
    "fp16 params_dtype pipeline_dtype *autocast* fp32_residual_* main_* exp_avg*": "precision follows --bf16",
    "fp8* fp4* first_last_layers_bf16 num_layers_at_* *kitchen* tp_only_amax_red quant_recipe": _TE,
    "moe_router_padding_* delay_wgrad_compute ep_overlap_* keep_fp8_*": _TE,
    "activation_func_fp8_* reuse_grad_buf_* defer_embedding_* wgrad_deferral_limit overlap_moe_*": _TE,
    "*cpu_offloading* fine_grained_* offload_modules min_offloaded_*": _OFFLOAD,
    "variable_seq_lengths *cuda_graph*": "micro-batches differ in length",
    "account_for_* *_parallel_layout": "give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
    "mtp_standalone": "prediction modules are not run",
    "overlap_p2p_comm batch_p2p_comm use_ring_*": "the pipeline's schedule decides how its stages exchange messages",
    "num_microbatches_with_* microbatch_group_*": "slime divides a step into micro-batches",
    "hierarchical_context_* hybrid_context_* max_seqlen_*": "each sample is cut over all context-parallel ranks",
    "apply_residual_* qk_l2_norm qk_clip* log_max_* no_rope_freq moe_latent_size use_fused_weighted_*": _PART,
    "moe_apply_probs_* dsa_indexer_loss_* dsa_indexer_use_* mrope_section is_hybrid_model *mamba* heter*": _PART,
    "moe_input_jitter_eps moe_router_force_* moe_enable_routing_* moe_token_dropping": "engines route otherwise",
    "flash_decode inference_* use_inference_* cache_mla_* mlp_chunks_* batch_invariant_* symmetric_*": _INFERENCE,
    "test_mode": "it is for tests of Megatron",
    "calculate_per_token_loss": "the loss of a step has its weights already",
    "moe_layer_recompute": "give --recompute-modules moe",
    "moe_extended_tp": "give --expert-tensor-parallel-size",
    "moe_router_topk_limited_devices": "groups of experts are of the model's shape",
    "use_cpu_initialization init_model_with_* perform_initialization": "the device decides",
    "grad_reduce_in_fp32": "gradients are accumulated and reduced in fp32 always",
    "gradient_accumulation_fusion": "it is on where it can be; --no-gradient-accumulation-fusion switches it off",
    "num_distributed_optimizer_*": "the optimizer's state is split over all data-parallel ranks",
    "overlap_param_gather_with_*": "weights are gathered while the next forward pass runs: --overlap-param-gather",
    "*_fsdp *_sharding_strategy fsdp_* preserve_fp32_* suggested_communication_*": "FSDP is not supported",
    "nccl_ub disable_symmetric_*": "NCCL's user buffers are not used",
    "decoupled_weight_decay sgd_* muon_*": "the optimizer is AdamW",
}
# Fields without effect here.
_UNREAD = {
    "attention_softmax_in_fp32": "attention's softmax is computed in fp32 always",
    "attention_backend": "what computes attention over packed rows follows from the layers and the precision",
    "moe_token_dispatcher_type moe_enable_deepep moe_flex_* moe_deepep_* moe_hybridep_*": "alltoall dispatches tokens",
    "moe_use_legacy_*": "grouped experts are Transformer Engine's",
    "moe_shared_expert_overlap": "shared experts are computed before the others",
    "masked_softmax_fusion apply_query_key_* cp_comm_type": "the attention is slime's own",
    "apply_rope_fusion fused_single_qkv_rope": "rotary angles go by explicit position",
    "persist_layer_norm memory_efficient_*": "norms are torch's",
    "cross_entropy_*": "log-probs are computed from hidden states",
    "tp_comm_* use_te_* disable_parameter_*": _TE,
    "mtp_loss_*": "prediction modules are not trained",
    "*loss_scale loss_scale_window hysteresis": "it is for fp16",
    "moe_per_layer_logging log_num_zeros_*": "it is not reported",
    "check_for_*": "each gradient is checked before the optimizer's step",
    "use_torch_optimizer_for_*": "torch's Adam is used always",
    "use_precision_aware_* store_param_*": "the optimizer's state is fp32",
    "*_comm_backend": "process groups have the device's backend",
    "barrier_with_*": "timers are slime's own",
    "gradient_reduce_div_fusion async_tensor_model_parallel_*": "Megatron-core does not read it",
}
_BALANCING = ("none", "aux_loss", "seq_aux_loss")
_NOT_NEGATIVE = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")


@functools.cache
def classes(name: str) -> tuple[str, ...]:
    """The classes that a field of Megatron's is in. There is one; none if nobody has decided what it would change."""
    field = megatron_fields()[name]
    if name in {*MEGATRON_NAMES, *MEGATRON_NAMES.values(), "normalization"}:
        return ("shape",)  # whatever the tables say of fields that begin like it
    found = {
        "ours": name in {spec.dest for spec in flag_specs(MegatronConfig)},
        "forwarded": any(name in names.split() for names in _FORWARDED),
        "no effect": _found(_UNREAD, name) is not None,
        "refused": field.is_function or _found(_FIXED, name) is not None,
    }
    return tuple(kind for kind, is_so in found.items() if is_so)


def reason(name: str) -> str:
    """Why a field of Megatron's cannot be given, or has no effect; empty where it may be given."""
    return _found(_FIXED | _UNREAD, name) or ""


def has_no_effect(name: str) -> bool:
    """Whether a name is a field of Megatron's that has no effect, whatever the model is."""
    return name in megatron_fields() and classes(name) == ("no effect",)


def may_change(name: str) -> bool:
    """Whether a run may go on with another value of a field: it has no effect, or says where the optimizer is."""
    return has_no_effect(name) or _is_of_offload(name)


def _plainly(name: str, value: Any) -> str:
    return f"{name} {value}"


def reaches_megatron(name: str, *, on_gpu: bool) -> bool:
    """Whether Megatron gets an argument: what needs Transformer Engine's layers, or a GPU, it gets there alone."""
    return classes(name) == ("forwarded",) and (on_gpu or (name not in _TE_LAYERS and not _is_of_offload(name)))


def passed_on(
    kind: type[Any], given: Mapping[str, Any], shape: ModelShape, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of the arguments that one of Megatron's configs gets; ``values`` are those that slime sets there."""
    known = {field.name for field in dataclasses.fields(kind)} - _of_shape(shape).keys()
    return {name: value for name, value in given.items() if name in known and _unread(name, shape, values) is None}


def notices(
    given: Mapping[str, Any],
    shape: ModelShape,
    made: Sequence[Any],
    values: Mapping[str, Any],
    said: Callable[[str, Any], str] = _plainly,
) -> list[str]:
    """Arguments without effect, and those whose value Megatron changed, a line each; ``said`` writes an argument."""
    found = []
    for name, value in given.items():
        if reason := _unread(name, shape, values):
            if not _is_so(name, value, values):
                found.append(f"{said(name, value)} has no effect ({reason})")
        elif name not in _of_shape(shape):
            found += [
                f"{said(name, value)} became {getattr(one, name)}" for one in made if getattr(one, name, value) != value
            ]
    return found


def problems(
    given: Mapping[str, Any],
    shape: ModelShape,
    config: MegatronConfig,
    values: Mapping[str, Any],
    said: Callable[[str, Any], str] = _plainly,
) -> Iterator[str]:
    """Problems of arguments, a line each; ``values`` are those that slime sets."""
    flags = {spec.dest: spec.name for spec in flag_specs(MegatronConfig)}
    fields, of_shape = megatron_fields(), _of_shape(shape)
    for name, value in given.items():
        fixed, words = _found(_FIXED, name), said(name, value)
        if name in flags:
            yield f"{words} is a setting of its own; give it as {flags[name]}"
        elif name in of_shape:
            if (_plain(value) or None) != (of_shape[name] or None):
                yield f"{words}: the model has {of_shape[name]}; leave it out, its shape is its config's"
        elif name not in fields:
            near = difflib.get_close_matches(name, [*fields, *flags], n=3)
            close = f"near names: {', '.join(near)}" if near else "leave it out"
            yield f"{words} is unknown to Megatron-core; {close}"
        elif callable(value) or fields[name].is_function:
            yield f"{name} is a function, which slime sets; leave it out"
        elif not has_type(value, fields[name].hint) or (name in _NOT_NEGATIVE and not _is_amount(value)):
            allowed = "a number, 0 or more" if name in _NOT_NEGATIVE else shown(fields[name].hint)
            yield f"{said(name, repr(value))} must be {allowed}"
        elif name == "optimizer_offload_fraction" and not 0 < value <= 1:
            yield f"{words} must be above 0, and at most 1; to offload nothing, leave --optimizer-cpu-offload out"
        elif fixed and not _is_so(name, value, values):
            yield f"{words} cannot be given: {fixed}; leave it out"
        elif not classes(name):
            yield f"{words} cannot be given: it is newer than slime, which was tested with megatron-core 0.16.1"
    yield from _balance_problems(given, shape, config)
    if values.get("optimizer_cpu_offload") and not (config.bf16 and config.use_distributed_optimizer):
        # Megatron-core's optimizer cannot be made for fp32 weights, nor for whole ones.
        yield (
            "--optimizer-cpu-offload needs --bf16 and --use-distributed-optimizer, also on one rank; leave out --fp32 "
            "and --no-use-distributed-optimizer"
        )


def _balance_problems(given: Mapping[str, Any], shape: ModelShape, config: MegatronConfig) -> Iterator[str]:
    """Of the arguments that regulate the load of experts."""
    kind, coefficient = given.get("moe_router_load_balancing_type", "aux_loss"), given.get("moe_aux_loss_coeff")
    if kind not in _BALANCING:
        # Megatron-core's sinkhorn routes otherwise than engines do, and its global loss divides by empty batches.
        yield f"moe_router_load_balancing_type {kind} is not supported; allowed: {', '.join(_BALANCING)}"
    elif coefficient and kind != "aux_loss":
        # To Megatron a packed row is one sequence.
        yield f"moe_aux_loss_coeff {coefficient} needs moe_router_load_balancing_type aux_loss, not {kind}; give that"
    if shape.num_experts is None:
        yield from (f"{argument}: the model has no experts; leave it out" for argument in regulating(given))
    elif rate := given.get("moe_router_bias_update_rate"):
        if not shape.moe_router_enable_expert_bias:
            yield f"moe_router_bias_update_rate {rate}: the model's routers have no bias; leave it out"
        if config.lora is not None:
            yield f"moe_router_bias_update_rate {rate} changes the model, and --lora-rank adapters alone; give one"


def _of_shape(shape: ModelShape) -> dict[str, Any]:
    """The model's shape, by the names of shapes and of Megatron."""
    own = vars(shape) | shape.megatron_values({*MEGATRON_NAMES.values(), "normalization"})
    del own["family"], own["max_position_embeddings"]
    return {name: _plain(value) for name, value in own.items()}


def _unread(name: str, shape: ModelShape, values: Mapping[str, Any]) -> str | None:
    """Why an argument has no effect, with these values of slime's own."""
    if name in _of_shape(shape):
        return None
    if name.startswith("moe_") and shape.num_experts is None:
        return "the model has no experts"
    if name in _TE_LAYERS and not values.get("moe_grouped_gemm"):
        return "it is for Transformer Engine's layers, and local ones are used"
    if not values.get("optimizer_cpu_offload") and (reason := _found(_OFFLOAD_OPTIMIZER, name)):
        return reason
    return _found(_UNREAD, name)


def _is_of_offload(name: str) -> bool:
    return _found(_OFFLOAD_OPTIMIZER, name) is not None


def _found(table: Mapping[str, str], name: str) -> str | None:
    reasons = (reason for names, reason in table.items() if any(fnmatchcase(name, part) for part in names.split()))
    return next(reasons, None)


def _is_so(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Whether an argument says what is so without it."""
    return bool(_plain(value) == _plain(values.get(name, megatron_fields()[name].default)))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_amount(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value < math.inf)


__getattr__ = renamed(__name__, {"reaches_core": f"{__name__}.reaches_megatron"})
