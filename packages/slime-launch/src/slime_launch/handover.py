"""Who has the device memory: trainers and engines that take turns, with ``--colocate`` or an ``--offload-…`` flag.

    generate ─▶ engines give all back ─▶ trainers take all ─▶ train, save ─▶ trainers keep weights alone
        ▲                                                                                  │
        └─ engines take the rest ◀─ trainers give weights back ◀─ send ◀─ engines take weights'

The loop says what comes next; here it is made possible by as few moves as that takes. Each half checks its own moves
(`slime_core.memory`), so that a wrong order is an error, never a wrong result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from slime_core.memory import Held, MemoryStateError
from slime_core.types import SleepReport
from slime_launch.console import RunConsole, Wait
from slime_launch.kind import RunKind
from slime_launch.rollouts import RolloutWorker
from slime_launch.trainers import TrainerGroup


def watching(rollout: RolloutWorker, wait: Wait) -> Callable[[], None]:
    """Shows that the trainers are busy. An engine that dies meanwhile ends the wait."""

    def poll() -> None:
        rollout.progress()
        wait.update()

    return poll


class Handover:
    """Has both halves sleep and wake, as far as the settings let them.

    Attributes:
        trainer_sleeps: Whether trainers give memory back; saves then come before weights are sent.
        engines_sleep: Whether engines do. With ``--update-weights-interval`` they keep their weights.
    """

    def __init__(
        self,
        kind: RunKind,
        trainers: TrainerGroup,
        rollout: RolloutWorker,
        console: RunConsole,
        *,
        keeps_weights: bool = False,
    ) -> None:
        """Trainers have all of their memory; engines that sleep have given theirs back.

        With ``keeps_weights``, engines that sleep from now on keep their weights.
        """
        self.trainer_sleeps, self.engines_sleep = kind.trainer_sleeps, kind.engines_sleep
        self._trainers, self._rollout, self._console = trainers, rollout, console
        self._asleep = Held.WEIGHTS if keeps_weights else Held.NOTHING
        self._trainer = Held.EVERYTHING
        self._engines = Held.NOTHING if self.engines_sleep else Held.EVERYTHING
        self._seconds = {"sleep": 0.0, "wake_up": 0.0}
        self._left: SleepReport | None = None

    def to_train(self) -> None:
        """Before training and saving: trainers have everything."""
        self._engines_down(self._asleep)
        self._trainer_up(Held.EVERYTHING)

    def to_send(self, shown: Wait | None = None) -> None:
        """Before weights are sent: both halves have those. ``shown`` is the wait that this is a part of, if any."""
        self._trainer_down(Held.WEIGHTS, shown)
        self._trainer_up(Held.WEIGHTS, shown)
        self._engines_up(Held.WEIGHTS, shown)

    def to_generate(self, shown: Wait | None = None) -> None:
        """Before a rollout or an evaluation: engines have everything.

        Raises:
            MemoryStateError: Engines have given their weights back since they were sent.
        """
        if self._engines is Held.NOTHING:
            raise MemoryStateError(f"generate needs the engines' weights, and they hold {Held.NOTHING}")
        self._trainer_down(Held.NOTHING, shown)
        self._engines_up(Held.EVERYTHING, shown)

    def to_inspect(self) -> None:
        """Before the engines' weights are compared with the trainer's: both have those, engines nothing else."""
        self._engines_down(Held.WEIGHTS)
        self._trainer_up(Held.WEIGHTS)

    def to_restart(self) -> None:
        """The trainers are gone, whatever they held: engines give everything back for those that are started."""
        self._engines_down(Held.NOTHING)
        self._trainer = Held.EVERYTHING

    def row(self) -> dict[str, float]:
        """Since the last time: seconds of all moves, and what trainer rank 0 had left when it last slept, in bytes."""
        if not (self.trainer_sleeps or self.engines_sleep):
            return {}
        row = {f"perf/{name}_time": value for name, value in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        if self._left is not None:
            row |= {
                "perf/trainer_asleep_device_bytes": float(self._left.device),
                "perf/trainer_asleep_waiting_bytes": float(self._left.waiting),
                "perf/trainer_asleep_resident_bytes": float(self._left.resident),
            }
        return row

    def _trainer_down(self, to: Held, shown: Wait | None = None) -> None:
        if self.trainer_sleeps and self._trainer > to:
            with self._moving("trainers give memory back", "sleep", shown) as poll:
                report = self._trainers.sleep(keep_weights=to is Held.WEIGHTS, on_poll=poll)
            self._left = report if to is Held.NOTHING else self._left
            self._trainer = to

    def _trainer_up(self, to: Held, shown: Wait | None = None) -> None:
        if self._trainer < to:
            with self._moving("trainers take memory", "wake_up", shown) as poll:
                self._trainers.wake(weights_only=to is Held.WEIGHTS, on_poll=poll)
            self._trainer = to

    def _engines_down(self, to: Held) -> None:
        if self.engines_sleep and self._engines > to:
            with self._moving("engines give memory back", "sleep", None):
                self._rollout.sleep(keep_weights=to is Held.WEIGHTS)
            self._engines = to

    def _engines_up(self, to: Held, shown: Wait | None = None) -> None:
        if self._engines < to:
            with self._moving("engines take memory", "wake_up", shown):
                self._rollout.wake(weights_only=to is Held.WEIGHTS)
            self._engines = to

    @contextlib.contextmanager
    def _moving(self, what: str, phase: str, shown: Wait | None) -> Iterator[Callable[[], None]]:
        start = time.monotonic()
        with self._console.wait(what, phase="hand over", within=shown) as wait:
            yield watching(self._rollout, wait)
        self._seconds[phase] += time.monotonic() - start
