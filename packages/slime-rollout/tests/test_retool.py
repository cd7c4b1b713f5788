import importlib.util
import json
import shlex
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slime_core.types import Sample, Status
from slime_rollout.cli import main
from slime_rollout.config import RolloutConfig
from slime_rollout.rollout import RolloutManager

DIRECTORY = Path(__file__).parents[3] / "examples" / "retool"
pytestmark = pytest.mark.skipif(not DIRECTORY.exists(), reason="the examples belong to the repository")


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(DIRECTORY))

    def file(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.spec_from_file_location(name, DIRECTORY / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return file


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        (" 12 * 34 ", "408"),
        ("-(2 + 3) * 4.5", "-45/2"),
        ("7 // 2 + 7 % 4", "6"),
        ("1 / 0", "error: division by zero"),
        ("2 ** 9", "error: only numbers, brackets and + - * / // % are known"),
        ("__import__('os')", "error: only numbers, brackets and + - * / // % are known"),
        ("True + 1", "error: only numbers, brackets and + - * / // % are known"),
        ("2 +", "error: invalid syntax"),
        ("9" * 40, "error: the numbers are too large"),
        ("(" * 150 + "1" + ")" * 49, "error: "),
        ("1+" * 200 + "1", "error: the expression is too long"),
        ("1e999", "error: "),
        ("\0", "error: "),
        ("", "error: invalid syntax"),
    ],
)
def test_the_calculator(load, expression, result):
    found = load("calculator").calculate(expression)
    assert found.startswith(result) if result == "error: " else found == result
    assert len(found) < 200


def test_the_rewards(load):
    reward = load("retool").custom_rm
    for response, metadata, expected in (
        ("Answer: 1,234", {}, 1.0),
        ("Answer: 5\nAnswer: 1234.0", {}, 1.0),
        ("Answer: 5", {"results": 1}, 0.1),
        ("Answer: 1/0", {}, 0.0),
        ("<result>1234</result> 1234", {}, 0.0),  # what the model wrote itself is not a result
    ):
        sample = Sample(index=0, group_index=0, prompt="p", label="1234", response=response, metadata=metadata)
        assert reward(None, sample) == expected


def test_the_prompts_are_those_of_the_script(load):
    rows = [json.loads(line) for line in (DIRECTORY / "prompts.jsonl").read_text().splitlines()]
    assert rows == load("make_prompts").problems() and len(rows) == 100


SANDBOX = [
    ("print(2**10)\nimport math, fractions, random, json, re\nprint(math.comb(5, 2))", "1024\n10"),
    ("x = 3", "error: nothing was printed"),
    ("print(1)\n1 / 0", "ZeroDivisionError"),
    ("def f(): f()\nf()", "RecursionError"),
    ("#" * 20_000, "error: the code is longer than 10000 characters"),
    ("while True: pass", "error: it took more than"),
    ("import time\ntime.sleep(60)", "error: it took more than"),
    ("while True: print('x' * 1000)", "error: it printed more than"),
    ("x = 'a' * 10**9", "MemoryError"),
    ("import os\nwhile True: os.fork()", "PermissionError"),
    ("import os\nprint('code', os.system('touch /tmp/x'))", "code 32512"),  # 127: the shell did not start
    ("import subprocess\nsubprocess.run(['ls'])", "PermissionError"),
    ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
    ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "PermissionError"),
    ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    ("import ctypes\nctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)\nprint('one')", "one"),  # clone
    ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    ("open('{place}/new', 'w')", "PermissionError"),
    ("import os\nos.open('{place}/new', os.O_CREAT)", "PermissionError"),
    ("import os\nos.unlink('{place}/secret')", "PermissionError"),
    ("import os\nos.rename('{place}/secret', '{place}/new')", "PermissionError"),
    ("import os\nos.mkdir('{place}/new')", "PermissionError"),
    ("print(open('{place}/secret').read())", "PermissionError"),  # by Landlock
    ("print(open('/proc/self/environ').read())", "PermissionError"),
]


@pytest.mark.parametrize(("code", "expected"), SANDBOX)
def test_the_python_tool_computes_and_does_nothing_else(load, tmp_path, code, expected):
    (tmp_path / "secret").write_text("secret")
    started = time.monotonic()
    late = "took more" in expected
    found = load("sandbox").run_python(code.replace("{place}", str(tmp_path)), seconds=1.5 if late else 30.0)
    assert expected in found and len(found) < 1200
    assert not late or time.monotonic() - started < 15
    assert [path.name for path in tmp_path.iterdir()] == ["secret"] and "secret" not in found.replace("/secret", "")


def test_it_runs_on_no_other_machine(load, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(OSError, match="x86-64 only"):
        load("sandbox").run_python("print(1)")


def test_a_rollout(engine, reply, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)

    def answer(number, body):
        asked = tokenizer.decode(body["input_ids"])
        problem = asked.rpartition("What is ")[2].partition("?")[0]
        shown = asked.rpartition("<result>")[2].partition("</result>")[0]
        if not asked.endswith("</result>"):  # a program for what the calculator does not know
            calls = problem[0] in "(1234567890"
            said = f"<calculator>{problem}</calculator>" if calls else "<python>print(6 * 7)</python>"
        else:
            said = f"Answer: {shown}<|end|>"
        tokens = tokenizer.encode(said)
        return reply(text=tokenizer.decode(tokens, skip_special_tokens=True), tokens=tokens)

    engine.answer = answer
    config = RolloutConfig.of(
        hf_checkpoint=tokenizer_dir,
        prompt_data=str(DIRECTORY / "prompts.jsonl"),
        apply_chat_template=True,
        custom_generate_function_path=str(DIRECTORY / "retool.py"),
        custom_rm_path=str(DIRECTORY / "retool.py"),
        rollout_batch_size=4,
        n_samples_per_prompt=2,
    )
    samples = RolloutManager(config, router_url=engine.url, run_seed=1).generate(0).samples
    assert [sample.reward for sample in samples] == [1.0, 1.0, 0.1, 0.1] * 2
    for sample in samples:
        assert (sample.metadata["turns"], sample.metadata["results"], sample.status) == (2, 1, Status.COMPLETED)
        shown = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if not mask]
        assert tokenizer.decode(shown) == f"<result>{sample.label if sample.reward == 1 else 42}</result>"


def test_the_command_that_looks_at_it(capsys, monkeypatch):
    page = (DIRECTORY / "README.md").read_text()
    command = page.partition("slime-rollout ")[2].partition("```")[0].replace("\\\n", " ")

    monkeypatch.chdir(DIRECTORY.parents[1])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(shlex.split(command)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("ok ") for line in lines)
    assert "4 samples became 4 with 8 requests" in lines[0]
