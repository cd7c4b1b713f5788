"""A whole run: start Ray and both halves, turn the crank, stop everything, report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

from slime_convert.errors import ConvertError
from slime_convert.shape import ModelShape
from slime_core.errors import SlimeError
from slime_core.files import open_to_append
from slime_core.words import counted
from slime_launch.calls import Watch, Worker, gather, stopped_line
from slime_launch.canary import Canary
from slime_launch.cluster import cluster_notices
from slime_launch.config import Settings
from slime_launch.console import RunConsole
from slime_launch.derived import precision_notes
from slime_launch.devices import link_of, run_device
from slime_launch.engine_nodes import EngineRoom
from slime_launch.errors import PlacementError, RayDiedError, RestartsExhaustedError, RunError, Stopped
from slime_launch.handover import Handover
from slime_launch.healing import run_healing
from slime_launch.loop import Parts
from slime_launch.manifest import locked
from slime_launch.megatron_flags import argument_notes
from slime_launch.output_dir import make_room
from slime_launch.placement import (
    Layout,
    Placement,
    bundle_nodes,
    check_transport,
    layout_notes,
    live_nodes,
    place_run,
    plan_layout,
)
from slime_launch.plan.engines import engine_weights
from slime_launch.preflight import Checked, look_again
from slime_launch.ray_runtime import RayAhead, ray_runtime
from slime_launch.report import make_report, report_lines, scoring_problem, write_report
from slime_launch.resolved import write_resolved
from slime_launch.resume import RunState, start_notes
from slime_launch.rollouts import RolloutWorker
from slime_launch.sources import RecordedSpec, SourceSpec
from slime_launch.stalls import StallWatch
from slime_launch.tracking import Tracker
from slime_launch.trainers import TrainerGroup, TrainerSpec
from slime_launch.validate import (
    canary_limit,
    engine_dtype,
    hand_over_notes,
    is_quantized,
    limit_threads,
    micro_batch_notes,
    notices,
    num_engines,
    num_spare_engines,
    row_limit,
)
from slime_launch.wandb_run import WandbRun
from slime_rollout.data import Account
from slime_rollout.data_service import DataSpec
from slime_rollout.engine import EngineRestartsError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.transports import Route, in_words, transports
from slime_rollout.generation_service import TURNS_FILE, GenerationSpec
from slime_rollout.hooks import hook_args_of

GIVE_UP_SECONDS = 30.0  # to leave an update of weights that an engine does not answer


def run(checked: Checked, watch: Watch, ahead: RayAhead | None = None) -> int:
    """Run a command that was checked, to its end; ``watch`` listens to signals already. Ray may be there ``ahead``.

    Returns:
        0; 1 if a part of the run failed; 2 if it could not be started; 3 if the trainers were lost too often; 128 + n
        if signal n stopped it.
    """
    settings = checked.settings
    try:
        output_dir = Path(str(settings.run.output_dir))
        with contextlib.ExitStack() as stack:
            for directory, flag in own_directories(settings).items():
                stack.enter_context(locked(directory, check=watch.check, flag=flag))
            checked = look_again(checked)
            save = settings.megatron.save
            moved = list(make_room(output_dir, None if save is None or checked.manifest is None else Path(save)))
            (output_dir / "logs").mkdir(parents=True, exist_ok=True)
            write_resolved(checked, output_dir)
            console = RunConsole(sys.stdout, output_dir / "logs" / "launch.log")
            for line in moved:
                console.line(line)
            # What Ray prints goes to a file, which stays open: Ray still holds it when the interpreter exits.
            ray_log = open_to_append(output_dir / "logs" / "ray.log")
            with contextlib.redirect_stdout(ray_log):
                drive(checked, output_dir, console, watch, ahead)
    except Stopped as stopped:
        sys.stderr.write(stopped_line(stopped.signum, watch.launcher))
        return stopped.exit_code
    except RunError as error:
        print(f"slime-launch: {error}", file=sys.stderr)
        return error.exit_code
    except (SlimeError, ConvertError) as error:
        print(f"slime-launch: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a directory that was taken away
        print(f"slime-launch: a file of the run can't be written or read: {error}", file=sys.stderr)
        return 1
    return 0


def own_directories(settings: Settings) -> dict[Path, str]:
    """The directories that the run writes to and no other run meanwhile, each with its flag."""
    critic = settings.megatron.critic_save if settings.algorithm.needs_critic else None
    given = {"--save": settings.megatron.save, "--critic-save": critic, "--output-dir": settings.run.output_dir}
    found: dict[Path, str] = {}
    for flag, path in given.items():
        if path is not None and Path(path).resolve() not in map(Path.resolve, found):
            found[Path(path)] = flag
    return found


def drive(checked: Checked, output_dir: Path, console: RunConsole, watch: Watch, ahead: RayAhead | None = None) -> None:
    """Start everything, turn the crank, stop everything, report.

    Raises:
        Stopped: A signal asked the run to stop.
        RunError: A part failed after the loop had begun, or samples were lost or came twice.
        SlimeError: Something could not be started.
    """
    started = time.monotonic()
    settings, manifest = checked.settings, checked.manifest
    state = RunState(settings, manifest, checked.weights, output_dir=output_dir)
    for line in opening_lines(checked, state):
        console.line(line)
    with contextlib.ExitStack() as stack:
        stalls = StallWatch(settings.run.stall_timeout, watch, output_dir / "logs", lambda: console.silent)
        stack.callback(stalls.close)
        console.on_progress = stalls.progress
        try:
            trainers, rollout = start(
                checked,
                output_dir / "logs",
                resume_from=state.resume_from,
                console=console,
                watch=watch,
                stack=stack,
                ahead=ahead,
            )
            tracker = Tracker(
                output_dir,
                iteration=state.iteration if manifest is not None else None,
                tensorboard=not settings.run.disable_tensorboard,
                wandb_run=start_wandb(settings, output_dir, resumed=manifest is not None),
            )
            stack.callback(tracker.close)
            memory = Handover(settings, trainers, rollout, console)
            parts = turn_the_crank(
                Parts(
                    settings=settings,
                    shape=checked.shape,
                    trainers=trainers,
                    rollout=rollout,
                    memory=memory,
                    canary=Canary(canary_limit(settings), checked.shape, trainers, rollout, memory),
                    state=state,
                    tracker=tracker,
                    console=console,
                )
            )
            account = parts.rollout.account()
        except RayDiedError as error:  # without it nothing can be stopped in order; the supervisor ends every process
            print(f"slime-launch: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        except BaseException as error:
            stalls.stop(error)
            stop_all(stack)
            raise
        stalls.stop(None)
        with console.wait("stop engines, trainers and Ray"):
            trainers.leave()
            stop_all(stack)
    tell(parts, output_dir, account, minutes=(time.monotonic() - started) / 60)


def tell(parts: Parts, output_dir: Path, account: Account | None, *, minutes: float) -> None:
    """Write and print the report of a run that has come to its end.

    Raises:
        RunError: Samples were lost or came twice, or most of them could not be scored.
    """
    console, settings = parts.console, parts.settings
    report = make_report(
        parts.tracker.rows,
        output_dir=output_dir,
        checkpoint=parts.state.resume_from,
        minutes=minutes,
        account=account,
        evaluated=parts.state.evaluated,
    )
    write_report(report)
    for line in report_lines(report):
        console.line(line)
    if account is not None and account.problem is not None:
        raise RunError(
            f"{account.problem}; see logs/rollout.log for the first rollout with that, and look at user-defined data "
            "sources, filters and rollout functions"
        )
    size = settings.rollout.selection.rollout_batch_size * settings.samples_per_prompt
    if (problem := scoring_problem(report, size)) is not None:
        raise RunError(problem)


def stop_all(stack: contextlib.ExitStack) -> None:
    """Stop what was started. What fails then is said, and hides nothing of why: the supervisor ends what is left."""
    try:
        stack.close()
    except Exception as error:
        print(f"slime-launch: could not stop everything in order: {type(error).__name__}: {error}", file=sys.stderr)


def start_wandb(settings: Settings, output_dir: Path, *, resumed: bool) -> WandbRun | None:
    """The run in W&B, if one is wanted."""
    if not settings.tracking.use_wandb:
        return None
    steps = settings.run.num_steps_per_rollout
    return WandbRun(settings.tracking, settings.public_flags(), output_dir, resumed=resumed, steps_per_rollout=steps)


def turn_the_crank(parts: Parts) -> Parts:
    """Run the loop; what goes wrong from here on is a failure of the run, not of the command."""
    try:
        return run_healing(parts)
    except RunError:
        raise
    except EngineRestartsError as error:
        raise RestartsExhaustedError(str(error)) from error
    except SlimeError as error:
        raise RunError(str(error)) from error


def start(
    checked: Checked,
    log_dir: Path,
    *,
    resume_from: Path | None,
    console: RunConsole,
    watch: Watch,
    stack: contextlib.ExitStack,
    ahead: RayAhead | None = None,
) -> tuple[TrainerGroup, RolloutWorker]:
    """Start Ray, unless it is there, then engines and trainer ranks side by side; ``stack`` gets the way to stop each.

    Raises:
        PlacementError: No cluster, no room, or GPUs would be shared.
        SlimeError: A part does not come up, with the end of its log.
    """
    settings, cluster, address = checked.settings, checked.settings.placed, os.environ.get("RAY_ADDRESS")
    if cluster.spare_gpus and address is None:
        raise PlacementError(
            f"--rollout-max-num-gpus {cluster.rollout_max_num_gpus} adds engines as nodes join, and no node can join "
            "the Ray that a run starts by itself; set RAY_ADDRESS to a cluster's, of `ray start --head`"
        )
    with console.wait("start Ray", done="started Ray"):
        runtime = stack.enter_context(ahead or ray_runtime(cluster, address=address))
        watch.add(runtime.check)
        watch.listen(at_once=False)
    layout = plan_layout(cluster, cuda=runtime.cuda, trains=settings.trains)
    console.line(describe(layout, external=settings.generates))
    for note in layout_notes(layout, hands_over=settings.trainer_sleeps or settings.engines_sleep):
        console.line(note)
    with console.wait("wait for room on the Ray cluster") as wait:
        how: dict[str, Any] = {"grows": cluster.spare_gpus > 0, "timeout": cluster.ray_placement_timeout}
        place = place_run(layout, watch=watch, on_wait=wait.update, **how)
    room = None
    if place.on_several_nodes:
        watch.nodes = lambda: set(bundle_nodes(place.group).values())
        console.line(where_it_is(place, spare=cluster.spare_gpus))
    if place.rollout and place.trainer:
        settings, line = with_transport(settings, checked.shape, place)
        console.line(line)
    if place.on_several_nodes:
        spare = num_spare_engines(settings)
        room = EngineRoom.of(place, checked.num_engines, log_dir, spare=spare) if place.rollout else None
    elif not layout.cuda:
        settings = limit_threads(settings, engines=checked.num_engines)
    environment = cluster.train_environment
    trainers = TrainerGroup.start(place, settings.megatron, environment=environment, log_dir=log_dir, watch=watch)
    stack.callback(trainers.kill)
    source = source_spec(checked, settings, log_dir)
    rollout = RolloutWorker.start(place, source, room=room, log_dir=log_dir, watch=watch)
    stack.callback(rollout.close)
    spec = trainer_spec(checked, settings, resume_from, log_dir)
    parts = ["engines", "router"] * settings.generates + ["trainers"] * settings.trains
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    with console.wait(f"start {what}", done=f"{what} are up") as wait:

        def up(pending: dict[Any, Worker]) -> list[Any]:
            return gather(pending, on_poll=lambda: wait.update(rollout.progress().note))

        if settings.engines_sleep and layout.cuda and layout.shared:  # one after the other, as there is room for one
            found, *_ = up(rollout.open())
            rollout.sleep()
            up(trainers.build(spec))
        else:
            found, *_ = up(rollout.open() | trainers.build(spec))
            if settings.engines_sleep:
                rollout.sleep()
    for notice in found or ():
        console.line(notice)
    return trainers, rollout


def opening_lines(checked: Checked, state: RunState) -> list[str]:
    """What a run is, and what of its command could be otherwise; of a replay, whose command is the run's, the first."""
    settings = checked.settings
    if checked.replays:
        begins = f"checkpoint {state.resume_from}" if state.resume_from is not None else "the run's beginning"
        first, last = state.iteration + 1, settings.num_rollout
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        return [f"training on {steps} again, from {begins}"]
    lines = []
    if checked.manifest is not None:
        lines.append(f"continuing the run in {settings.megatron.save} after step {state.iteration}")
    if state.evaluated is not None:
        lines.append(f"evaluating {state.evaluated}")
    on_cpu = run_device() == "cpu"
    lines += notices(settings) + micro_batch_notes(settings, on_cpu=on_cpu) + hand_over_notes(settings, on_cpu=on_cpu)
    lines += start_lines(checked) + cluster_notices(os.environ.get("RAY_ADDRESS"))
    if settings.megatron.save is None and settings.trains and not settings.only_evaluates:
        lines.append("no --save: this run writes no checkpoint and cannot be continued")
    return lines


