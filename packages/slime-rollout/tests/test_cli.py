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

def parts(args, sample):
    sample.metadata["seen"] = len(sample.response)
    return {"score": 1.0, "valid": "go on" in sample.response}

def log(rollout_id, args, samples, extra_metrics, seconds):
    assert {sample.metadata["seen"] for sample in samples} and {sample.reward["score"] for sample in samples} == {0, 1}
    extra_metrics["valid"] = sum(sample.reward["valid"] for sample in samples) / len(samples)

def keeps(args, samples): return any(sample.reward["valid"] for sample in samples)
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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("chek-hooks", "'receive-weights'); did you mean check-hooks?; see slime-rollout --help"),
        ("receive-weights --form x", "unknown flag --form (did you mean --from?); see slime-rollout receive-weights"),
        ("--verson", "unknown flag --verson (did you mean --version?); see slime-rollout --help"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_one_that_it_is_like(words, line, capsys):
    assert main(words.split()) == 2
    assert line in capsys.readouterr().err


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


def test_hooks_that_come_later_get_what_those_before_them_have_made(run):
    """The turns of the generate function, the metadata and all parts of the reward, with unequal rewards."""
    own = ["--custom-generate-function-path", "own_hooks.turns", "--custom-rm-path", "own_hooks.parts"]
    later = ["--custom-rollout-log-function-path", "own_hooks.log", "--dynamic-sampling-filter-path", "own_hooks.keeps"]
    code, out, err = run("--run", "--reply", "6 * 7?", "--reply", "42", *own, *later, "--reward-key", "score")
    assert (code, err, len(out)) == (0, [], 4), (out, err)
    assert any("it added valid" in line for line in out) and any("keeps rewards 0 and 1, keeps" in line for line in out)


def test_a_built_in_rule_gives_later_hooks_all_parts_of_its_reward(run):
    Path("own_log.py").write_text(
        "def log(rollout_id, args, samples, extra_metrics, seconds):\n"
        "    extra_metrics['right'] = sum(sample.reward['acc'] for sample in samples)\n"
    )
    rule = ["--rm-type", "dapo", "--reward-key", "score"]
    code, out, err = run("--run", *rule, "--custom-rollout-log-function-path", "own_log.log")
    assert (code, err) == (0, []) and "it added right" in out[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--custom-rm-path", "own_hooks.score"], "--reply is given 2 times, and .* more than 1 turn;"),
        (["--buffer-filter-path", "slime_rollout.data.pop_first"], "--reply is given 2 times, and nobody asked it;"),
    ],
)
def test_replies_that_nobody_hears_are_refused(run, words, why):
    code, _, [line] = run("--run", "--reply", "a", "--reply", "b", *words)
    assert code == 2 and re.search(why, line)


def test_a_run_file_names_the_hooks_and_what_they_are_checked_with(run):
    text = """
custom-rm-path = "own_hooks.fails"
rm-timeout = 7
group-rm = false
lr = 1e-6
sglang-mem-fraction-static = 0.5
"""
    Path("run.toml").write_text(text)
    code, out, _ = run("--run", "--config", "run.toml")
    assert code == 2 and "raised ValueError for sample" in out[1] and out[1].split(": ")[-1].startswith("7.0")
    assert out[0] == (
        "note   run.toml: 2 of its flags are not a rollout's and not looked at: --lr, --sglang-mem-fraction-static"
    )
    code, out, _ = run("--run", "--config", "run.toml", "--custom-rm-path", "own_hooks.score")
    assert code == 0 and "own_hooks.score" in out[1] and len(out) == 2  # the command line wins
    for table in ('[rewards]\ncustom-rm-path = "own_hooks.score"', "[rm-timeout]\nseconds = 7"):
        Path("tables.toml").write_text(table)
        code, _, [line] = run("--config", "tables.toml")
        name = table.partition(" ")[0].replace("]\n", ".").removeprefix("[")
        assert code == 2 and f"--config tables.toml: {name} is in a table" in line
    Path("tables.toml").write_text('custom-rm-path = "own_hooks.score"\n[train-env-vars]\nA = "b"')
    assert run("--config", "tables.toml")[0] == 0
    code, _, [line] = run("--config", "nothing.toml")
    assert code == 2 and "--config nothing.toml does not exist" in line


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
        (["--nothing"], "unknown flag --nothing; see slime-rollout check-hooks --help"),
        (
            ["--custom-rm-path", "own_hooks.score", "--custom-generate-function-pth=x"],
            "unknown flag --custom-generate-function-pth (did you mean --custom-generate-function-path?); see slime-",
        ),
        (["--nothing", "--rm-tipe", "math"], "unknown flags --nothing, --rm-tipe (did you mean --rm-type or --rm-t"),
        (["--custom-rm-path", "own_hooks.score", "x"], "unrecognized arguments: x; see slime-rollout check-hooks --"),
        (["run.toml"], "unexpected 'run.toml'; give a run file as --config run.toml"),
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
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(
        "ok     --custom-rm-path own_hooks.score"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "") and "required: check-hooks" in done.stderr
    settings = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'slime-rollout = "slime_rollout.cli:main"' in settings


def test_a_secret_in_what_was_given_is_not_in_the_error(run):
    code, _, err = run("--config", "http://me:hunter22@host/run.yaml")
    assert code == 2 and err and "hunter22" not in " ".join(err) and "[removed]@host" in " ".join(err)
