"""The command ``slime-launch``. Its process only parses, checks and waits; the run happens below a supervisor."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from slime_convert.errors import ConvertError
from slime_core.errors import SlimeError
from slime_launch.errors import FlagError
from slime_launch.flags import command, read_train, sglang_specs

USAGE = """\
usage: slime-launch train [flags]     post-train a model; `slime-launch train --help` lists the flags
       slime-launch --version"""
STOP_SECONDS = 10.0
KILLED = (128 + 6, 128 + 9, 128 + 11)  # SIGABRT, SIGKILL, SIGSEGV


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line: the words after ``slime-launch``, by default those of this process.

    Returns:
        0; 1 if a part of the run failed; 2 if the command cannot work; 128 + n if signal n stopped it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except (SlimeError, ConvertError) as error:
        print(f"slime-launch: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the help has stopped, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        print("slime-launch: interrupted; nothing was started", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["train"]:
        return train(words[1:])
    if words == ["--version"]:
        print(f"slime-launch {version('slime-launch')}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    raise FlagError(f"unknown command {words[0]}; the one there is: train")


def train(argv: list[str]) -> int:
    """``slime-launch train``: check the command, then run it under supervision."""
    if "--help" in argv or "-h" in argv:
        command(argv)[1].print_help()
        return 0
    if "--help-sglang" in argv:
        for spec in sglang_specs(argv):
            value = "" if spec.is_switch else f" VALUE{' …' if spec.nargs else ''}"
            print(f"{spec.name}{value}  {spec.help}".rstrip())
        return 0
    settings, contradictions = read_train(argv)
    from slime_launch.preflight import preflight, with_output
    from slime_launch.report import report_if_finished
    from slime_rollout.supervise import run_under_supervisor

    checked = preflight(settings, contradictions)
    output_dir = checked.settings.run.output_dir or (checked.manifest.output_dir if checked.manifest else None)
    output_dir = output_dir or f"outputs/{time.strftime('%Y%m%d-%H%M%S')}"
    if checked.manifest is not None and report_if_finished(checked, Path(output_dir)):
        return 0
    with tempfile.NamedTemporaryFile(prefix="slime-launch-", suffix=".pickle") as file:
        pickle.dump(with_output(checked, output_dir), file)
        file.flush()
        driver = [sys.executable, "-m", "slime_launch.driver", file.name]
        code = run_under_supervisor(driver, grace=STOP_SECONDS)
    if code in KILLED:
        print(
            f"slime-launch: the run's main process was ended by signal {code - 128} (out of memory?); everything it "
            f"started was stopped, and the same command goes on from --save; logs: {output_dir}/logs",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
