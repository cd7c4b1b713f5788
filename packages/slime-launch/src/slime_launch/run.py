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
from slime_core.errors import SlimeError
from slime_core.files import open_to_append
from slime_core.former_names import renamed
from slime_core.types import Account
from slime_core.words import counted
from slime_launch.batch_spec import batch_spec
from slime_launch.calls import Watch, Worker, gather, stopped_line
from slime_launch.canary import Canary
from slime_launch.cluster import cluster_notices
from slime_launch.config import Settings
from slime_launch.console import RunConsole
from slime_launch.derived import (
    answers_in_time,
    canary_limit,
    engine_dtype,
    is_quantized,
    limit_threads,
    num_engines,
    num_spare_engines,
    precision_notes,
    row_limit,
    turn_log_of,
)
from slime_launch.devices import link_of, run_device
from slime_launch.engine_nodes import EngineSeats
from slime_launch.errors import PlacementError, RayDiedError, RestartsExhaustedError, RunError, Stopped
from slime_launch.handover import Handover
from slime_launch.healing import run_healing
from slime_launch.kind import RunKind
from slime_launch.loop import Parts
from slime_launch.manifest import locked
from slime_launch.megatron_flags import argument_notes
from slime_launch.output_dir import make_room
from slime_launch.placement import (
    BundleLayout,
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
from slime_launch.validate import hand_over_notes, micro_batch_notes, notices
from slime_launch.wandb_run import WandbRun
from slime_launch.weights import NothingToSend, NoTraining, Sending, Training
from slime_megatron.service import MegatronConfig
from slime_rollout.engine import EngineConfig, Route, in_words, ways_of
from slime_rollout.service import DataSpec, EngineRestartsError, GenerationSpec, hook_args_of

__getattr__ = renamed(__name__, {"GIVE_UP_SECONDS": "slime_launch.derived.GIVE_UP_SECONDS"})


def run(checked: Checked, watch: Watch, ahead: RayAhead | None = None) -> int:
    """Run a command that was checked, to its end; ``watch`` listens to signals already. Ray may be there ``ahead``.

    Returns:
        0; 1 if a part of the run failed; 2 if it could not be started; 3 if the trainers were lost too often; 128 + n
        if signal n stopped it.
    """
    megatron, directory = checked.settings.megatron, checked.settings.run.output_dir
    output_dir, save = Path(str(directory)), megatron.save
    try:
        with contextlib.ExitStack() as stack:
            for path, flag in own_directories(checked.settings.kind, megatron, directory).items():
                stack.enter_context(locked(path, check=watch.check, flag=flag))
            checked = look_again(checked)
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


def own_directories(kind: RunKind, megatron: MegatronConfig, output_dir: str | None) -> dict[Path, str]:
    """The directories that the run writes to and no other run meanwhile, each with its flag."""
    critic = megatron.critic_save if kind.has_critic else None
    given = {"--save": megatron.save, "--critic-save": critic, "--output-dir": output_dir}
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
                checked, output_dir / "logs", state=state, console=console, watch=watch, stack=stack, ahead=ahead
            )
            tracker = Tracker(
                output_dir,
                iteration=state.iteration if manifest is not None else None,
                tensorboard=not settings.run.disable_tensorboard,
                wandb_run=start_wandb(settings, output_dir, resumed=manifest is not None),
            )
            stack.callback(tracker.close)
            parts = turn_the_crank(parts_of(checked, trainers, rollout, state, tracker, console))
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


