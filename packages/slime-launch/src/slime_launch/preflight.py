"""Everything that can be found out before anything is started: files, directories, ports. Writes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from slime_convert.errors import ConvertError
from slime_convert.formats.hf import open_model
from slime_convert.mapping import weight_map
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.flags import collected_problems
from slime_core.schedule import check_pairs
from slime_core.types import RolloutColumns
from slime_core.words import counted
from slime_launch.cluster import check_token
from slime_launch.config import RunConfig, Settings
from slime_launch.derived import engine_dtype, num_engines, row_limit
from slime_launch.devices import find_device, run_device
from slime_launch.disk_space import check_disk_space, check_written, written_directories, written_files
from slime_launch.errors import PreflightError, Problems
from slime_launch.kind import RunKind
from slime_launch.manifest import Manifest
from slime_launch.names import is_published, with_paths
from slime_launch.overrides import Overrides, read_overrides
from slime_launch.resume import StartWeights, find_run, start_weights
from slime_launch.switches import check_switched_off
from slime_launch.validate import (
    check_on_cpu,
    check_quantized,
    check_settings,
    check_shape,
    check_whole_engines,
    length_notes,
)
from slime_launch.wandb_run import check_wandb
from slime_megatron.service import (
    check_algorithm,
    check_checkpoint,
    check_fits,
    check_megatron_args,
    check_memory,
    find_checkpoint,
    teacher_source,
    trained_roles,
)
from slime_rollout.checks import (
    Measured,
    check_hooks,
    check_prompt_data,
    check_rows,
    check_stop_ids,
    count_rows,
    data_notes,
    measure_prompts,
    measure_rows,
    read_eval_sets,
    split_slice,
)
from slime_rollout.config import RolloutConfig
from slime_rollout.engine import (
    EnginePlan,
    EngineSpec,
    Topology,
    check_flags,
    check_router_port,
    check_runs_here,
    has_sglang,
    importable_in,
    missing_sglang,
    plan_engines,
    topology_of,
)
from slime_rollout.service import DataSpec, hook_args_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A command that can be started.

    Attributes:
        manifest: The run in ``--save`` that it continues, if there is one.
        weights: The weights that the run begins with; ``None`` without trainers.
        overrides: Settings of roles that differ from the flags.
        topology: What ``--sglang-config`` holds.
        packages: What is installed, and ``notes`` on Megatron's arguments, if they were found out ahead.
        environment: The variables that the run may depend on, as the command was given them; Ray adds some of its own.
        said: How the data is read, and what a user should know of it, a line each.
        replays: Steps of a run are trained on again.
    """

    settings: Settings
    shape: ModelShape
    manifest: Manifest | None
    weights: StartWeights | None
    overrides: Overrides
    topology: Topology | None
    num_engines: int
    packages: dict[str, dict[str, str] | None] | None = None
    notes: Sequence[str] | None = None
    environment: Mapping[str, str] | None = None
    said: Sequence[str] = ()
    replays: bool = False


