"""Commands of upstream slime: each flag of its scripts has an answer, and the seeds' commands pass what reads them.

`data/upstream_scripts.json` has what was measured of upstream's run and model scripts: the flags that an earlier slime
did not know (``named``), and sizes of parallelism (``values``); the scripts themselves are not here.
"""

import json
from pathlib import Path

import pytest

from slime_launch.answers import Outcome, table
from slime_launch.flags import parse_train
from slime_launch.migrate import migrated
from slime_launch.shell_words import TrainCommand, read_command

DATA = Path(__file__).parent / "data"
UPSTREAM = json.loads((DATA / "upstream_scripts.json").read_text())
SEEDS = json.loads((DATA / "seed_commands.json").read_text())
SCRIPTS = UPSTREAM["scripts"] | UPSTREAM["models"]
REST = "--num-rollout 3 --rollout-batch-size 16 --n-samples-per-prompt 8"
UNREADABLE = {
    "slime's arguments, reinforce_plus_plus": "set --normalize-advantages",
}
"""Seeds' commands that cannot run, and the flag that is named."""


def test_all_of_upstreams_scripts_are_there():
    assert (len(UPSTREAM["scripts"]), len(UPSTREAM["models"])) == (45, 39)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_a_script_is_taken_or_refused_with_a_reason(name):
    script = SCRIPTS[name]
    words = [word for pair in script.get("values", []) for word in pair.split()]
    sglangs = set(UPSTREAM["sglang"]) - {"--sglang-server-concurrency"}  # depend on the SGLang that is installed
    words += [flag for flag in script["named"] if flag not in sglangs]
    done = migrated(TrainCommand(script.get("entry", "train.py"), words, []))
    assert [became.item.name for became in done.flags if became.outcome is Outcome.UNKNOWN] == []
    stopped = [became for became in done.flags if became.outcome in (Outcome.NOT_BUILT, Outcome.REFUSED)]
    assert all(became.note for became in stopped)
    assert not any(line.startswith(("unknown flag", "unexpected")) for line in done.open), done.open


def test_every_megatron_flag_of_upstreams_scripts_has_an_answer():
    done = migrated(TrainCommand("", UPSTREAM["megatron"], []))
    assert [became.item.name for became in done.flags if became.outcome is Outcome.UNKNOWN] == []


def test_sglang_flags_of_upstreams_scripts_that_sglang_has_no_more_are_in_the_table():
    gone = {
        "cuda-graph-bs", "cuda-graph-max-bs", "custom-pull-weights-pre-read-hook", "disable-piecewise-cuda-graph",
        "enable-deepep-moe", "enable-ep-moe", "enable-fp32-moe-router", "fp8-gemm-runner-backend",
        "mamba-scheduler-strategy", "nsa-decode-backend", "nsa-prefill-backend",
    }  # fmt: skip
    assert {f"--sglang-{name}" for name in gone} <= set(UPSTREAM["sglang"])
    assert {f"sglang-{name}" for name in gone} <= table()["renamed"].keys() | table()["not-built"].keys()


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_commands_are_read(name, workspace, monkeypatch):
    hf, dist, data = (str(workspace / part) for part in ("hf", "dist", "train.jsonl"))
    filled = {"CKPT": f"--hf-checkpoint {hf} --load {dist}", "DATA": data, "REST": REST, "HF": hf, "DIR": dist}
    filled["SAVE"] = str(workspace / "save")
    text = " ".join(filled.get(word, word) for word in SEEDS[name].split())
    words = read_command(text if text.startswith("ray ") else f"python {text}", workspace).words
    if name in UNREADABLE:
        with pytest.raises(Exception, match=UNREADABLE[name]):
            parse_train(words)
        return
    assert parse_train(words).rollout.data.prompt_data == (data,)