def parts_of(
    checked: Checked,
    trainers: TrainerGroup,
    rollout: RolloutWorker,
    state: RunState,
    tracker: Tracker,
    console: RunConsole,
) -> Parts:
    """The parts of the loop; empty ones in place of those that the run does not have."""
    settings, kind = checked.settings, checked.settings.kind
    keeps_weights = settings.rollout.selection.update_weights_interval > 1
    memory = Handover(kind, trainers, rollout, console, keeps_weights=keeps_weights)
    sending: Sending | NothingToSend = NothingToSend()
    if kind.sends:
        limit = canary_limit(settings.engine, settings.megatron, settings.rollout)
        canary = Canary(limit, checked.shape, trainers, rollout, memory)
        ahead = settings.rollout.selection.async_buffer_size is not None
        sending = Sending(trainers, rollout, memory, console, canary, ahead=ahead)
    return Parts(
        settings=settings,
        trainers=trainers,
        rollout=rollout,
        memory=memory,
        training=Training(trainers, rollout, memory, console) if kind.trains else NoTraining(),
        sending=sending,
        state=state,
        tracker=tracker,
        console=console,
    )


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
    state: RunState,
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
    given, cluster, address = checked.settings, checked.settings.placed, os.environ.get("RAY_ADDRESS")
    kind = given.kind
    if cluster.spare_gpus and address is None:
        raise PlacementError(
            f"--rollout-max-num-gpus {cluster.rollout_max_num_gpus} adds engines as nodes join, and no node can join "
            "the Ray that a run starts by itself; set RAY_ADDRESS to a cluster's, of `ray start --head`"
        )
    with console.wait("start Ray", done="started Ray"):
        runtime = stack.enter_context(ahead or ray_runtime(cluster, address=address))
        watch.add(runtime.check)
        watch.listen(at_once=False)
    layout = plan_layout(cluster, cuda=runtime.cuda, trains=kind.trains)
    console.line(describe(layout, external=kind.generates))
    for note in layout_notes(layout, hands_over=kind.hands_over):
        console.line(note)
    with console.wait("wait for room on the Ray cluster") as wait:
        how: dict[str, Any] = {"grows": cluster.spare_gpus > 0, "timeout": cluster.ray_placement_timeout}
        place = place_run(layout, watch=watch, on_wait=wait.update, **how)
    seats = None
    if place.on_several_nodes:
        watch.nodes = lambda: set(bundle_nodes(place.group).values())
        console.line(where_it_is(place, spare=cluster.spare_gpus))
    if place.rollout and place.trainer:
        checked, line = with_transport(checked, place)
        console.line(line)
    if place.on_several_nodes:
        spare = num_spare_engines(cluster, given.engine)
        seats = EngineSeats.of(place, checked.num_engines, log_dir, spare=spare) if place.rollout else None
    elif not layout.cuda:
        checked = with_engine(checked, limit_threads(checked.settings.engine, engines=checked.num_engines))
    environment = cluster.train_environment
    trainers = TrainerGroup.start(place, given.megatron, environment=environment, log_dir=log_dir, watch=watch)
    stack.callback(trainers.kill)
    ranks = trainers.data_parallel_size
    batches = batch_spec(given, checked.shape, ranks, store=state.store, can_resume=state.can_resume)
    source = source_spec(checked, log_dir)
    rollout = RolloutWorker.start(place, source, batches, seats=seats, log_dir=log_dir, watch=watch)
    stack.callback(rollout.close)
    spec = trainer_spec(checked, state.resume_from, log_dir)
    parts = ["engines", "router"] * kind.generates + ["trainers"] * kind.trains
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    with console.wait(f"start {what}", done=f"{what} are up") as wait:

        def up(pending: dict[Any, Worker]) -> list[Any]:
            return gather(pending, on_poll=lambda: wait.update(rollout.progress().note))

        if kind.engines_sleep and layout.cuda and layout.shared:  # one after the other, as there is room for one
            found, *_ = up(rollout.open())
            rollout.sleep()
            up(trainers.build(spec))
        else:
            found, *_ = up(rollout.open() | trainers.build(spec))
            if kind.engines_sleep:
                rollout.sleep()
    for notice in found or ():
        console.line(notice)
    return trainers, rollout


def opening_lines(checked: Checked, state: RunState) -> list[str]:
    """Lines about a run, and what of its command could be otherwise; of a replay only which steps it trains on."""
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
    lines += notices(settings) + micro_batch_notes(settings, on_cpu=on_cpu)
    lines += hand_over_notes(settings.kind, settings.cluster, on_cpu=on_cpu)
    lines += start_lines(checked) + cluster_notices(os.environ.get("RAY_ADDRESS"))
    if settings.megatron.save is None and settings.kind.updates:
        lines.append("no --save: this run writes no checkpoint and cannot be continued")
    return lines


