import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_rollout.cli import main

OWN = """
from slime_rollout import Trajectory, generate_single

async def turns(args, sample, sampling_params):
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        if "?" not in await trajectory.generate():
            break
        trajectory.observe("go on")
    return sample

async def chat(args, samples, evaluation=False):
    for sample in samples:
        sample.response = await generate_single(sample.prompt)

def score(args, sample): return float(sample.response == "6 * 7?go on42")
def fails(args, sample): raise ValueError(args.rm_timeout)
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A command line, run in a directory with hooks: exit code, lines on standard output, and on standard error."""
    (tmp_path / "own_hooks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words):
        code = main(["check-hooks", *words])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    yield call
    for name in [name for name in sys.modules if "own_hooks" in name]:
        del sys.modules[name]


def test_hooks_are_looked_at(run):
    code, out, err = run("--custom-generate-function-path", "own_hooks.turns", "--custom-rm-path", "own_hooks.py:score")
    assert (code, err, len(out)) == (0, [], 2)
    assert out[0].startswith("ok     --custom-generate-function-path own_hooks.turns: loads, and takes what it will be")
    code, out, err = run("--custom-generate-function-path", "own_hooks.score", "--custom-rm-path", "own_hooks.nothing")
    assert (code, err, len(out)) == (2, [], 2)
    assert out[0].startswith("wrong  --custom-generate-function-path own_hooks.score is not async")
    assert out[1].startswith("wrong  --custom-rm-path own_hooks.nothing: own_hooks has no function nothing")


def test_hooks_are_called(run):
    replies = ["--reply", "6 * 7?", "--reply", "42"]
    own = ["--custom-generate-function-path", "own_hooks.turns", "--custom-rm-path", "own_hooks.score"]
    code, out, err = run("--run", *replies, *own)
    assert (code, err) == (0, [])
    assert re.search(r"4 samples became 4 with 8 requests; 40 of 60 tokens are trained on \(\d", out[0])
    assert "the rewards of 4 responses were 1.0, 1.0, 1.0, 1.0" in out[1]
    _, out, _ = run("--run", *replies, "--custom-rm-path", "own_hooks.score")
    assert "the rewards of 4 responses were 0.0, 0.0, 0.0, 0.0" in out[0]
    code, out, _ = run("--run", "--custom-rm-path", "own_hooks.fails", "--rm-timeout", "7")
    assert code == 2 and re.search(
        r"^wrong  --custom-rm-path own_hooks.fails raised ValueError for sample \d: 7.0", out[0]
    )


def test_with_a_model_and_prompts_of_ones_own(run, tokenizer_dir, write_rows):
    rows = [{"question": [{"role": "user", "content": "say a number: 3"}], "label": "3"}]
    own = ["--hf-checkpoint", tokenizer_dir, "--prompt-data", write_rows(rows), "--input-key", "question"]
    code, out, err = run("--run", "--apply-chat-template", *own, "--custom-generate-function-path", "own_hooks.chat")
    assert (code, err) == (0, []) and "4 samples became 4 with 4 requests" in out[0]
    code, out, err = run("--run", *own, "--custom-generate-function-path", "own_hooks.chat")
    assert (code, err) == (0, []) and "4 samples became 4 with 4 requests" in out[0]
    code, out, err = run("--run", *own, "--custom-generate-function-path", "own_hooks.turns")
    assert code == 2 and "has chat messages and no tokens; add --apply-chat-template" in out[0]
    code, out, err = run("--run", *own, "--custom-rm-path", "own_hooks.score")
    assert (code, out, len(err)) == (2, [], 1) and "add --apply-chat-template" in err[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no hook is given; give one or more of --data-source-path, --buffer-filter-path, --custom-generate"),
        (["--nothing"], "unrecognized arguments: --nothing; see slime-rollout"),
        (["--custom-rm-path"], "--custom-rm-path: expected one argument"),
        (["--custom-rm-path", "own_hooks.score", "--rm-type", "exact"], "are both given; give one of them"),
        (["--custom-rm-path", "own_hooks.score", "--reply", "x"], "--reply is for --run; give both"),
        (["--run", "--custom-rm-path", "own_hooks.score", "--time-limit", "0"], "--time-limit 0.0 is invalid"),
        (["--run", "--custom-rm-path", "own_hooks.score", "--hf-checkpoint", "nowhere"], "nowhere is not a directory"),
    ],
)
def test_a_command_that_cannot_work_is_one_line(run, words, message):
    code, out, err = run(*words)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("slime-rollout: ") and message in err[0]


def test_as_a_program(tmp_path):
    (tmp_path / "own_hooks.py").write_text(OWN)
    command = [sys.executable, "-m", "slime_rollout"]
    words = ["check-hooks", "--custom-rm-path", "own_hooks.score"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(
        "ok     --custom-rm-path own_hooks.score"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and "required: check-hooks" in done.stderr
    settings = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'slime-rollout = "slime_rollout.cli:main"' in settings
