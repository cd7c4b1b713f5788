"""A whole run: check, start Ray and the two halves, turn the crank, stop everything, report."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from slime_convert.errors import ConvertError
from slime_core.errors import SlimeError
from slime_launch.calls import Watch, stopped_line
from slime_launch.console import RunConsole
from slime_launch.errors import RayDiedError, RunError, Stopped
from slime_launch.loop import Parts, run_sync
from slime_launch.manifest import locked
from slime_launch.preflight import Checked, look_again
from slime_launch.ray_runtime import cluster_notices
from slime_launch.report import make_report, report_lines, write_report
from slime_launch.resume import RunState
from slime_launch.startup import Startup
from slime_launch.tracking import Tracker, read_rows
from slime_launch.validate import global_batch_size, notices


def run(checked: Checked, watch: Watch) -> int:
    """Run a command that was checked, to its end.

    Args:
        checked: From :func:`slime_launch.preflight.preflight`, with an output directory.
        watch: Listens to signals already.

    Returns:
        0; 1 if a part of the run failed; 2 if it could not be started; 128 + n if signal n stopped it.
    """
    settings = checked.settings
    try:
        save = settings.megatron.save
        with contextlib.nullcontext() if save is None else locked(Path(save), check=watch.check):
            checked = look_again(checked)
            output_dir = Path(str(settings.run.output_dir))
            (output_dir / "logs").mkdir(parents=True, exist_ok=True)
            console = RunConsole(sys.stdout, output_dir / "logs" / "launch.log")
            # What Ray prints goes to a file, which stays open: Ray still holds it when the interpreter exits.
            ray_log = (output_dir / "logs" / "ray.log").open("a")
            with contextlib.redirect_stdout(ray_log):
                drive(checked, output_dir, console, watch)
    except Stopped as stopped:
        sys.stderr.write(stopped_line(stopped.signum))
        return stopped.exit_code
    except RunError as error:
        print(f"slime-launch: {error}", file=sys.stderr)
        return 1
    except (SlimeError, ConvertError) as error:
        print(f"slime-launch: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a directory that was taken away
        print(f"slime-launch: a file of the run can't be written or read: {error}", file=sys.stderr)
        return 1
    return 0


def drive(checked: Checked, output_dir: Path, console: RunConsole, watch: Watch) -> None:
    """Start everything, turn the crank, stop everything, report.

    Raises:
        Stopped: A signal asked the run to stop.
        RunError: A part failed after the loop had begun.
        SlimeError: Something could not be started.
    """
    started = time.monotonic()
    settings, manifest = checked.settings, checked.manifest
    state = RunState(settings, manifest, checked.weights, output_dir=output_dir)
    if manifest is not None:
        console.line(f"continuing the run in {settings.megatron.save} after {state.iteration} rollouts")
    elif read_rows(output_dir):
        console.line(f"{output_dir} holds the metrics of an earlier run; this one replaces them")
    for notice in (*notices(settings), *cluster_notices(os.environ.get("RAY_ADDRESS"))):
        console.line(notice)
    if settings.megatron.save is None:
        console.line("no --save: this run writes no checkpoint and cannot be continued")
    with contextlib.ExitStack() as stack:
        startup = Startup(checked, output_dir / "logs", console, watch, stack)
        try:
            trainers, rollout = startup.halves(startup.ray(), resume_from=state.resume_from)
            tracker = Tracker(
                output_dir,
                iteration=state.iteration if manifest is not None else None,
                tensorboard=not settings.run.disable_tensorboard,
            )
            stack.callback(tracker.close)
            turn_the_crank(
                Parts(
                    settings=settings,
                    shape=checked.shape,
                    global_batch_size=global_batch_size(settings),
                    trainers=trainers,
                    rollout=rollout,
                    state=state,
                    tracker=tracker,
                    console=console,
                )
            )
        except RayDiedError as error:
            leave_at_once(error)
        with console.wait("stop engines, trainers and Ray"):
            trainers.leave()
            stack.close()
    minutes = (time.monotonic() - started) / 60
    report = make_report(tracker.rows, output_dir=output_dir, checkpoint=state.resume_from, minutes=minutes)
    write_report(report)
    for line in report_lines(report):
        console.line(line)


def turn_the_crank(parts: Parts) -> None:
    """Run the loop; what goes wrong from here on is a failure of the run, not of the command."""
    try:
        run_sync(parts)
    except RunError:
        raise
    except SlimeError as error:
        raise RunError(str(error)) from error


def leave_at_once(error: RayDiedError) -> NoReturn:
    """Exit at once: without Ray nothing can be stopped in order; the supervisor ends every process."""
    print(f"slime-launch: {error}", file=sys.stderr, flush=True)
    os._exit(1)
