"""Everything that can be found out before anything is started: files, directories, ports. Writes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_launch.errors import PreflightError
from slime_launch.flags.settings import Settings
from slime_launch.manifest import Manifest
from slime_launch.resume import find_run
from slime_launch.validate import check_settings, check_shape, engine_dtype, num_engines
from slime_launch.weights import StartWeights, start_weights
from slime_megatron.start import check_algorithm
from slime_rollout.data import check_prompt_data
from slime_rollout.engine.router import check_router_port
from slime_rollout.engine.server import check_flags
from slime_rollout.engine.sglang_flags import importable_in, missing_sglang
from slime_rollout.engine.topology import Topology, read_topology
from slime_rollout.engine.topology_plan import EnginePlan, check_runs_here, plan_engines
from slime_rollout.hooks import check_hooks

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A command that can be started.

    Attributes:
        settings: Its settings.
        shape: The model's shape.
        manifest: The run in ``--save`` that it continues, if there is one.
        weights: The weights that the run begins with.
        topology: What ``--sglang-config`` holds.
        num_engines: Number of engines that the run starts.
    """

    settings: Settings
    shape: ModelShape
    manifest: Manifest | None
    weights: StartWeights
    topology: Topology | None
    num_engines: int


def preflight(settings: Settings, *, tell: bool = True) -> Checked:
    """Check a command before Ray, an engine or a trainer is started.

    Args:
        settings: Its settings.
        tell: Log what of the data will be left out; once for a command that is checked twice.

    Raises:
        SlimeError: Something is wrong; says what and what to do.
        ConvertError: The model's config cannot be used, or flags contradict it.
    """
    check_settings(settings)
    with importing_hooks():
        check_algorithm(settings.algorithm)
        check_hooks(settings.rollout, HookArgs(settings.flags()))
    check_hf_directory(Path(settings.rollout.hf_checkpoint))
    shape = check_shape(settings)
    settings.megatron.check_fits(shape)
    check_prompt_data(settings.rollout, tell=tell)
    manifest = find_run(settings)
    weights = start_weights(settings, manifest)
    for flag, directory in (("--save", settings.megatron.save), ("--output-dir", settings.run.output_dir or "outputs")):
        if directory is not None:
            check_writable(Path(directory), flag)
    if settings.engine.sglang_router_port is not None:
        check_router_port(settings.engine.sglang_router_ip, settings.engine.sglang_router_port)
    plan = check_engines(settings)
    return Checked(
        settings=settings,
        shape=shape,
        manifest=manifest,
        weights=weights,
        topology=read_topology(settings.engine.sglang_config) if settings.engine.sglang_config is not None else None,
        num_engines=num_engines(settings) if plan is None else plan.num_engines,
    )


def check_engines(settings: Settings) -> EnginePlan | None:
    """Check what engines are started with; nothing where others run them.

    Returns:
        The plan of ``--sglang-config``, if that is given.

    Raises:
        PreflightError: SGLang is not installed.
        ConfigError: The installed one does not know a flag or a value, or ``--sglang-config`` cannot be used.
    """
    engine = settings.engine
    if engine.rollout_external_engine_addrs:
        return None
    if not importable_in(engine.python, "sglang"):
        raise PreflightError(missing_sglang(engine.python))
    check_flags(engine, ())
    if engine.sglang_config is None:
        return None
    plan = plan_engines(
        read_topology(engine.sglang_config),
        engine,
        hf_checkpoint=settings.rollout.hf_checkpoint,
        num_gpus=settings.cluster.rollout_gpus,
        dtype=engine_dtype(settings),
    )
    if plan.trained is None:
        raise ConfigError(
            f"--sglang-config {engine.sglang_config}: no model gets the trainer's weights; give one "
            "`update_weights: true`, or the path of --hf-checkpoint"
        )
    check_runs_here(plan)
    return plan


@contextlib.contextmanager
def importing_hooks() -> Iterator[None]:
    """Within the block, modules of the working directory are found, as in the workers, and leave no compiled files."""
    directory, writes_none = str(Path.cwd()), sys.dont_write_bytecode
    sys.path.insert(0, directory)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path.remove(directory)
        sys.dont_write_bytecode = writes_none


def check_hf_directory(directory: Path) -> None:
    """The engines' directory: config, weights and tokenizer."""
    if not directory.is_dir():
        raise PreflightError(f"--hf-checkpoint {directory} is no directory; give a Hugging Face model directory")
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise PreflightError(
            f"--hf-checkpoint {directory} has no tokenizer (tokenizer.json); give the model's own files"
        )
    if not any(directory.glob("*.safetensors")):
        raise PreflightError(f"--hf-checkpoint {directory} has no *.safetensors; give a Hugging Face model directory")


def check_writable(directory: Path, flag: str) -> None:
    """A directory can be made, or written to if it is there. Leaves nothing behind.

    Raises:
        PreflightError: It cannot.
    """
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".slime-", dir=existing):
            pass
    except OSError as error:
        place = "" if existing == directory else f" (in {existing})"
        raise PreflightError(
            f"{flag} {directory} can't be written{place}: {error.strerror}; give a directory that you may write to"
        ) from error
