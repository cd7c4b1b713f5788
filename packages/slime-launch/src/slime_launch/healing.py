"""A run whose trainers are lost goes on with others, from its last checkpoint: what it does then is here alone.

    run ──▶ a rank dies or hangs ──▶ end the other ranks ──▶ start all again ──▶ run, from the last checkpoint
                                     (engines and router stay up)

What follows is the way of a new command that continues a run: the manifest says where it stands, rollouts that were
written down since are trained on again, and the engines are sent the weights. So the end is the same, to the bit where
training is.
"""

from __future__ import annotations

import dataclasses

from slime_launch.errors import RestartsExhaustedError, TrainerLostError
from slime_launch.loop import Parts, run_loop


def run_healing(parts: Parts) -> Parts:
    """Run the loop to its end; start the trainers again where they are lost. Returns what it worked with at the end.

    Raises:
        TrainerLostError: They were, and the run has no ``--save``, or may start none again.
        RestartsExhaustedError: They were lost once more than ``--trainer-max-restarts``.
    """
    most = parts.settings.cluster.trainer_max_restarts if parts.state.can_resume else 0
    causes: list[TrainerLostError] = []
    while True:
        try:
            if causes:
                parts = begin_again(parts)
            run_loop(parts)
        except TrainerLostError as error:
            causes.append(error)
            if not most:
                raise
            if len(causes) > most:
                raise RestartsExhaustedError(
                    f"the trainers were lost once more after {most} restarts, as many as --trainer-max-restarts "
                    f"allows; the first cause: {causes[0]}"
                ) from error
            parts.console.line(f"{error}\nstarting the trainers again (restart {len(causes)} of {most})")
        else:
            return parts


def begin_again(parts: Parts) -> Parts:
    """New trainers at the last checkpoint, and the run's state there. What was being generated meanwhile ends."""
    state = parts.state.reopen()
    start = "the weights it began with" if state.resume_from is None else f"checkpoint {state.iteration}"
    if parts.memory.engines_sleep:
        parts.rollout.cancel()
        parts.memory.to_restart()
    with parts.console.wait("start the trainers again", done=f"the trainers are up again, from {start}") as wait:

        def poll() -> None:
            wait.update(parts.rollout.progress().note)

        parts.trainers.restart(state.resume_from, on_poll=poll)
        parts.rollout.cancel()
    parts.memory.to_restart()
    parts.tracker.rewind(state.iteration)
    return dataclasses.replace(parts, state=state)
