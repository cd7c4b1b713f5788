"""The contents of a checkpoint in Megatron's ``torch_dist`` format, and reading them, together with the other ranks."""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.api import CheckpointException

from slime_convert.formats.torch_dist import check_metadata
from slime_convert.shape import ModelShape
from slime_core.files import DAMAGE
from slime_megatron.checkpoints.find import CheckpointInfo, check_same_model
from slime_megatron.checkpoints.other_formats import load_other_format
from slime_megatron.checkpoints.peft import lora_of
from slime_megatron.checkpoints.reader import reading_directly
from slime_megatron.errors import TrainerCheckpointError, reading_files
from slime_megatron.model.build import Chunks
from slime_megatron.model.lora import loadable_adapters, without_adapters
from slime_megatron.model.parts import VALUE_HEAD
from slime_megatron.model.te_layers import checkpoint_key
from slime_megatron.settings.config import MegatronConfig, flag_name
from slime_megatron.settings.trained import Selection
from slime_megatron.step.optimizer import load_optimizer, saved_step

logger = logging.getLogger(__name__)

_OUTPUT = "output_layer.weight"
_TENSORS = "optimizer_tensors"
_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_FULL_BYTES = 2**20  # what a file system keeps for itself, and files that are still open, may be left
# How Megatron lays the distributed optimizer's state out: whole parameters, so that it can be loaded at another
# parallel size.
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


def checkpoint_state(
    config: MegatronConfig, shape: ModelShape, model: Chunks, optimizer: Any, scheduler: Any, iteration: int
) -> dict[str, Any]:
    """All that a checkpoint holds. Its tensors are those of the model and the optimizer; all ranks call it together."""
    state = model_state(model)
    state |= {
        "args": _arguments(config, shape),
        "iteration": iteration,
        "checkpoint_version": 3.0,
        "rng_state": _random_state(),
        "opt_param_scheduler": scheduler.state_dict(),
        "content_metadata": dict(SHARDING),
    }
    if not config.no_save_optim:
        weights = model_state(model, by_layer=config.selection != Selection())
        state["optimizer"] = optimizer.sharded_state_dict(weights, metadata=dict(SHARDING))
    return state


def load_weights(info: CheckpointInfo, shape: ModelShape, model: Chunks) -> None:
    """Load a checkpoint's weights, and nothing else, into ``model``, whatever the parallel size it was saved at.

    Raises:
        TrainerCheckpointError: The checkpoint is of a model of another shape, or damaged.
    """
    if info.format == "torch_dist":
        _load(info, shape, model, model_state(model))
    else:
        load_other_format(info, shape, model)


def load_checkpoint(
    info: CheckpointInfo, config: MegatronConfig, shape: ModelShape, model: Chunks, optimizer: Any, scheduler: Any
) -> int:
    """Load all that a run needs to continue: weights, optimizer, schedule and random state. Returns the iteration.

    Raises:
        TrainerCheckpointError: It has no optimizer state, its kind of optimizer or its shape is another, or it is
            damaged.
    """
    iteration, saved = check_continues(info, config)
    state = model_state(model)
    # Under a name of its own: "optimizer" of the common part is rank 0's, whose optimizers may be others.
    weights = model_state(model, by_layer=config.selection != Selection())
    state[_TENSORS] = optimizer.sharded_state_dict(weights, is_loading=True, metadata=dict(SHARDING))
    same_layout = saved.get("random_states") == _random_layout()
    if same_layout:
        state["rng_state"] = _random_state()
    loaded = _load(info, shape, model, state)
    load_optimizer(optimizer, loaded.get(_TENSORS, {}), saved_step(loaded["optimizer"]))
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if same_layout:
        _restore_random_state(loaded["rng_state"])
    elif dist.get_rank() == 0:
        was_saved = "random_states" in saved
        why = "the parallel layout has changed" if was_saved else "an older slime saved no random states that fit"
        logger.warning("%s, so random states start from --seed again", why)
    return iteration


def check_continues(info: CheckpointInfo, config: MegatronConfig) -> tuple[int, dict[str, Any]]:
    """A checkpoint's iteration and its arguments, if a run with this config can continue it.

    Raises:
        TrainerCheckpointError: It has no optimizer state, or that of another kind of optimizer.
    """
    saved = _saved_arguments(info) if info.format == "torch_dist" else {}
    if info.iteration is None or saved.get("no_save_optim", True):
        raise TrainerCheckpointError(
            f"{info.directory} holds no optimizer state that can be loaded, so no run can continue from it; give it "
            "as --load to start a new run with its weights"
        )
    if config.lora is not None and saved.get("lora") is None:
        raise TrainerCheckpointError(
            f"{info.directory} holds no adapters, so no run with --lora-rank can continue from it; give it as --load "
            "to start one from its weights"
        )
    for name in ("use_distributed_optimizer", "bf16"):
        if saved[name] != getattr(config, name):
            there, here = ("with", "without") if saved[name] else ("without", "with")
            raise TrainerCheckpointError(
                f"{info.directory} was saved {there} {flag_name(name)}, this run is {here} {flag_name(name)}; "
                "use the same to continue it"
            )
    return info.iteration, saved