def start_lines(checked: Checked) -> list[str]:
    """What the command leaves open, and what of it has no effect."""
    settings = checked.settings
    begins = start_notes(settings, checked.manifest, checked.weights)
    notes = argument_notes(settings, checked.shape) if checked.notes is None else checked.notes
    return [*precision_notes(settings), *begins, *notes, *checked.said]


def trainer_spec(checked: Checked, settings: Settings, resume_from: Path | None, log_dir: Path) -> TrainerSpec:
    """Settings of a trainer rank."""
    return TrainerSpec(
        config=settings.megatron if checked.weights is None else checked.weights.into(settings.megatron),
        algorithm=settings.algorithm,
        shape=checked.shape,
        resume_from=str(resume_from) if resume_from is not None else None,
        output_dir=str(log_dir.parent.resolve()),
        overrides=checked.overrides,
        quantized_as=settings.rollout.data.hf_checkpoint if settings.generates and is_quantized(settings) else None,
        take_turns=settings.trainer_sleeps,
        most_behind=settings.rollout.selection.most_behind,
        weights_first=settings.generates and not settings.trainer_sleeps,
        args=hook_args_of(settings.rollout, settings.flags()),
        only_evaluates=settings.only_evaluates,
    )


def source_spec(checked: Checked, settings: Settings, log_dir: Path) -> SourceSpec:
    """Settings of what gives the batches."""
    if settings.run.load_debug_rollout_data is not None:
        return RecordedSpec(settings.run.load_debug_rollout_data)
    if settings.rows is not None:
        longest = row_limit(settings, checked.shape.max_position_embeddings)
        return DataSpec(rollout=settings.rollout, rows=settings.rows, max_length=longest)
    return GenerationSpec(
        engine=answers_in_time(settings),
        rollout=settings.rollout,
        num_engines=num_engines(settings),
        num_spare=num_spare_engines(settings),
        num_gpus=settings.placed.rollout_gpus,
        topology=checked.topology,
        dtype=engine_dtype(settings),
        context_length=checked.shape.max_position_embeddings,
        seed=settings.megatron.seed,
        log_dir=str(log_dir.resolve()),
        flags=settings.flags(),
        colocate=settings.placed.colocate,
        engines_sleep=settings.engines_sleep,
        weights_follow=settings.trains,
        turn_log=turn_log_of(settings),
    )


