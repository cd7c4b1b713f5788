"""``slime-launch train``: check the command, then run it under supervision."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_launch.config_file import last_value, with_config
from slime_launch.errors import FlagError
from slime_launch.flags import OTHERS, command, own_flags, read_train
from slime_launch.parser import leading_strays, unexpected
from slime_launch.short_help import print_help

if TYPE_CHECKING:
    from slime_launch.config import ClusterConfig, Settings
    from slime_launch.preflight import Checked

STOP_SECONDS = 10.0
KILLED = (128 + 6, 128 + 9, 128 + 11)  # SIGABRT, SIGKILL, SIGSEGV
ASYNC_BUFFER = "--async-buffer-size"
NO_ROLLOUT = "no effect, as the run only evaluates: --num-rollout"


def train_async(argv: list[str]) -> int:
    """``slime-launch train-async``: as :func:`train`, with one rollout generated ahead unless the command says more."""
    given = any(word.split("=")[0] == ASYNC_BUFFER for word in with_config(argv).words)
    return train(argv if given else after([ASYNC_BUFFER, "1"], argv))


def sft(argv: list[str]) -> int:
    """``slime-launch sft``: as :func:`train` with ``--loss-type sft_loss``."""
    if "--help" in argv or "-h" in argv:
        print_help("sft")
        return 0
    return train(after(["--loss-type", "sft_loss"], argv))


def evaluate(argv: list[str]) -> int:
    """``slime-launch eval``: as :func:`train` with ``--num-rollout 0``, whatever the command says."""
    if "--help" in argv or "-h" in argv:
        print_help("eval")
        return 0
    words = after(["--rollout-batch-size", "1"], argv)
    given = last_value(with_config(words).words, "--num-rollout")
    return train([*words, "--num-rollout", "0"], notes=[] if given in (None, "0") else [NO_ROLLOUT])


def after(defaults: list[str], argv: list[str]) -> list[str]:
    """A command line behind flags that it may give itself.

    Raises:
        FlagError: It begins with another word than a flag, which would seem to belong to the defaults.
    """
    for word in leading_strays(argv):
        raise FlagError(unexpected(word, "", own_flags()))
    return [*defaults, *argv]


def train(argv: list[str], *, notes: Sequence[str] = ()) -> int:
    """Check the command, then run it, with ``notes`` about it; returns its exit code."""
    if "--help" in argv or "-h" in argv:
        command(argv)[1].print_help()
        return 0
    for word, lines in OTHERS.items():
        if word in argv:
            print("\n".join(lines(argv)))
            return 0
    settings, contradictions = read_train(argv)
    settings = dataclasses.replace(settings, notes=(*settings.notes, *notes))
    with contextlib.ExitStack() as stack:
        run: Callable[[Checked, Path], int] = supervise
        if not contradictions and not os.environ.get("RAY_ADDRESS"):
            settings = stack.enter_context(importing_sglang(settings))
            run = stack.enter_context(starting(settings.placed))
        from slime_launch.preflight import preflight, with_output
        from slime_launch.report import report_if_finished

        checked = preflight(settings, contradictions)
        output_dir = checked.settings.run.output_dir or (checked.manifest.output_dir if checked.manifest else None)
        if output_dir is None:
            output_dir = str(new_directory(Path("outputs"), time.strftime("%Y%m%d-%H%M%S")))
        if checked.manifest is not None and report_if_finished(checked, Path(output_dir)):
            return 0
        return run(with_output(checked, output_dir), Path(output_dir))


def new_directory(parent: Path, name: str) -> Path:
    """Make a directory that no other run has, as one that starts in the same second would."""
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


@contextlib.contextmanager
def importing_sglang(settings: Settings) -> Iterator[Settings]:
    """Have a process import SGLang while the rest is checked and started, where this machine's CPU runs the engines.

    Gives the settings with which they are forked from it.
    """
    from slime_launch.derived import limit_threads, num_engines
    from slime_rollout.engine import EngineSpec, imported_sglang

    if not settings.kind.generates or os.environ.get("RAY_ADDRESS"):
        yield settings
        return
    config = limit_threads(settings.engine, engines=num_engines(settings.cluster, settings.engine))
    with imported_sglang(config, EngineSpec(model_path=settings.rollout.data.hf_checkpoint)) as config:
        engine = dataclasses.replace(settings.engine, template=config.template)
        yield dataclasses.replace(settings, engine=engine)


def supervise(checked: Checked, output_dir: Path) -> int:
    """Run what was checked below a supervisor, which ends all that is left of it; the exit code."""
    with starting(None) as run:
        return run(checked, output_dir)


def with_facts(checked: Checked) -> Checked:
    """The command with facts that are only written down and take half a second to find out, while Ray starts."""
    from slime_launch.megatron_flags import argument_notes
    from slime_launch.resolved import packages, variables

    settings = checked.settings
    notes = argument_notes(settings.megatron, checked.shape)
    found, environment = packages(settings.kind, settings.engine), variables(os.environ)
    return dataclasses.replace(checked, packages=found, notes=notes, environment=environment)


@contextlib.contextmanager
def starting(cluster: ClusterConfig | None) -> Iterator[Callable[[Checked, Path], int]]:
    """Start the process of a run, and a Ray of its own with ``cluster``, while the command is checked.

    Gives what runs the command then, as :func:`supervise`. Left without, the process is killed.
    """
    from slime_launch.driver import CHECKED, CLUSTER
    from slime_launch.ray_runtime import temp_dir
    from slime_rollout.supervise import under_supervisor

    with temp_dir() as directory:
        if cluster is not None:
            (directory / CLUSTER).write_bytes(pickle.dumps(cluster))  # written: a private folder
        driver = [sys.executable, "-P", "-m", "slime_launch.driver", str(directory), str(os.getpid())]
        with under_supervisor(driver, grace=STOP_SECONDS) as wait:

            def run(checked: Checked, output_dir: Path) -> int:
                partial = directory / "partial"
                partial.write_bytes(pickle.dumps(with_facts(checked)))  # written: a private folder
                partial.rename(directory / CHECKED)
                code = wait()
                if code in KILLED:
                    print(
                        f"slime-launch: the run's main process was ended by signal {code - 128} (out of memory?); "
                        "everything it started was stopped, and the same command goes on from --save; logs: "
                        f"{output_dir}/logs",
                        file=sys.stderr,
                    )
                return code

            yield run
