"""Write checkpoints in Megatron's ``torch_dist`` format, together with the other ranks, also in the background."""

from __future__ import annotations

import contextlib
import copy
import datetime
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from slime_convert.shape import ModelShape
from slime_megatron.checkpoint import OLD, TRACKER, iteration_directory
from slime_megatron.checkpoint_io import checkpoint_state, naming_failures
from slime_megatron.config import MegatronConfig
from slime_megatron.errors import CheckpointError
from slime_megatron.model import Chunks
from slime_megatron.peft import DIRECTORY, gather_adapters, lora_of, write_adapter


class Background:
    """Writes one checkpoint at a time in a thread, through a process group that nothing else uses.

    All ranks make one together, and call its methods in the same order.
    """

    def __init__(self, timeout_minutes: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=timeout_minutes))
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    def start(self, write: Callable[[Any], None]) -> None:
        """Call ``write`` with the process group in a thread; nothing may be under way."""
        assert self._thread is None

        def run() -> None:
            try:
                write(self._group)
            except Exception as error:
                self._problem = str(error) or type(error).__name__

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def finished(self, *, wait: bool) -> bool:
        """Whether every rank is done with what was started last. All ranks get the same answer, or error.

        Args:
            wait: Wait until they are.

        Raises:
            CheckpointError: It failed, on any rank; raised once.
        """
        if self._thread is None:
            return True
        if wait:
            self._thread.join()
        elif not _everywhere(not self._thread.is_alive()):
            return False
        self._thread.join()
        self._thread, problem = None, self._problem
        self._problem = None
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if found := [text for text in problems if text is not None]:
            raise CheckpointError(found[0])
        return True


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

    Args:
        config: With the directory, and what is left out.
        shape: The model's.
        model: Its chunks, without wrappers.
        optimizer: Megatron's.
        scheduler: Megatron's.
        iteration: Its number.
        background: Only copy the state now, and write it there; an earlier one is waited for.

    Returns:
        Its directory, which is not there yet if it is written in the background.

    Raises:
        CheckpointError: ``--save`` is not set, or the directory cannot be written; with ``background``, the earlier one
            could not.
    """
    if config.save is None:
        raise CheckpointError("a checkpoint was asked for, but --save names no directory")
    if background is not None:
        background.finished(wait=True)
    final = iteration_directory(config.save, iteration)
    temporary = final.with_name(final.name + ".tmp")
    with _naming(final, temporary):
        _rank_0_first(None, _make_empty, temporary)
    adapters = None
    if (lora := lora_of(model)) is not None:
        adapters = partial(write_adapter, temporary / DIRECTORY, gather_adapters(model, shape), lora)
    sharded, common = save_preprocess(checkpoint_state(config, shape, model, optimizer, scheduler, iteration))
    if background is None:
        _write(sharded, common, final, adapters, None)
    else:
        dict_list_map_inplace(_to_host, sharded)
        background.start(partial(_write, sharded, copy.deepcopy(common), final, adapters))
    return final


def _write(
    sharded: dict[str, Any], common: dict[str, Any], final: Path, adapters: Callable[[], None] | None, group: Any
) -> None:
    """The files, each rank its own; then the directory gets its name. What was written is removed if a rank fails."""
    temporary = final.with_name(final.name + ".tmp")
    try:
        with _naming(final, temporary):
            _rank_0_first(group, torch.save, common, temporary / COMMON_STATE_FNAME)
            InProcessSave(group).save(sharded, temporary)
            if adapters is not None:
                _rank_0_first(group, adapters)
            # Last: it is what makes a directory a checkpoint.
            _rank_0_first(group, save_config, CheckpointingConfig("torch_dist", 1), str(temporary))
            _rank_0_first(group, _publish, temporary, final, common["iteration"])
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _naming(final: Path, temporary: Path) -> contextlib.AbstractContextManager[None]:
    return naming_failures(f"cannot write the checkpoint {final}", "make room there and continue the run", temporary)


def _to_host(value: Any) -> Any:
    """Copy the tensors that this rank will write."""
    if isinstance(value, ShardedTensor) and value.data is not None and is_main_replica(value.replica_id):
        value.data = value.data.detach().to("cpu", copy=True)
    return value


def _everywhere(condition: bool) -> bool:
    """Whether it holds on every rank."""
    flag = torch.tensor(int(condition), device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _rank_0_first(group: Any, action: Any, *args: Any) -> None:
    """Let rank 0 do something while the others wait; all of them raise what went wrong there."""
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action(*args)
        except (OSError, RuntimeError) as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0, group=group)
    if problem[0] is not None:
        raise OSError(problem[0])


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
    tracker = final.parent / TRACKER
    newer = tracker.with_name(tracker.name + ".tmp")
    newer.write_text(str(iteration))
    newer.replace(tracker)


class InProcessSave(SaveShardedStrategy):  # type: ignore[misc]
    """The same files as Megatron-core's own strategy, written by torch's plain writer.

    Megatron-core's starts a manager process, which stays for as long as the rank lives, and forks writers; when one of
    them fails, the other ranks wait for it forever. Here no process is started, and a failure is raised on every rank.
    ``group`` is the process group through which they agree on who writes what; the whole world's unless given.
    """

    can_handle_sharded_objects = True

    def __init__(self, group: Any = None) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write this rank's part; all ranks together."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )
