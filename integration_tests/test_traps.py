"""Every subcommand, in a stranger's folder and on a stranger's things: nothing of it runs, nothing in it is written."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from kinds import conversation, make_chat_model, write_rows
from launching import RUN_SECONDS, Assets, engine_python
from traps import links, make_traps, pipes, snapshot, trapped_model

from slime_convert.commands import COMMANDS as CONVERT
from slime_launch.commands import COMMANDS as LAUNCH
from slime_rollout.cli import _parser

pytestmark = pytest.mark.timeout(1800)

SECONDS = 240.0
"""That a command has, which takes at most five on a quiet machine."""
AT_ONCE = 3


@dataclass(frozen=True)
class Traps:
    """A stranger's folder, a folder of our own next to it, and the file that what runs of the first adds a line to."""

    folder: Path
    own: Path
    ran: Path
    assets: Assets

    def run(self, words: list[str], seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """A command in the stranger's folder."""
        program, *rest = (word.format(own=self.own) for word in words)
        if program != sys.executable:
            program = str(Path(sys.executable).with_name(program))
        home = self.own / "home"
        variables = {"HOME": str(home), "TMPDIR": str(self.own / "tmp"), "PYTHONDONTWRITEBYTECODE": ""}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTEST_", "PYTHONSAFE"))
        }
        return subprocess.run(
            [program, *rest],
            cwd=self.folder,
            env=kept | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )


SFT = (
    "--hf-checkpoint model --load torch_dist --prompt-data rows.jsonl --num-rollout 2 --rollout-batch-size 4 "
    "--micro-batch-size 4 --keep-rollouts"
)
TRAIN = (
    f"--hf-checkpoint model --load torch_dist --prompt-data prompts.jsonl --sglang-python {engine_python()} "
    "--num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt 2 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 "
    "--rollout-max-response-len 4 --rm-type math"
)
LATE = "--sglang-router-port 1 --sglang-router-ip 203.0.113.1"  # an address that no machine has

# What each subcommand is run with, and its exit codes: in every test run the first of them, the others in --full.
LINES: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "slime-launch train": [(f"{TRAIN} --output-dir {{own}}/train {LATE}", (2,))],
    "slime-launch train-async": [(f"{TRAIN} --output-dir {{own}}/async {LATE}", (2,))],
    "slime-launch eval": [
        (f"{TRAIN} --eval-prompt-data held prompts.jsonl --output-dir {{own}}/eval {LATE}", (2,)),
    ],
    "slime-launch sft": [
        (f"{SFT} --output-dir {{own}}/again --load unreadable", (2,)),
    ],
    "slime-launch migrate": [("train.sh", (0, 1, 2)), ("train.sh --toml {own}/migrated.toml", (0, 1, 2))],
    "slime-launch doctor": [("", (0, 1, 2))],
    "slime-launch completion": [("bash", (0,)), ("zsh", (0,))],
    "slime-launch plan": [
        (f"--loss-type sft_loss {SFT}", (0,)),
        (f"{TRAIN}", (0, 2)),
        (f"--loss-type sft_loss {SFT} --hf-checkpoint model-of-pipes", (2,)),
        (f"--loss-type sft_loss {SFT} --hf-checkpoint model-without-end", (2,)),
        (f"--loss-type sft_loss {SFT} --prompt-data pipe.jsonl", (2,)),
    ],
    "slime-launch report": [
        ("run --output {own}/page.html --json {own}/page.json --trace {own}/t.json", (0,)),
        ("run", (0,)),
        ("run --output {own}/speeds.html --profile {own}/speeds.toml", (0, 2)),
        ("run-of-pipes --output {own}/pipes.html", (0, 2)),
        ("run-without-end --output {own}/without-end.html", (0, 2)),
    ],
    "slime-launch diff": [("run run", (0,)), ("run run-of-pipes", (2,)), ("run-without-end run", (2,))],
    "slime-launch replay": [
        ("run --step 1", (2,)),
        ("run-of-pipes --step 1 --output-dir {own}/replay-of-pipes", (2,)),
        ("run-without-end --step 1 --output-dir {own}/replay-without-end", (2,)),
    ],
    "slime-launch submit": [(f"--ray-address http://127.0.0.1:8265 {SFT}", (0,))],
    "slime-launch recipes": [("", (0,))],
    "slime-launch new": [("{own}/new", (0,)), ("linked", (2,))],
    "slime-convert hf-to-torch-dist": [
        ("--hf-checkpoint model --save {own}/to-torch-dist", (0,)),
        ("--hf-checkpoint model-of-pipes --save {own}/to-torch-dist-2", (2,)),
        ("--hf-checkpoint model-without-end --save {own}/to-torch-dist-3", (2,)),
        ("--hf-checkpoint model --save linked", (2,)),
    ],
    "slime-convert torch-dist-to-hf": [
        ("--input-dir torch_dist --output-dir {own}/to-hf --origin-hf-dir model", (0,)),
        ("--input-dir torch_dist-of-pipes --output-dir {own}/to-hf-2 --origin-hf-dir model", (2,)),
    ],
    "slime-convert megatron-to-hf": [
        ("--load torch_dist --output-dir {own}/from-megatron --origin-hf-dir model", (0,))
    ],
    "slime-convert gguf-to-hf": [("--gguf pipe.gguf --save {own}/from-gguf", (2,))],
    "slime-convert hf-to-fp8": [("--hf-checkpoint model --save {own}/fp8", (0, 2))],
    "slime-convert fp8-to-bf16": [("--hf-checkpoint model --save {own}/from-fp8", (0, 2))],
    "slime-convert hf-to-int4": [("--hf-checkpoint model --save {own}/int4", (0, 2))],
    "slime-convert int4-to-bf16": [("--hf-checkpoint model --save {own}/from-int4", (0, 2))],
    "slime-convert merge-lora": [("--hf-checkpoint model --adapter model --save {own}/merged", (2,))],
    "slime-convert inspect": [
        ("model", (0,)),
        ("torch_dist", (0,)),
        ("model-of-pipes", (2,)),
        ("model-without-end", (2,)),
        ("torch_dist-of-pipes", (2,)),
        ("pipe.gguf", (2,)),
    ],
    "slime-convert verify": [("model torch_dist", (0,))],
    "slime-convert check-model": [("model", (0,))],
    "slime-convert megatron-flags": [("model", (0,)), ("model-of-pipes", (2,))],
    "slime-convert list-models": [("", (0,))],
    "slime-rollout check-hooks": [
        ("--dynamic-sampling-filter-path slime_rollout.filters.check_reward_nonzero_std", (0,)),
        ("--run --hf-checkpoint model --prompt-data prompts.jsonl --custom-rm-path {own}/hook.py:score", (0,)),
    ],
    "slime-rollout receive-weights": [
        ("--from model --to {own}/received --hf-checkpoint model --listen 203.0.113.1:1", (2,)),
    ],
}
HEAVY = {"slime-convert check-model"}
"""Takes half a minute: a model is made, converted there and back, and run in transformers and in Megatron."""


