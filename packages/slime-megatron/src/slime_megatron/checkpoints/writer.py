"""Write checkpoints in Megatron's ``torch_dist`` format, together with the other ranks, also in the background."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

from slime_convert.shape import ModelShape
from slime_core.files import write_whole
from slime_megatron.checkpoints.background import Background, LiveTensors
from slime_megatron.checkpoints.contents import checkpoint_state, naming_failures
from slime_megatron.checkpoints.files import DirectWriter
from slime_megatron.checkpoints.find import OLD, TRACKER, iteration_directory
from slime_megatron.checkpoints.peft import DIRECTORY, gather_adapters, lora_of, write_adapter
from slime_megatron.errors import TrainerCheckpointError
from slime_megatron.model.build import Chunks
from slime_megatron.ranks.exchange import broadcast_value
from slime_megatron.settings.config import MegatronConfig


def save_checkpoint(
    config: MegatronConfig,
    shape: ModelShape,
    model: Chunks,
    optimizer: Any,
    scheduler: Any,
    iteration: int,
    *,
    background: Background | None = None,
) -> Path:
    """Write checkpoint ``iteration`` under ``config.save``.

    It is written beside its place and moved there when every rank is done, so a directory named ``iter_*`` is
    always whole. What was written of one that failed is removed.

    With ``background`` it is written there, if memory and disk have room; nothing may be under way. The directory that
    is returned is not there yet then, and ``background.release()`` must be called before the model or the optimizer
    changes.

    Raises:
        TrainerCheckpointError: ``--save`` is not set, or the directory cannot be written.
    """
    if config.save is None:
        raise TrainerCheckpointError("a checkpoint was asked for, but --save names no directory")
    final = iteration_directory(config.save, iteration)
    temporary = final.with_name(final.name + ".tmp")
    with _naming(final, temporary):
        _rank_0_first(None, _make_empty, temporary)
    adapters = None
    if (lora := lora_of(model)) is not None:
        adapters = partial(write_adapter, temporary / DIRECTORY, gather_adapters(model, shape), lora)
    sharded, common = save_preprocess(checkpoint_state(config, shape, model, optimizer, scheduler, iteration))
    if background is None or not background.has_space(_own_tensors(sharded), final.parent):
        _write(prepared(sharded), common, final, adapters)
    else:
        dict_list_map_inplace(_apart, sharded)
        state = prepared(sharded)
        background.start(partial(_write, state, copy.deepcopy(common), final, adapters), tensors_of(state))
    return final


def _write(
    state: dict[str, Any],
    common: dict[str, Any],
    final: Path,
    adapters: Callable[[], None] | None,
    live: LiveTensors | None = None,
    group: Any = None,
) -> None:
    """The files, each rank its own; then the directory gets its name. What was written is removed if a rank fails."""
    temporary = final.with_name(final.name + ".tmp")
    try:
        with _naming(final, temporary):
            _rank_0_first(group, torch.save, common, temporary / COMMON_STATE_FNAME)
            write_state(state, temporary, live, group)
            if adapters is not None:
                _rank_0_first(group, adapters)
            # Last: it is what makes a directory a checkpoint.
            _rank_0_first(group, save_config, CheckpointingConfig("torch_dist", 1), str(temporary))
            _rank_0_first(group, _publish, temporary, final, common["iteration"])
    except TrainerCheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _naming(final: Path, temporary: Path) -> contextlib.AbstractContextManager[None]:
    return naming_failures(f"cannot write the checkpoint {final}", "make room there and continue the run", temporary)


def _is_own(value: Any) -> bool:
    """Whether it is a tensor that this rank will write."""
    return isinstance(value, ShardedTensor) and value.data is not None and is_main_replica(value.replica_id)


def _own_tensors(sharded: dict[str, Any]) -> list[torch.Tensor]:
    return [value.data for value in nested_values(sharded) if _is_own(value)]


def _apart(value: Any) -> Any:
    """Copy what cannot be read while the run goes on: what is not in host memory, or changes before an optimizer step.

    Megatron moves the routers' biases at the end of the backward pass.
    """
    if _is_own(value) and (not value.data.is_cpu or value.key.endswith("expert_bias")):
        value.data = value.data.detach().to("cpu", copy=True)
    return value


def _rank_0_first(group: Any, action: Any, *args: Any) -> None:
    """Let rank 0 do something while the others wait; all of them raise what went wrong there."""
    problem: str | None = None
    if dist.get_rank() == 0:
        try:
            action(*args)
        except (OSError, RuntimeError) as error:
            problem = str(error)
    problem = broadcast_value(problem, 0, group)
    if problem is not None:
        raise OSError(problem)


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _publish(temporary: Path, final: Path, iteration: int) -> None:
    """Move a finished checkpoint to its place and name it the newest."""
    if final.exists():
        replaced = final.with_name(final.name + OLD)
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced)
    else:
        temporary.rename(final)
    write_whole(final.parent / TRACKER, str(iteration))


def prepared(sharded: dict[str, Any]) -> dict[str, Any]:
    """This rank's values by torch's names; tensors are views of those given, objects are bytes already."""
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    return dict(mcore_to_pyt_state_dict(state, False))


def write_state(
    state: dict[str, Any], directory: str | Path, live: LiveTensors | None = None, group: Any = None
) -> None:
    """Write what was :func:`prepared` on this rank: the files of Megatron-core's own strategy. All ranks together.

    Megatron-core's starts a manager process, which stays for as long as the rank lives, and forks writers; when one of
    them fails, the other ranks wait for it forever. Here no process is started, and a failure is raised on every rank.
    Ranks agree through ``group`` on who writes what; the whole world's unless given. Through ``live`` the tensors are
    read, unless nothing changes them.
    """
    writer = DirectWriter(directory, _unchanged if live is None else live.reading)
    save(state, storage_writer=writer, planner=_planner(), process_group=group)


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of what was prepared, as they will be written, each once."""
    planner = _planner()
    planner.set_up_planner(state)
    found = map(planner.resolve_data, planner.create_local_plan().items)
    return [value for value in found if isinstance(value, torch.Tensor)]


def _planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _unchanged(tensor: torch.Tensor) -> contextlib.AbstractContextManager[torch.Tensor]:
    return contextlib.nullcontext(tensor.cpu())
