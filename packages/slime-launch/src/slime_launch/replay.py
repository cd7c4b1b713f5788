"""``slime-launch replay``: train on a rollout of a run again, and see whether the same comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime_core.errors import DataError
from slime_core.files import naming_damage, open_to_append, write_whole
from slime_core.flags import Config, flag, flag_specs
from slime_core.words import counted
from slime_launch.console import RunConsole
from slime_launch.diff import differences, settings_that_differ, value_lines
from slime_launch.errors import FlagError, PreflightError
from slime_launch.flags import own_flags, read_train
from slime_launch.manifest import read_manifest
from slime_launch.own_runs import is_own
from slime_launch.parser import FlagGroup, build_parser, parse
from slime_launch.plan.command import split_words
from slime_launch.preflight import Checked, preflight
from slime_launch.resume import ROLLOUT_DIR, StartWeights
from slime_launch.step_sums import StepSums, read_sums
from slime_launch.train import supervise
from slime_launch.written_run import WrittenRun
from slime_megatron.service import (
    FUNCTIONS,
    TrainerCheckpointError,
    field_words,
    find_checkpoint,
    flag_name,
    iteration_directory,
)
from slime_rollout.checks import HOOKS, OFF, words_of
from slime_rollout.service import RolloutStore

_LEFT_OUT = frozenset(
    {
        *("config", "output_dir", "save", "save_interval", "save_hf", "async_save", "no_async_save", "keep_rollouts"),
        *("num_rollout", "num_epoch", "load_debug_rollout_data", "debug_train_only", "save_debug_rollout_data"),
        *("save_debug_train_data", "dump_details", "max_checkpoints_kept", "trainer_max_restarts", "use_wandb"),
        *("eval_interval", "eval_prompt_data", "eval_config", "skip_eval_before_train", "async_buffer_size"),
    }
)
"""Flags of a run that its replay does not take: where it writes to, how long it goes, and what only engines do."""
_DERIVED = ("lr_decay_iters", "bf16", "use_distributed_optimizer")
"""Flags whose value follows from the run's length, or from the machine."""
_CODE = frozenset(
    {
        *(flag_name(name) for name in (*(hook.field for hook in HOOKS), *FUNCTIONS)),
        *("--sglang-python", "--trust-remote-code", "--sglang-trust-remote-code"),
        *("--config", "--eval-config", "--megatron-config-path"),  # files that may name functions
        "--train-env-vars",  # which may name libraries
    }
)
"""Flags that name what is run."""
_OURS = re.compile(r"slime_rollout\.(filters[.:]check_\w+|data[.:]RolloutDataSource(WithBuffer)?)")
"""Functions of ours that such a flag may name."""

DESCRIPTION = """\
Train on step N of a run again, from the newest checkpoint before it, and say whether samples, metrics and weights come
out equal to the last bit. RUN is the run's --output-dir. Steps are counted from 1, as on the console; step N is
rollout_id N - 1 of metrics.jsonl. Exit codes: 0 they do; 1 they do not, or training failed; 2 it cannot be done."""
OUTPUT_FILE = "replay.log"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(Config, needs=()):
    """The flags of a replay."""

    step: int | None = flag(None, metavar="N", help="the step, counted from 1 as on the console", least=0)
    output_dir: str | None = flag(None, metavar="DIR", help="where it writes; replays/N in RUN unless given")
    run_its_code: bool = flag(
        False, help="run what the settings of somebody else's run name: functions, files, interpreters"
    )


class Replay(NamedTuple):
    """The rollouts ``first`` to ``last``, trained on again from ``checkpoint``; ``None`` is the beginning."""

    first: int
    last: int
    checkpoint: Path | None
    template: str


