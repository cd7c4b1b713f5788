"""After every update of weights: engines and trainer must make the same of a few fixed tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from slime_convert.errors import ConvertError
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.errors import SlimeError
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample, Status, TrainShard
from slime_launch.calls import Call
from slime_launch.errors import RunError
from slime_launch.handover import Handover
from slime_launch.rollouts import RolloutWorker
from slime_launch.trainers import TrainerGroup
from slime_rollout.service import CanaryTokens, ChannelSpec, WeightSyncError

Poll = Callable[[], None]


class Canary:
    """Compares log-probs, and names the weight that differs: :meth:`sent` after an update, then :meth:`check`.

    The trainer answers right after it has sent its weights; engines are asked once they can generate. ``limit`` is the
    largest mean distance in nats; with 0 nothing is asked.
    """

    def __init__(
        self, limit: float, shape: ModelShape, trainers: TrainerGroup, rollout: RolloutWorker, memory: Handover
    ) -> None:
        self._limit = limit
        self._trainers, self._rollout, self._memory = trainers, rollout, memory
        experts, chosen = shape.num_experts or 1, shape.moe_router_topk or 1
        self._tokens = CanaryTokens.of(shape.vocab_size, experts=experts, chosen=chosen)
        self._shard = canary_shard(self._tokens)
        self._pending: tuple[ChannelSpec, int, list[float]] | None = None
        self._asked: Call[dict[str, list[float]]] | None = None
        self._seconds, self._largest = 0.0, float("nan")

    def sent(self, channel: ChannelSpec, version: int, poll: Poll) -> None:
        """Have the trainer answer: the engines of ``channel`` have its weights."""
        if not self._limit:
            return
        start = time.monotonic()
        if self._pending is not None and self._pending[1] == version:  # to engines that were replaced since
            urls = dict.fromkeys((*self._pending[0].engine_urls, *channel.engine_urls))
            channel = dataclasses.replace(channel, engine_urls=tuple(urls))
        rows = self._trainers.log_probs(self._shard, on_poll=poll)
        ours = [np.asarray(row)[sample.loss_mask > 0] for row, sample in zip(rows, self._shard.samples, strict=True)]
        self._pending, self._asked = (channel, version, np.concatenate(ours).tolist()), None
        self._seconds += time.monotonic() - start

    def ask(self) -> None:
        """Ask engines that can generate, without waiting: those that are busy answer after what they have begun."""
        if self._pending is not None and self._asked is None:
            self._asked = self._rollout.canary_log_probs(self._pending[0].engine_urls, self._tokens)

    def check(self, poll: Poll) -> None:
        """Wait for the engines' answers, if there was an update since the last ones.

        Raises:
            RunError: An engine computes something else than the trainer; the message names the weights that differ.
        """
        self.ask()
        if self._pending is None or self._asked is None:
            return
        start = time.monotonic()
        while not self._asked.done():
            poll()
        [answers] = self._asked.results()
        (channel, version, ours), self._pending, self._asked = self._pending, None, None
        apart = {url: self._tokens.distance(ours, theirs) for url, theirs in answers.items()}
        self._largest = max((mean for mean, _ in apart.values()), default=float("nan"))
        self._seconds += time.monotonic() - start
        if wrong := {url: found for url, found in apart.items() if found[0] > self._limit}:
            shown = ", ".join(f"{url} by {mean:.2g} nats in {where}" for url, (mean, where) in wrong.items())
            raise RunError(
                f"weight version {version}: {len(wrong)} of {len(apart)} engines compute other log-probs of fixed "
                f"tokens than the trainer ({shown} for a token; {self._limit:g} is allowed); "
                f"{self._cause(channel, version, poll)}"
            )

    @property
    def is_pending(self) -> bool:
        """Whether engines have not answered since they got weights."""
        return self._pending is not None

    @property
    def is_asked(self) -> bool:
        """Whether they are asked, and may be answering."""
        return self._asked is not None

    def row(self) -> dict[str, float]:
        """Since the last time: seconds, and the largest mean distance of the last check in nats."""
        if not self._limit:
            return {}
        row = {"perf/weight_canary_time": self._seconds}
        if self._largest == self._largest:
            row["perf/weight_canary_abs_diff"] = self._largest
        self._seconds = 0.0
        return row

    def _cause(self, channel: ChannelSpec, version: int, poll: Poll) -> str:
        """Which weights differ, in words."""
        try:
            self._memory.to_inspect()
            mismatches = self._trainers.inspect(channel, version, on_poll=poll)
        except WeightSyncError as error:
            return f"{error}"
        except (SlimeError, ConvertError) as error:
            return f"which weights differ could not be found out: {error}"
        if mismatches:
            return f"the trainer sends these otherwise than it has them: {', '.join(mismatches)}"
        return (
            "every weight that can be compared is the trainer's, so the engine computes otherwise: compare its "
            "configuration (rotary base, norms, scales, quantization) with the model's, see whether it computes again "
            "what it derives from weights (of MLA for decoding), or raise --weight-canary-limit"
        )


def canary_shard(tokens: CanaryTokens) -> TrainShard:
    """The tokens as a shard for one data-parallel rank, in the order of :meth:`CanaryTokens.distance`.

    Of a row every token but the first is trained; of what continues the first row, which is a prompt that its samples
    share, the last alone.
    """
    rows = [(number, row[:1], row[1:], [1] * (len(row) - 1)) for number, row in enumerate(tokens.rows)]
    rows += [(len(rows), tokens.rows[0], row, [0] * (len(row) - 1) + [1]) for row in tokens.continuations]
    samples = [
        Sample(
            index=number,
            group_index=group,
            prompt="",
            tokens=[*prompt, *response],
            response_length=len(response),
            loss_mask=mask,
            reward=0.0,
            rollout_log_probs=[0.0] * len(response),
            status=Status.COMPLETED,
        )
        for number, (group, prompt, response, mask) in enumerate(rows)
    ]
    [shard] = build_shards(
        RolloutBatch(rollout_id=0, groups=[[sample] for sample in samples]),
        ShardSpec(
            algorithm=AlgorithmConfig(),
            temperature=1.0,
            data_parallel_size=1,
            micro_batch_size=len(samples),
            global_batch_size=len(samples),
        ),
    )
    return shard
