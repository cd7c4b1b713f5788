"""The kind of a run: what it has, and so what it has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a third of what --help would take
    from slime_rollout.service import Rows


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """The parts that a run has, decided once, by :attr:`slime_launch.config.Settings.kind`.

    Attributes:
        generates: Engines generate; else nobody takes weights.
        trains: There are trainers. They may only evaluate.
        rows: The form of the rows of ``--prompt-data`` where they are trained on as they are; ``None`` for prompts.
        is_recorded: Rollouts come from files.
        only_evaluates: Nothing is trained on: the run is one evaluation.
        has_held_out: There are held-out sets to evaluate on.
        has_critic: The algorithm has a critic.
        has_reference: The policy is compared with a reference model.
        trainer_sleeps: Trainers give memory back while engines generate.
        engines_sleep: Engines give memory back while trainers work.
    """

    generates: bool
    trains: bool
    rows: Rows | None
    is_recorded: bool
    only_evaluates: bool
    has_held_out: bool
    has_critic: bool
    has_reference: bool
    trainer_sleeps: bool
    engines_sleep: bool

    @property
    def updates(self) -> bool:
        """Whether trainers change weights."""
        return self.trains and not self.only_evaluates

    @property
    def sends(self) -> bool:
        """Whether engines get the trainers' weights."""
        return self.generates and self.trains

    @property
    def hands_over(self) -> bool:
        """Whether device memory changes hands."""
        return self.trainer_sleeps or self.engines_sleep