def replay(argv: Sequence[str]) -> int:
    """Train again from the nearest checkpoint up to ``--step``; 0 if all comes out equal, 1 if something does not.

    Raises:
        FlagError: No run or no rollout is given.
        PreflightError: The directory holds no run, or what is needed of it is gone.
    """
    specs = flag_specs(ReplayConfig)
    groups = [FlagGroup("replay", tuple(specs))]
    parser = build_parser(groups, prog="slime-launch replay", description=DESCRIPTION, words="RUN --step N")
    if "--help" in argv or "-h" in argv:
        parser.print_help()
        return 0
    own, runs = split_words(argv, {spec.name: not spec.is_switch for spec in specs})
    config = ReplayConfig(**parse(groups, parser, [*own, *(word for word in runs if word.startswith("-"))]))
    if len(runs) != 1 or config.step is None:
        stray = f"unexpected {runs[1]!r} after {runs[0]}; " if runs[1:] else ""
        raise FlagError(f"{stray}replay needs a run's --output-dir and a step, such as runs/first-run --step 12")
    if config.step == 0:
        raise FlagError("--step 0: steps are counted from 1, as on the console; rollout_id 0 is --step 1")
    run = WrittenRun(Path(runs[0]))
    with naming_damage(run.directory):
        found = find_start(run, config.step - 1)
    if not config.run_its_code and not is_own(run.resolved) and (named := list(code_of(run))):
        ask(run, named)
    output_dir = Path(config.output_dir or _own_folder(run, config.step))
    if output_dir.resolve() == run.directory.resolve():
        raise FlagError(f"--output-dir {output_dir} is the run itself; give another, or leave it out")
    output_dir.mkdir(parents=True, exist_ok=True)
    checked = checked_replay(run, found, output_dir)
    details = output_dir / "logs" / OUTPUT_FILE
    with RunConsole(sys.stderr).wait(f"train {steps_in_words(found)} again"), output_into(details):
        code = supervise(checked, output_dir)
    if code != 0:
        print(
            f"slime-launch: the replay could not be trained to its end; {details} says how far it was", file=sys.stderr
        )
        return code
    words = list(outcome(run, WrittenRun(output_dir), found))
    print("\n".join([*words, f"what the replay printed: {details}"]))
    return 0 if len(words) == 1 else 1


def _own_folder(run: WrittenRun, step: int) -> Path:
    """The folder of a replay in its run, which may be somebody else's: a link there could lead to any place."""
    folder = run.directory / "replays" / str(step)
    if link := next((path for path in (folder.parent, folder, *folder.glob("*")) if path.is_symlink()), None):
        raise FlagError(f"{link} is a link, so nothing is written there; give --output-dir, or remove it")
    return folder


def code_of(run: WrittenRun) -> Iterator[str]:
    """The code that a replay runs because the settings of its run name it, as flags: functions, files, interpreters.

    A flag that is not known is among them: nobody can say what it does.
    """
    plain = own_flags().keys() | field_words().keys()
    for name, value in _values(run).items():
        [word, *more] = words_of(str(run.directory), f"--{name}", value) or [""]
        given, _, text = word.partition("=")
        is_plain = given in plain or given.startswith(("--sglang-", "--router-"))
        if not word or text == OFF or (is_plain and given not in _CODE):
            continue
        if not all(map(_OURS.fullmatch, [*filter(None, [text]), *more] or [""])):
            # In ASCII, so that no sign in it hides another on a terminal.
            yield f"{json.dumps(given)[1:-1]} {' '.join(map(json.dumps, [*filter(None, [text]), *more]))}".rstrip()


def ask(run: WrittenRun, code: Sequence[str]) -> None:
    """Ask whether to run what somebody else's settings name.

    Raises:
        FlagError: The answer is no, or nobody can be asked.
    """
    said = f"{run.directory} is not a run of yours that began in this folder, and a replay of it runs {', '.join(code)}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{said}\nrun that? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise FlagError("nothing was run")
    raise FlagError(f"{said}; look at that, and add --run-its-code if you trust it")