def start_lines(checked: Checked) -> list[str]:
    """Lines about settings that the command leaves open, and about those without effect."""
    settings = checked.settings
    begins = start_notes(settings.megatron, checked.manifest, checked.weights)
    notes = argument_notes(settings.megatron, checked.shape) if checked.notes is None else checked.notes
    return [*precision_notes(settings.megatron, settings.origins), *begins, *notes, *checked.said]


def trainer_spec(checked: Checked, resume_from: Path | None, log_dir: Path) -> TrainerSpec:
    """Settings of a trainer rank."""
    settings, kind = checked.settings, checked.settings.kind
    model = settings.rollout.data.hf_checkpoint
    return TrainerSpec(
        config=settings.megatron if checked.weights is None else checked.weights.into(settings.megatron),
        algorithm=settings.algorithm,
        shape=checked.shape,
        resume_from=str(resume_from) if resume_from is not None else None,
        output_dir=str(log_dir.parent.resolve()),
        overrides=checked.overrides,
        quantized_as=model if kind.generates and is_quantized(model) else None,
        take_turns=kind.trainer_sleeps,
        most_behind=settings.rollout.selection.most_behind,
        weights_first=kind.generates and not kind.trainer_sleeps,
        args=hook_args_of(settings.rollout, settings.flags()),
        only_evaluates=kind.only_evaluates,
    )


def source_spec(checked: Checked, log_dir: Path) -> SourceSpec:
    """Settings of the source of batches."""
    settings = checked.settings
    if settings.run.load_debug_rollout_data is not None:
        return RecordedSpec(settings.run.load_debug_rollout_data)
    if settings.kind.rows is not None:
        longest = row_limit(settings.rollout, checked.shape.max_position_embeddings)
        return DataSpec(rollout=settings.rollout, rows=settings.kind.rows, max_length=longest)
    return GenerationSpec(
        engine=answers_in_time(settings.engine, settings.run.stall_timeout),
        rollout=settings.rollout,
        num_engines=num_engines(settings.cluster, settings.engine),
        num_spare=num_spare_engines(settings.placed, settings.engine),
        num_gpus=settings.placed.rollout_gpus,
        topology=checked.topology,
        dtype=engine_dtype(settings.megatron, settings.rollout),
        context_length=checked.shape.max_position_embeddings,
        seed=settings.megatron.seed,
        log_dir=str(log_dir.resolve()),
        flags=settings.flags(),
        colocate=settings.placed.colocate,
        engines_sleep=settings.kind.engines_sleep,
        weights_follow=settings.kind.trains,
        turn_log=turn_log_of(settings.megatron, settings.rollout),
    )


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


def with_engine(checked: Checked, engine: EngineConfig) -> Checked:
    """The same command with other settings of engines."""
    return dataclasses.replace(checked, settings=dataclasses.replace(checked.settings, engine=engine))


def with_transport(checked: Checked, place: Placement) -> tuple[Checked, str]:
    """The command with the fastest transport that is possible, unless one was given; and a line that says why.

    Raises:
        PlacementError: The transport that was given cannot be used.
    """
    cuda, engine, gpus = place.layout.cuda, checked.settings.engine, checked.settings.engine.rollout_num_gpus_per_engine
    route = Route(
        engines=max(1, len(place.rollout) // gpus),
        within_node=place.sends_within_node,
        cuda=cuda,
        shared=place.layout.shared,
        senders=len(place.senders(gpus)),
        size=engine_weights(checked.settings, checked.shape),
        link=link_of(cuda),
    )
    chosen, ways = check_transport(engine, route), ways_of(engine, route)
    engine = engine.adapted(update_weight_transport=chosen.name)
    return with_engine(checked, engine), f"weights travel by {in_words(ways)}"


def describe(layout: BundleLayout, *, external: bool) -> str:
    """Where the run lives, in one line; engines that have no room in it are ``external`` or not there."""
    kind = "GPUs" if layout.cuda else "CPU worker processes, because there is no CUDA"
    if not layout.trainer:
        return f"placement: {len(layout.rollout) or 'external engines'} for generation ({kind}); no trainers"
    if not layout.rollout:
        return f"placement: {len(layout.trainer)} for training ({kind}); {'external' if external else 'no'} engines"
    shared = " taking turns" if layout.shared else ""
    return f"placement: {len(layout.trainer)} for training, {len(layout.rollout)} for generation{shared} ({kind})"
