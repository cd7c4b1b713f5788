"""Write ``torch_dist`` files from within the rank itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


class InProcessSave(SaveShardedStrategy):  # type: ignore[misc]
    """The same files as Megatron-core's own strategy, written by torch's plain writer.

    Megatron-core's starts a manager process, which stays for as long as the rank lives, and forks writers; when one of
    them fails, the other ranks wait for it forever. Here no process is started, and a failure is raised on every rank.
    """

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write this rank's part; all ranks together."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
