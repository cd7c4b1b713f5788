"""The policy's weights as others get them: pushed to engines, and as checksums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from slime_convert.stored_form import StoredForm
from slime_core.interfaces import WeightChannel
from slime_core.types import SyncReport, WeightUpdate
from slime_megatron.ranks.exchange import gather_values
from slime_megatron.weights.sums import WeightSums
from slime_megatron.weights.sync import WeightExport, push_weights
from slime_megatron.worker.roles import Roles
from slime_megatron.worker.setup import WorkerSetup
from slime_megatron.worker.timer import PhaseTimer


class PolicyExport:
    """Pushes the policy's weights, and sums their bits. All ranks call its methods together."""

    def __init__(self, setup: WorkerSetup, roles: Roles) -> None:
        self._shape, self._roles = setup.shape, roles
        self._bucket_bytes = setup.config.update_weight_buffer_size
        quantized = setup.quantized_as
        self._form = StoredForm(quantized) if quantized is not None and setup.rendezvous.rank == 0 else None
        self._weights: WeightExport | None = None
        self._sums: WeightSums | None = None

    def push(
        self, update: WeightUpdate, channel: WeightChannel | None, senders: Sequence[int], timer: PhaseTimer
    ) -> SyncReport:
        """Send the weights that ``update`` names through the ``senders``' channels."""
        actor = self._roles.actor
        self._roles.gather_policy()
        if self._weights is None:
            self._weights = WeightExport(actor.model, self._shape)
        if actor.versions is not None:
            actor.versions.pushed(update.version)
        with timer.phase("send"):
            return push_weights(self._weights, channel, update, self._bucket_bytes, self._form, senders)

    def mismatches(self) -> list[str]:
        """Names of weights that :meth:`push` sends otherwise than they are, on any rank."""
        export = self._weights or WeightExport(self._roles.actor.model, self._shape)
        return sorted({name for names in gather_values(export.mismatches()) for name in names})

    def sums(self, timer: PhaseTimer) -> NDArray[np.uint32]:
        """Checksums of the weights, a row for each of :attr:`summed`."""
        model = self._roles.actor.model
        with timer.phase("weight_sums"):
            self._sums = self._sums or WeightSums(model)
            return self._sums(model)

    @property
    def summed(self) -> list[str]:
        """Names of the weights on rank 0 once they have been summed; else none."""
        return [] if self._sums is None or dist.get_rank() else self._sums.names