def turn_log_of(settings: Settings) -> str | None:
    """Where turns and tools' results of custom generate functions are written down, in a run that can be continued."""
    save, path = settings.megatron.save, settings.rollout.sampling.custom_generate_function_path
    return None if save is None or path is None else str((Path(save) / TURNS_FILE).resolve())


def answers_in_time(settings: Settings) -> EngineConfig:
    """Settings of engines that are given up during an update before the run is said to stall: so they are blamed."""
    stall = settings.run.stall_timeout
    limit = min(settings.engine.update_weight_timeout, max(stall / 2, stall - GIVE_UP_SECONDS))
    return dataclasses.replace(settings.engine, update_weight_timeout=limit)


def where_it_is(place: Placement, *, spare: int) -> str:
    """The nodes of a run with what is on each, in one line; there may be ``spare`` more GPUs for engines."""
    nodes, live = dict.fromkeys(place.nodes.values()), live_nodes()
    where = [
        f"{live.get(node, node)} (trainer ranks: {sum(place.nodes[bundle] == node for bundle in place.trainer)}, "
        f"for engines: {sum(place.nodes[bundle] == node for bundle in place.rollout)})"
        for node in nodes
    ]
    more = f"; up to {spare} more for engines as nodes join" if spare else ""
    return f"{counted(len(nodes), 'node')}: {', '.join(where)}{more}"