def preflight(settings: Settings, known: Sequence[str] = (), *, first_rollout: int = 0) -> Checked:
    """Check a command before Ray, an engine or a trainer is started. All checks run, whatever the others find.

    ``known`` are problems of the settings that were found already; they are reported with the others. A new run on
    recorded rollouts begins with ``first_rollout``.

    Raises:
        SlimeError: Something is wrong: everything that is, a line each, with what to do.
        ConvertError: The model's config cannot be used, or flags contradict it.
    """
    problems = Problems(known, settings.unread)
    settings = with_paths(settings, problems)
    found = look(settings, problems, first_rollout=first_rollout)
    if not problems.lines and found.shape is not None and found.settings.kind.trains:
        problems.attempt(check_roles_fit, found.settings, found.shape, found.overrides or {})
    problems.report()
    assert found.shape is not None and found.run is not None  # their problems were reported
    manifest, weights = found.run
    settings = found.settings
    engines = num_engines(settings.cluster, settings.engine) if found.engines is None else found.engines.num_engines
    return Checked(
        settings=settings,
        shape=found.shape,
        manifest=manifest,
        weights=weights,
        overrides=found.overrides or {},
        topology=topology_of(settings.engine, settings.cluster.rollout_gpus) if settings.kind.generates else None,
        num_engines=engines,
        said=found.said,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Facts from the checks of a command; ``None`` for one that has a problem, or is not asked for.

    Attributes:
        settings: The command's, with what follows from the data: its number of rollouts.
        run: The run in ``--save``, if there is one, and the weights to begin with.
        engines: The engines of ``--sglang-config``.
        rows: Usable rows of each prompt file that is not streamed.
        not_here: Data sets of a plan for another machine that this one does not have; then no data is checked.
        measured: What the rows are in tokens, as far as they were counted.
        said: What a user should know of the data, a line each.
    """

    settings: Settings
    shape: ModelShape | None
    overrides: Overrides | None
    run: tuple[Manifest | None, StartWeights | None] | None
    engines: EnginePlan | None
    rows: dict[str, int] | None
    not_here: list[str]
    measured: Measured
    said: list[str]


def look(
    settings: Settings,
    problems: Problems,
    *,
    elsewhere: bool = False,
    planned: bool = False,
    absent: Collection[str] = (),
    first_rollout: int = 0,
    on_gpu: bool | None = None,
) -> Found:
    """Make all checks, and put what is wrong into ``problems``.

    A new run on recorded rollouts begins with ``first_rollout``.

    A command that is only ``planned`` needs no SGLang here, and no weights in the directories that are ``absent``. With
    ``elsewhere``, which is for plans, too, those checks are left out that another machine than this has to pass, which
    has GPUs or none, as ``on_gpu`` says.
    """
    not_here = absent_data(settings.rollout) if elsewhere else []
    run_config = problems.attempt(count_rollouts, settings.run, settings.rollout) or settings.run
    settings = without_checkpoints(dataclasses.replace(settings, run=run_config))
    problems.attempt(check_settings, settings)
    overrides = problems.attempt(
        read_overrides, settings.run.megatron_config_path, settings.megatron, has_critic=settings.kind.has_critic
    )
    _check_functions(settings, overrides or {}, problems)
    has_weights = str(Path(settings.rollout.data.hf_checkpoint)) not in absent
    shape = _shape(settings, problems, elsewhere=elsewhere, has_weights=has_weights, on_gpu=on_gpu)
    run = problems.attempt(find_weights, settings, absent)
    _check_checkpoints(settings, shape, run, absent, problems)
    if not elsewhere:
        problems.attempt(check_written, written_directories(settings))
        problems.attempt(check_disk_space, written_files(settings))
        problems.attempt(check_wandb, settings.tracking)
        required = settings.cluster.ray_require_token
        problems.attempt(check_token, os.environ.get("RAY_ADDRESS"), required=required)
    engines = rows = None
    if settings.kind.generates:
        rows = None if not_here else problems.attempt(check_prompt_data, settings.rollout)
        problems.attempt(check_stop_ids, settings.rollout)
        if settings.engine.sglang_router_port is not None and not elsewhere:
            problems.attempt(check_router_port, settings.engine.sglang_router_ip, settings.engine.sglang_router_port)
        engines = problems.attempt(check_engines, settings, elsewhere=elsewhere, planned=planned)
        if not elsewhere:
            problems.attempt(check_on_cpu, settings.kind, settings.rollout, settings.engine, engines)
    elif settings.kind.rows is not None:
        rows = None if not_here else problems.attempt(check_rows, settings.rollout, settings.kind.rows)
    elif run is not None:
        first = first_rollout if run[0] is None else run[0].iteration
        reward_key = settings.rollout.rewards.reward_key
        problems.attempt(check_recorded, settings.run, first, settings.algorithm, reward_key)
    has_tokenizer = rows is not None and has_weights  # the tokenizer comes with the weights
    notes = problems.attempt(data_notes, settings.rollout, settings.kind.rows or "prompts") if has_tokenizer else None
    measured, limits = Measured(), None
    if shape is not None and has_tokenizer:
        measured = problems.attempt(measure, settings.kind, settings.rollout, shape.max_position_embeddings) or measured
    if shape is not None and settings.kind.generates:
        limits = problems.attempt(length_notes, settings.kind, settings.rollout, shape)
    rows = None if rows is None else rows | {path: found.used for path, found in measured.files.items()}
    if settings.kind.rows is not None and settings.kind.trains and rows is not None:
        problems.attempt(check_held_out, settings, rows)
    return Found(
        settings=settings,
        shape=shape,
        overrides=overrides,
        run=run,
        engines=engines,
        rows=rows,
        not_here=not_here,
        measured=measured,
        said=[*(notes or ()), *(limits or ()), *measured.notices, *_row_notes(settings, rows or {})],
    )


def _shape(
    settings: Settings, problems: Problems, *, elsewhere: bool, has_weights: bool, on_gpu: bool | None
) -> ModelShape | None:
    """The model's shape, after the model was compared with the flags; the other arguments are as of :func:`look`."""
    rollout, kind = settings.rollout, settings.kind
    directory = Path(rollout.data.hf_checkpoint)
    problems.attempt(check_hf_directory, directory, weights=has_weights)
    has_config = (directory / "config.json").is_file()
    shape = problems.attempt(check_shape, rollout, settings.shape) if has_config else None
    problems.attempt(check_switched_off, settings, shape)
    if shape is not None:
        if kind.trains:
            problems.attempt(check_fits, settings.megatron, shape)
        has_gpus = run_device() == "cuda" if on_gpu is None else on_gpu
        problems.attempt(check_megatron_args, settings.megatron, shape, on_gpu=has_gpus)
        if has_weights:
            if kind.generates:
                problems.attempt(check_quantized, rollout, settings.engine, elsewhere)
            problems.attempt(check_weight_names, directory, shape, "--hf-checkpoint")
    return shape


def _row_notes(settings: Settings, rows: Mapping[str, int]) -> list[str]:
    """The rows of ``--num-epoch`` that fill no rollout, and rows that a rollout has more than once, a line each."""
    run, selection = settings.run, settings.rollout.selection
    counts, size = [rows.get(path) for path in settings.rollout.data.prompt_paths], selection.rollout_batch_size
    if not counts or None in counts:
        return []
    lines, there = [], sum(filter(None, counts))
    given = there * (run.num_epoch or 0)
    left = given - settings.num_rollout * size
    if run.num_epoch is not None and "num_rollout" not in settings.origins and left > 0:
        lines.append(
            f"--num-epoch {run.num_epoch}: {left} of {counted(given, 'row')} are left over, as a rollout takes "
            f"--rollout-batch-size {size}"
        )
    if 0 < there < size and not settings.kind.only_evaluates and settings.rollout.data.data_source_path is None:
        has, most = ("row", "it") if there == 1 else ("rows", "each of them")
        times = f"{size // there} times" if size % there == 0 else f"up to {-(-size // there)} times"
        lines.append(
            f"--prompt-data has {there:,} {has}, and a rollout of --rollout-batch-size {size:,} has {most} {times}; "
            f"give more rows, or --rollout-batch-size {there} or less"
        )
    return lines


def _check_functions(settings: Settings, overrides: Overrides, problems: Problems) -> None:
    """User-defined functions can be imported, and take what they are called with."""
    with importing_hooks():
        only = settings.kind.only_evaluates
        problems.attempt(check_algorithm, settings.algorithm, settings.megatron, overrides, only_evaluates=only)
        if settings.kind.generates:
            args = problems.attempt(hook_args_of, settings.rollout, settings.flags())
            if args is not None:
                problems.attempt(check_hooks, settings.rollout, args)


def _check_checkpoints(
    settings: Settings,
    shape: ModelShape | None,
    run: tuple[Manifest | None, StartWeights | None] | None,
    absent: Collection[str],
    problems: Problems,
) -> None:
    """The checkpoints that the trainers load are there and of the model, as far as they are not ``absent``."""
    megatron, (manifest, weights) = settings.megatron, run or (None, None)
    loaded = [megatron.critic_load, teacher_source(megatron)] if settings.kind.trains else []
    if weights is not None:
        continued = manifest.checkpoint if manifest is not None else None
        loaded.append(weights.load if continued is None else str(Path(str(megatron.save)) / continued))
        loaded.append(weights.ref_load if settings.kind.has_reference else None)
    for model in dict.fromkeys(str(path) for path in loaded if path is not None):
        if shape is None:
            problems.attempt(find_checkpoint, model)
        elif model not in absent:
            problems.attempt(check_checkpoint, model, shape)
            if Path(model) != Path(settings.rollout.data.hf_checkpoint):
                problems.attempt(check_weight_names, Path(model), shape, "the checkpoint")


def measure(kind: RunKind, rollout: RolloutConfig, context: int) -> Measured:
    """Tokenize the rows of the data sets, where that is done in seconds; ``context`` is the model's longest, in tokens.

    Raises:
        ConfigError: The tokenizer cannot be used.
        DataError: A row is not for this model: too long, or with a token that it does not have.
    """
    if kind.generates:
        return measure_prompts(rollout)
    if kind.rows is None:
        return Measured()
    return measure_rows(DataSpec(rollout=rollout, rows=kind.rows, max_length=row_limit(rollout, context)))


def absent_data(rollout: RolloutConfig) -> list[str]:
    """The data sets, held-out ones too, whose files are not on this machine."""
    try:
        held_out = [one.path for one in read_eval_sets(rollout)]
    except (ConfigError, DataError):
        held_out = []  # what is wrong with them is reported where they are checked
    paths = [*rollout.data.prompt_paths, *held_out]
    return [path for path in dict.fromkeys(paths) if not Path(split_slice(path)[0]).exists()]


def check_held_out(settings: Settings, rows: Mapping[str, int]) -> None:
    """The rows of each held-out set are enough for all data-parallel ranks, as they are a single step.

    Raises:
        ConfigError: They are fewer.
    """
    ranks = settings.megatron.data_parallel_size(settings.cluster.actor_gpus)
    for one in read_eval_sets(settings.rollout):
        found = rows.get(one.path, ranks)
        if found * settings.samples_per_prompt < ranks:
            raise ConfigError(
                f"held-out set {one.name}: {one.path} has {found} usable row{'s' * (found != 1)} for {ranks} "
                "data-parallel ranks; give it more rows, or fewer ranks"
            )


def check_weight_names(directory: Path, shape: ModelShape, what: str) -> None:
    """A Hugging Face model's files have all weights that its config asks for; only their headers are read.

    Raises:
        PreflightError: They lack some.
    """
    try:
        there = open_model(directory).tensors if any(directory.glob("*.safetensors")) else None
    except ConvertError:
        return  # what is wrong with a file is said where it is read
    if there is None:
        return
    names = list(weight_map(dataclasses.replace(shape, mtp_num_layers=0)).hf_names())  # not everybody saves those
    missing = [name for name in names if name not in there]
    if not missing or 2 * len(missing) > len(names):  # most are: other names, which their reader judges
        return
    without_head = all("lm_head" in name for name in missing)
    advice = (
        'its config says that the head is not the embedding: give the whole model, or set "tie_word_embeddings": true'
        if without_head
        else "give the whole model, or the config of this one"
    )
    raise PreflightError(
        f"{what} {directory} lacks {len(missing)} of the weights that its config asks for, such as {missing[0]}; "
        f"{advice}"
    )


def count_rollouts(run: RunConfig, rollout: RolloutConfig) -> RunConfig:
    """``--num-epoch`` as a number of rollouts: so many times all rows, divided by the rows of a rollout.

    Rows that will turn out to be too long or bad are counted, so that every part of the run knows its length before
    anything is tokenized. ``--num-rollout`` with it counts alone.

    Raises:
        ConfigError: The rows are streamed, or there are too few for one rollout.
        DataError: A file cannot be read.
    """
    data, size = rollout.data, rollout.selection.rollout_batch_size
    if run.num_rollout is not None or run.num_epoch is None or not data.prompt_paths:
        return run
    if data.streaming_data:
        raise ConfigError(
            "--num-epoch counts the rows, and --streaming-data does not read them all; give --num-rollout"
        )
    rows = count_rows(data.prompt_paths)
    if (rollouts := run.num_epoch * rows // size) == 0:
        raise ConfigError(
            f"--num-epoch {run.num_epoch}: {rows} rows are less than one rollout of --rollout-batch-size {size}; give "
            "fewer per rollout"
        )
    return dataclasses.replace(run, num_rollout=rollouts)


def without_checkpoints(settings: Settings) -> Settings:
    """The same without ``--save`` where nothing is trained: a training command with one more flag evaluates."""
    if settings.kind.updates:
        return settings
    run, megatron = settings.run, settings.megatron
    with collected_problems():  # what is wrong with other values is reported with everything else
        megatron = megatron.adapted(save=None, save_interval=None)
        run = dataclasses.replace(run, save_hf=None)
    return dataclasses.replace(settings, run=run, megatron=megatron)


def with_output(checked: Checked, output_dir: str | Path) -> Checked:
    """The same command with a directory for its output, which the flags may have left open."""
    run = dataclasses.replace(checked.settings.run, output_dir=str(output_dir))
    return dataclasses.replace(checked, settings=dataclasses.replace(checked.settings, run=run))


def find_weights(settings: Settings, absent: Collection[str] = ()) -> tuple[Manifest | None, StartWeights | None]:
    """The run in ``--save``, if there is one, and the checkpoints that the command begins with, if it trains.

    Weights that are ``absent`` are not looked at.

    Raises:
        ManifestError: ``--save`` holds another run.
        TrainerCheckpointError: A checkpoint that is needed cannot be used.
        PreflightError: No checkpoint is given, and ``--hf-checkpoint`` is not a model.
    """
    if not settings.kind.trains:
        return None, None
    manifest = find_run(settings.megatron.save, settings.public_flags())
    if manifest is None and settings.megatron.load is None and settings.megatron.ref_load is None:
        directory = Path(settings.rollout.data.hf_checkpoint)
        check_hf_directory(directory, weights=str(directory) not in absent)
    return manifest, start_weights(settings, manifest, absent)


def check_recorded(run: RunConfig, first: int, algorithm: AlgorithmConfig, reward_key: str | None) -> None:
    """The file of the ``first`` rollout is there; those of later ones may be written meanwhile.

    A loss on preference pairs needs pairs in it.

    Raises:
        PreflightError: It is not, or there is a group that is not a pair.
        DataError: It cannot be read.
    """
    path = Path(str(run.load_debug_rollout_data).format(rollout_id=first))
    if first >= (run.num_rollout or 0):
        return
    if not path.is_file():
        raise PreflightError(
            f"--load-debug-rollout-data: {path} does not exist; give what --save-debug-rollout-data was, or "
            "SAVE/rollouts/rollout_{rollout_id:07d}.npz of a run with --keep-rollouts"
        )
    if algorithm.on_pairs:
        try:
            check_pairs(RolloutColumns.read(path), algorithm, reward_key=reward_key)
        except DataError as error:
            flags = f"--load-debug-rollout-data {path} with --loss-type {algorithm.loss_type}"
            raise PreflightError(f"{flags}: {error}") from error


def look_again(checked: Checked) -> Checked:
    """The same command with the run that ``--save`` holds now: another process may have had the directory meanwhile.

    Raises:
        SlimeError: It holds another run now.
    """
    save, flags = checked.settings.megatron.save, checked.settings.public_flags()
    if save is None or find_run(save, flags) == checked.manifest:
        return checked
    manifest, weights = find_weights(checked.settings)
    return dataclasses.replace(checked, manifest=manifest, weights=weights)


def check_engines(settings: Settings, *, elsewhere: bool = False, planned: bool = False) -> EnginePlan | None:
    """Check the settings of engines that the run starts; returns their plan, if not all of them are alike.

    Engines that are only ``planned`` need no SGLang here; without one, flags of SGLang are taken as given.

    Raises:
        PreflightError: SGLang is not installed.
        ConfigError: The installed one does not know a flag or a value, or ``--sglang-config`` cannot be used.
    """
    engine = settings.engine
    if engine.rollout_external_engine_addrs:
        return None
    is_installed = has_sglang(engine.sglang_python) if elsewhere else importable_in(engine.python, "sglang")
    if not is_installed and not planned:
        raise PreflightError(missing_sglang(engine.python))
    if is_installed:
        check_flags(engine, ())
    topology = topology_of(engine, settings.cluster.rollout_gpus)
    if topology is None:
        return None
    spec = EngineSpec(
        model_path=settings.rollout.data.hf_checkpoint,
        dtype=engine_dtype(settings.megatron, settings.rollout),
        device=str(engine.sglang_args.get("device") or run_device()),
    )
    plan = plan_engines(topology, engine, spec, num_gpus=settings.cluster.rollout_gpus, is_installed=is_installed)
    if plan.trained is None:
        raise ConfigError(
            f"--sglang-config {engine.sglang_config}: no model gets the trainer's weights; give one "
            "`update_weights: true`, or the path of --hf-checkpoint"
        )
    if any(spec.worker_type == "prefill" for spec in plan.trained.generating):
        check_whole_engines(settings.kind, settings.rollout, settings.engine)
    if not elsewhere:
        check_runs_here(plan)
    return plan


@contextlib.contextmanager
def importing_hooks() -> Iterator[None]:
    """Within the block, modules leave no compiled files; afterwards those of the working folder are not found."""
    path, writes_none = list(sys.path), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:] = path
        sys.dont_write_bytecode = writes_none


def check_hf_directory(directory: Path, *, weights: bool) -> None:
    """Check the engines' directory: its config, its tokenizer if it has more than a config, and its ``weights``."""
    if not directory.is_dir():
        raise PreflightError(f"--hf-checkpoint {directory} is not a directory; give a Hugging Face model directory")
    found = {
        "config.json": (directory / "config.json").is_file(),
        "tokenizer (tokenizer.json)": is_published(directory)
        or any((directory / name).exists() for name in TOKENIZER_FILES),
        "*.safetensors": not weights or any(directory.glob("*.safetensors")),
    }
    if missing := [what for what, is_there in found.items() if not is_there]:
        raise PreflightError(
            f"--hf-checkpoint {directory} has no {', no '.join(missing)}; give a Hugging Face model directory"
        )


def check_roles_fit(settings: Settings, shape: ModelShape, overrides: Overrides) -> None:
    """The roles that are trained fit on a device like this machine's; workers check it again, each of its own.

    Raises:
        ConfigError: It does not.
    """
    try:
        device = find_device(None, None)
    except ConfigError:
        return  # its memory is unknown
    # A CPU's memory is the machine's.
    available = device.memory // (settings.cluster.actor_num_gpus_per_node if device.is_cpu else 1)
    roles = trained_roles(
        settings.megatron,
        settings.algorithm,
        shape,
        overrides,
        world_size=settings.cluster.actor_gpus,
        on_gpu=not device.is_cpu,
        only_evaluates=settings.kind.only_evaluates,
    )
    held = {name: role.stages() for name, role in roles.items()}
    check_memory(held, available, take_turns=settings.kind.trainer_sleeps)