def model_state(model: Chunks, *, by_layer: bool = False) -> dict[str, Any]:
    """The model's part of a checkpoint's state dict: ``model``, or ``model0`` … for virtual stages, as in Megatron.

    Layers that are alike are one stacked tensor, unless ``by_layer``: where some may be frozen, each has a key of its
    own for the optimizer's state.
    """
    metadata = ensure_metadata_has_dp_cp_group(SHARDING | {"non_homogeneous_layers": by_layer})
    state = {}
    for key, chunk in _keys(model):
        # So that a last stage's copy of the embedding, which prediction modules bring along, is not a second original.
        chunk.mtp_process = hasattr(chunk, "mtp")
        state[key] = chunk.sharded_state_dict(metadata=metadata)
        chunk.mtp_process = False
        latent = chunk.config.multi_latent_attention
        for part in state[key].values():
            if isinstance(part, ShardedTensor):
                part.key = checkpoint_key(part.key, latent_attention=latent)
    return state


def _keys(model: Chunks) -> Iterator[tuple[str, Any]]:
    return zip(["model"] if len(model) == 1 else [f"model{number}" for number in range(len(model))], model, strict=True)


def _load(info: CheckpointInfo, shape: ModelShape, model: Chunks, state: dict[str, Any]) -> dict[str, Any]:
    saved = _saved_arguments(info)
    check_same_model(saved, shape, info.directory)
    with reading_files():
        check_metadata(info.directory, is_read=True)  # what torch would unpickle, whatever it names
    heads = {key for key, _ in _keys(model) if _OUTPUT in state[key] and state[key][_OUTPUT].key == VALUE_HEAD}
    has_adapters = loadable_adapters(saved.get("lora"), model, info.directory)
    if not has_adapters and _TENSORS not in state:
        state |= {key: without_adapters(state[key]) for key, _ in _keys(model)}
    # Layers of other kinds have others; they hold nothing without fp8.
    state |= {key: _extra_states(state[key], are_kept=False) for key, _ in _keys(model)}
    with _reading(info), reading_directly(state):
        if heads and VALUE_HEAD in dist_checkpointing.load_tensors_metadata(str(info.directory)):
            heads = set()
        new = {key: state[key].pop(_OUTPUT).data for key in heads}  # a language model's checkpoint: they stay as made
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(info.directory))
    for key, chunk in _keys(model):
        complete = has_adapters or lora_of(model) is None
        own = _extra_states(chunk.state_dict(), are_kept=True) | ({_OUTPUT: new[key]} if key in new else {})
        chunk.load_state_dict(loaded[key] | own, strict=complete)
    return loaded


def _extra_states(state: dict[str, Any], *, are_kept: bool) -> dict[str, Any]:
    """The layers' own objects among a model's weights, or everything else."""
    # Of grouped experts each has one in a checkpoint, with its number.
    return {name: value for name, value in state.items() if (re.search(r"_extra_state\d*$", name) is None) != are_kept}


def _saved_arguments(info: CheckpointInfo) -> dict[str, Any]:
    with _reading(info):
        saved = dist_checkpointing.load_common_state_dict(str(info.directory)).get("args", {})
    return saved if isinstance(saved, dict) else dict(vars(saved))


def _reading(info: CheckpointInfo) -> contextlib.AbstractContextManager[None]:
    return naming_failures(f"cannot read the checkpoint {info.directory}", "give one that is whole")


@contextlib.contextmanager
def naming_failures(what: str, advice: str, written: Path | None = None) -> Iterator[None]:
    """Make one line of what torch and Megatron raise over files; it says if the disk of what is written is full.

    torch's own is no ``Exception``, so that it would end a worker instead of failing a call, and holds the tracebacks
    of all ranks.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise TrainerCheckpointError(f"{what}: {_reason(cause, written)} (rank {rank}); {advice}") from error
    except (OSError, RuntimeError, pickle.UnpicklingError, struct.error, CheckpointingException, *DAMAGE) as error:
        raise TrainerCheckpointError(f"{what}: {_reason(error, written)}; {advice}") from error


def _reason(error: BaseException, written: Path | None) -> str:
    """The reason of a failure. torch's writer reports a full disk as a failed check of its own, without the reason."""
    first_sentence = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    # Its parent: rank 0 may have removed what was written already.
    if written is not None and written.parent.exists() and shutil.disk_usage(written.parent).free < _FULL_BYTES:
        return f"the disk is full ({first_sentence})"
    return first_sentence


def _arguments(config: MegatronConfig, shape: ModelShape) -> dict[str, Any]:
    return {
        **shape.to_megatron_args(),
        "padded_vocab_size": shape.padded_vocab_size(config.tensor_model_parallel_size),
        **{name: getattr(config, name) for name in _LAYOUT},
        "random_states": _random_layout(),
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "bf16": config.bf16,
        "no_save_optim": config.no_save_optim,
        "lora": None if config.lora is None else config.lora.saved(),
    }


def _random_groups() -> list[Any]:
    """The ranks that have different random states: of the pipeline, of tensors, and of contexts.

    Ranks of experts have a random state of their own, and are data-parallel replicas otherwise: with them, the third
    group is that of all these.
    """
    last = parallel_state.get_context_parallel_group()
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        last = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return [parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_tensor_model_parallel_group(), last]


def _random_layout() -> list[int]:
    """How many ranks have random states, by group, and over how many experts are split."""
    return [*(group.size() for group in _random_groups()), parallel_state.get_expert_model_parallel_world_size()]


def _random_state() -> ShardedObject:
    """This rank's random states; data-parallel replicas have the same, unless they hold different experts."""
    *sizes, experts = _random_layout()
    places = tuple(group.rank() for group in _random_groups())
    replica = 0 if experts > 1 else parallel_state.get_data_parallel_rank()
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", [state], tuple(sizes), places, replica_id=replica)


def _restore_random_state(states: list[dict[str, Any]]) -> None:
    [state] = states
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