@contextlib.contextmanager
def output_into(path: Path) -> Iterator[None]:
    """Within the block, what this process and those that it starts print goes to a file; errors stay where they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    before = os.dup(1)
    try:
        with open_to_append(path) as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)


def find_start(run: WrittenRun, rollout_id: int) -> Replay:
    """The newest checkpoint from which a rollout can be trained on again, with the rollouts that are still there.

    Raises:
        PreflightError: There is none, or the run has no such rollout.
    """
    numbers = [sums.rollout_id for sums in read_sums(run.directory)]
    step = rollout_id + 1
    if rollout_id not in numbers:
        raise PreflightError(f"{run.directory} has no step {step}; it has {numbers[0] + 1} to {numbers[-1] + 1}")
    save = run.setting("save")
    store_dir = Path(save or run.directory) / ROLLOUT_DIR
    store = RolloutStore(store_dir)
    template = str(store_dir / "rollout_{rollout_id:07d}.npz")
    for first, checkpoint in _checkpoints(save, rollout_id):
        if all(map(store.has, range(first, rollout_id + 1))):
            return Replay(first=first, last=rollout_id, checkpoint=checkpoint, template=template)
    raise PreflightError(f"step {step} of {run.directory} can't be trained on again: {_why_not(run, store, numbers)}")


def _why_not(run: WrittenRun, store: RolloutStore, numbers: Sequence[int]) -> str:
    """Why a step cannot be trained on again, which ones can be, and what to do in another run."""
    save = run.setting("save")
    if save is None:
        return "the run had no --save, so what it generated was not written down; run it with --save DIR"
    if not store.ids():
        return (
            f"{save} has none of what it was trained on: rows of a data set, and rollouts before the only checkpoint "
            "of --max-checkpoints-kept 1, are kept with --keep-rollouts in the run's command alone"
        )
    can = [
        number + 1
        for number in numbers
        if any(all(map(store.has, range(first, number + 1))) for first, _ in _checkpoints(save, number))
    ]
    steps = f"--step {can[0]} to {can[-1]} can be" if can else "no step can be"
    return (
        f"{save} has what was generated since the checkpoint before the last, so {steps}; --keep-rollouts in the run's "
        "command keeps all of it"
    )


def _checkpoints(save: str | None, rollout_id: int) -> Iterator[tuple[int, Path | None]]:
    """Checkpoints before a rollout, newest first, by the steps that they are trained on; last the beginning."""
    for number in range(rollout_id, 0, -1) if save is not None else ():
        directory = iteration_directory(str(save), number)
        try:
            yield number, find_checkpoint(directory).directory
        except TrainerCheckpointError:
            continue
    yield 0, None


def checked_replay(run: WrittenRun, found: Replay, output_dir: Path) -> Checked:
    """The run's command with recorded rollouts, which begins at the checkpoint.

    Raises:
        SlimeError: Something that it needs is gone.
    """
    config = output_dir / "run.yaml"
    write_whole(config, json.dumps(_values(run), indent=1))  # which is YAML, too
    words = ["--config", str(config), "--output-dir", str(output_dir), "--num-rollout", str(found.last + 1)]
    words += ["--load-debug-rollout-data", found.template, "--trainer-max-restarts", "0"]
    checked = dataclasses.replace(preflight(*read_train(words), first_rollout=found.first), replays=True)
    save = run.setting("save")
    manifest = None if save is None else read_manifest(Path(save))
    if manifest is None:
        return checked
    weights = StartWeights(load=manifest.load, ref_load=manifest.ref_load)
    begins = dataclasses.replace(
        manifest,
        iteration=found.first,
        weight_version=found.first,
        checkpoint=None if found.checkpoint is None else str(found.checkpoint.resolve()),
        source_state={},
    )
    return dataclasses.replace(checked, manifest=begins, weights=weights)


def _values(run: WrittenRun) -> dict[str, Any]:
    """The settings of a run that its replay takes, by their flags."""
    entries: dict[str, Any] = run.resolved["settings"]
    return {
        name.replace("_", "-"): entry["value"]
        for name, entry in entries.items()
        if name not in _LEFT_OUT and entry["value"] is not None
        if entry.get("origin") in ("command line", "config file") or name in _DERIVED
    }


def outcome(run: WrittenRun, again: WrittenRun, found: Replay) -> Iterator[str]:
    """One line if all is equal; else what is not, and what of the packages and the environment differs."""
    begins = "the run's beginning" if found.checkpoint is None else f"checkpoint {found.first}"
    ours, theirs = (_sums_of(one, found) for one in (run, again))
    for number in range(found.first, found.last + 1):
        if number not in theirs:
            raise DataError(f"the replay has not trained on step {number + 1}; see {again.directory}/logs")
        if (words := next(differences(ours[number], theirs[number], run, again), None)) is not None:
            yield f"not equal: trained again from {begins}, in step {number + 1} (rollout_id {number}) {words}"
            around = [values for values in settings_that_differ(run, again) if not values[0].startswith("--")]
            yield from value_lines(around, "{} in the run, {} now", ("run", "replay"))
            yield "the same step gives something else on the same samples: a kernel, a package, the machine or --seed"
            return
    weights = len(ours[found.last].names)
    are = f"{steps_in_words(found)} {'is' if found.first == found.last else 'are'}"
    yield (
        f"equal: trained again from {begins}, {are} equal to the last bit, with the metrics of every optimizer step "
        f"and {counted(weights, 'weight')} after each"
    )


def steps_in_words(found: Replay) -> str:
    """The steps that are trained on again, as the console counts them, and as files do."""
    if found.first == found.last:
        return f"step {found.first + 1} (rollout_id {found.first})"
    return f"steps {found.first + 1} to {found.last + 1} (rollout_id {found.first} to {found.last})"


def _sums_of(run: WrittenRun, found: Replay) -> dict[int, StepSums]:
    return {sums.rollout_id: sums for sums in read_sums(run.directory) if found.first <= sums.rollout_id <= found.last}
