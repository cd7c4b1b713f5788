"""The weights in a step: they are trained, and sent to the engines.

In a run without trainers, or without engines that take weights, :class:`NoTraining` and :class:`NothingToSend` stand in
their places.
"""

from __future__ import annotations

from slime_core.types import SyncReport, TrainReport
from slime_launch.canary import Canary
from slime_launch.console import RunConsole, Wait
from slime_launch.handover import Handover, watching
from slime_launch.rollouts import RolloutWorker
from slime_launch.trainers import TrainerGroup
from slime_rollout.service import ChannelSpec, ReadyRollout, WeightSyncError


class Training:
    """Has the trainers train."""

    def __init__(self, trainers: TrainerGroup, rollout: RolloutWorker, memory: Handover, console: RunConsole) -> None:
        self._trainers, self._rollout, self._memory, self._console = trainers, rollout, memory, console

    def train(self, batch: ReadyRollout) -> TrainReport:
        """Train on the rollout; each rank fetches its own shard."""
        self._memory.to_train()
        with self._console.wait("train", phase="train") as wait:
            report = self._trainers.train(batch.shards, on_poll=watching(self._rollout, wait))
        batch.shards.clear()  # so that the object store has room for the next ones
        return report


class NoTraining:
    """In the place of :class:`Training` in a run without trainers."""

    def train(self, batch: ReadyRollout) -> TrainReport:
        """Drop the shards; a report without steps."""
        batch.shards.clear()
        return TrainReport(rollout_id=batch.rollout_id, steps=[])


def nothing_sent(version: int) -> SyncReport:
    """The report of an update that is left out."""
    return SyncReport(version=version, tensors=0, bytes=0, seconds=0.0)


class Sending:
    """Sends the trainers' weights to the engines, and has both compute log-probs of a few fixed tokens with them.

    ``ahead`` says whether engines generate while trainers work.
    """

    def __init__(
        self,
        trainers: TrainerGroup,
        rollout: RolloutWorker,
        memory: Handover,
        console: RunConsole,
        canary: Canary,
        *,
        ahead: bool,
    ) -> None:
        self._trainers, self._rollout, self._memory, self._console = trainers, rollout, memory, console
        self._canary, self._ahead = canary, ahead

    def push(self, version: int) -> SyncReport:
        """Send the weights to every engine; again, if one failed meanwhile that is being replaced."""
        self._memory.to_send()
        with self._console.wait(f"send weights, version {version}", phase="send") as wait:
            report = None
            while report is None:
                report = self._try_to_push(self._rollout.begin_update(), version, wait)
            return report

    def catch_up(self, version: int, sent: int, wait: Wait | None = None) -> int:
        """Send weights to engines that were replaced; the trainers must have nothing else to do.

        With --update-weights-interval the trainers, whose weights are ``version``, may no longer have those that the
        other engines have, ``sent``. Then all of them get the weights of now, so that a version is the same weights on
        every engine.

        Returns:
            The version that the engines have.
        """
        if self._memory.engines_sleep and wait is None:
            return sent  # engines that sleep get the next weights all together, unless a rollout waits for these
        are_newer = version > sent
        if are_newer and not self._rollout.progress().behind:
            return sent
        channel = self._rollout.begin_update(only_behind=not are_newer)
        if channel.engine_urls:
            what = "send weights to engines that were replaced"
            with self._console.wait(what, phase="send", within=wait) as shown:
                self._memory.to_send(shown)
                if self._try_to_push(channel, version, shown) is not None:
                    sent = version
        if wait is not None:
            self._memory.to_generate(wait)
            self._canary.ask()
        return sent

    def check(self, *, before_training: bool = False) -> None:
        """Engines and trainer make the same of a few fixed tokens: before anything is generated with new weights.

        Engines that generate ahead are busy, and their answers are waited for before the trainers train again.
        """
        canary = self._canary
        if not canary.is_pending or (before_training and self._memory.engines_sleep and not canary.is_asked):
            return
        if self._ahead and not before_training:
            canary.ask()
            return
        with self._console.wait("compare log-probs of fixed tokens", phase="send") as wait:
            canary.check(watching(self._rollout, wait))

    def row(self) -> dict[str, float]:
        """Metrics of the comparisons since the last time."""
        return self._canary.row()

    def _try_to_push(self, channel: ChannelSpec, version: int, wait: Wait) -> SyncReport | None:
        """Send the weights; ``None`` if an engine failed meanwhile that is being replaced."""
        poll = watching(self._rollout, wait)
        try:
            report = self._trainers.push_weights(channel, version, on_poll=poll)
        except WeightSyncError as error:
            if not self._rollout.fail_update(error.silent):
                raise
            self._console.line(f"an engine failed while version {version} was sent: {error}")
            return None
        self._rollout.confirm_update(version)
        self._canary.sent(channel, version, poll)
        return report


class NothingToSend:
    """In the place of :class:`Sending` in a run without trainers, or without engines."""

    def push(self, version: int) -> SyncReport:
        """Nothing takes weights."""
        return nothing_sent(version)

    def catch_up(self, version: int, sent: int, wait: Wait | None = None) -> int:
        """Nothing was replaced."""
        return sent

    def check(self, *, before_training: bool = False) -> None:
        """There is nothing to compare."""

    def row(self) -> dict[str, float]:
        """There is nothing to say."""
        return {}