def subcommands() -> dict[str, list[str]]:
    """The command lines of the house, by what they parse."""
    [parsers] = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {
        "slime-launch": [*LAUNCH],
        "slime-convert": [command.name for command in CONVERT],
        "slime-rollout": [*parsers.choices],
    }


def test_every_subcommand_is_tried() -> None:
    installed = {one.name for one in entry_points(group="console_scripts") if one.value.startswith("slime_")}
    assert installed == subcommands().keys()
    assert LINES.keys() == {f"{program} {name}" for program, names in subcommands().items() for name in names}


@pytest.fixture(scope="module")
def traps(qwen3: Assets, tmp_path_factory: pytest.TempPathFactory) -> Traps:
    """With things of a stranger's in it: a model, checkpoints, data, and runs, some of pipes and files without end."""
    base = tmp_path_factory.mktemp("traps")
    folder, own = base / "theirs", base / "own"
    for name in ("home", "tmp", "victims"):
        (own / name).mkdir(parents=True)
    engine = Path(engine_python()).parents[1]
    packages = next(engine.glob("lib/python3*/site-packages"), None)
    ran = make_traps(folder, packages)
    model = trapped_model(qwen3.hf, folder / "model")
    make_chat_model(Assets(model, qwen3.torch_dist, qwen3.prompts, ""))
    shutil.copytree(qwen3.torch_dist, folder / "torch_dist")
    shutil.copyfile(qwen3.prompts, folder / "prompts.jsonl")
    write_rows(folder / "rows.jsonl", [conversation(number) for number in range(8)])
    (folder / "train.sh").write_text("python train.py --hf-checkpoint model --prompt-data rows.jsonl --lr 1e-6\n")
    (own / "hook.py").write_text("async def score(args, sample, **kwargs):\n    return 1.0\n")
    (own / "victims" / "kept.txt").write_text("kept")
    return Traps(folder, own, ran, qwen3)


@pytest.fixture(scope="module")
def trained(traps: Traps) -> tuple[Traps, subprocess.CompletedProcess[str], dict[str, str], dict[str, str]]:
    """A run in that folder, and what lay in it before and afterwards; then it is the stranger's run as well."""
    before = snapshot(traps.folder, traps.own / "victims")
    done = traps.run(f"slime-launch sft {SFT} --output-dir {{own}}/out --save {{own}}/save".split(), RUN_SECONDS)
    after = snapshot(traps.folder, traps.own / "victims")
    return traps, done, before, after