def with_transport(settings: Settings, shape: ModelShape, place: Placement) -> tuple[Settings, str]:
    """Settings with the fastest transport that is possible, unless one was given; and a line that says why.

    Raises:
        PlacementError: The transport that was given cannot be used.
    """
    cuda, engine, gpus = place.layout.cuda, settings.engine, settings.engine.rollout_num_gpus_per_engine
    route = Route(
        engines=max(1, len(place.rollout) // gpus),
        within_node=place.sends_within_node,
        cuda=cuda,
        shared=place.layout.shared,
        senders=len(place.senders(gpus)),
        size=engine_weights(settings, shape),
        link=link_of(cuda),
    )
    ways = transports(engine, route)
    engine = engine.adapted(update_weight_transport=check_transport(ways).name)
    return dataclasses.replace(settings, engine=engine), f"weights travel by {in_words(ways)}"


def describe(layout: Layout, *, external: bool) -> str:
    """Where the run lives, in one line; engines that have no room in it are ``external`` or not there."""
    kind = "GPUs" if layout.cuda else "CPU worker processes, because there is no CUDA"
    if not layout.trainer:
        return f"placement: {len(layout.rollout) or 'external engines'} for generation ({kind}); no trainers"
    if not layout.rollout:
        return f"placement: {len(layout.trainer)} for training ({kind}); {'external' if external else 'no'} engines"
    shared = " taking turns" if layout.shared else ""
    return f"placement: {len(layout.trainer)} for training, {len(layout.rollout)} for generation{shared} ({kind})"