def test_a_run_in_a_folder_of_traps(trained) -> None:
    traps, done, before, after = trained
    assert done.returncode == 0, done.stderr[-3000:]
    assert ran(traps) == []
    assert after == before


@pytest.mark.full
def test_a_run_with_engines_in_a_folder_of_traps(trained) -> None:
    """Ray, the router, an engine and the processes that score, too."""
    traps, *_ = trained
    traps.ran.unlink(missing_ok=True)
    before = snapshot(traps.folder, traps.own / "victims")
    done = traps.run(f"slime-launch train {TRAIN} --output-dir {{own}}/engines".split(), RUN_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ran(traps) == []
    assert snapshot(traps.folder, traps.own / "victims") == before


def ran(traps: Traps) -> list[str]:
    return traps.ran.read_text().splitlines() if traps.ran.exists() else []


@pytest.fixture(scope="module")
def stranger(trained) -> Traps:
    """The folder with that run in it, copied, with links, pipes and files without end."""
    traps, *_ = trained
    folder, victim = traps.folder, traps.own / "victims" / "kept.txt"
    traps.ran.unlink(missing_ok=True)
    shutil.copytree(traps.own / "save", folder / "save")
    for name in ("run", "run-of-pipes", "run-without-end"):
        shutil.copytree(traps.own / "out", folder / name)
        path = folder / name / "settings.json"
        found = json.loads(path.read_text())
        found["settings"]["save"]["value"] = str(folder / "save")
        found["settings"]["custom_loss_function_path"] = {"value": "reward.score", "origin": "command line"}
        path.write_text(json.dumps(found))
        links(folder / name, ["report.html", ".report.html.partial"], victim)
        (folder / name / "replays").symlink_to(victim.parent)
    pipes(folder / "run-of-pipes", ["report.json", "metrics.jsonl", "sums.jsonl", "logs/launch.log", "turns.jsonl"])
    links(folder / "run-without-end", ["report.json", "settings.json", "logs/launch.log"], Path("/dev/zero"))
    for name in ("model", "torch_dist"):
        shutil.copytree(folder / name, folder / f"{name}-of-pipes")
    pipes(folder / "model-of-pipes", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
    pipes(
        folder / "torch_dist-of-pipes", ["release/.metadata", "release/common.pt", "latest_checkpointed_iteration.txt"]
    )
    shutil.copytree(folder / "model", folder / "model-without-end")
    links(folder / "model-without-end", ["config.json", "tokenizer.json", "tokenizer_config.json"], Path("/dev/zero"))
    pipes(folder, ["pipe.toml", "pipe.jsonl", "pipe.gguf"])
    (folder / "linked").symlink_to(victim.parent)
    return traps


def test_no_subcommand_runs_or_writes_what_it_was_not_told(stranger: Traps) -> None:
    _try(stranger, [(name, *lines[0]) for name, lines in LINES.items() if name not in HEAVY])


@pytest.mark.full
def test_no_subcommand_runs_or_writes_what_it_was_not_told_of_other_things(stranger: Traps) -> None:
    others = [(name, *line) for name, lines in LINES.items() for line in lines[1:]]
    _try(stranger, others + [(name, *LINES[name][0]) for name in HEAVY])


def _try(stranger: Traps, tried: list[tuple[str, str, tuple[int, ...]]]) -> None:
    lines = [(f"{name} {words}".split(), codes) for name, words, codes in tried]
    before = snapshot(stranger.folder, stranger.own / "victims")

    took: dict[str, float] = {}

    def run(words: list[str]) -> tuple[int, str]:
        begun = time.monotonic()
        try:
            done = stranger.run(words)
        except subprocess.TimeoutExpired:
            return -1, f"it takes more than {SECONDS} s"
        finally:
            took[" ".join(words)] = round(time.monotonic() - begun, 1)
        return done.returncode, done.stderr[-600:]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(run, [words for words, _ in lines]))
    wrong = [(words, *end) for (words, codes), end in zip(lines, ended, strict=True) if end[0] not in codes]
    changed = dict(snapshot(stranger.folder, stranger.own / "victims").items() - before.items())
    for path in [path for path in changed if path == str(stranger.folder / "run" / "report.html")]:
        del changed[path]  # the default place of a report
    said = json.dumps({"ran": ran(stranger), "changed": changed, "wrong": wrong, "seconds": took}, indent=1)
    assert not any([ran(stranger), changed, wrong]), said
