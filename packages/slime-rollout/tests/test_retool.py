import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import os
import platform
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slime_core.types import Sample, Status
from slime_rollout.cli import main
from slime_rollout.config import RolloutConfig
from slime_rollout.rollout import RolloutManager
from support import escapes
from support.outside import Outside

DIRECTORY = Path(__file__).parents[3] / "examples" / "retool"
pytestmark = pytest.mark.skipif(not DIRECTORY.exists(), reason="the examples belong to the repository")


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(DIRECTORY))

    def file(name, directory=DIRECTORY):
        monkeypatch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.spec_from_file_location(name, directory / f"{name}.py")
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
    ("print(open('{place}/secret').read())", "PermissionError"),  # by Landlock
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


EVERY_CALL = """import ctypes, errno
call = ctypes.CDLL(None, use_errno=True).syscall
def is_refused(*words):
    return call(*map(ctypes.c_long, words)) == -1 and ctypes.get_errno() == errno.EPERM
numbers = {{*range(600)}} - {{335, 336}} - {allowed}  # of these two the kernel itself ends the caller
print([number for number in numbers if not is_refused(number, -1, 0, 0, 0, 0, 0)])
print([number for number in range(600) if not is_refused(number | 1 << 30, -1, 0, 0, 0, 0, 0)])
print([command for command in range(2048) if not is_refused(72, 1, command, 0)])
ioctls = [*range(0x5400, 0x5500), *range(0x8900, 0x8a00), 0x40086602, 0x401c5820, 0x80086601, 0xc0045877]
print([command for command in ioctls if not is_refused(16, 1, command, 0)])
print([advice for advice in range(256) if not is_refused(28, 0, 0, advice)])
"""


def test_no_system_call_goes_through_but_those_that_it_names(load):
    """All numbers, also those of x32, and all commands of fcntl, ioctl and madvise."""
    sandbox = load("sandbox")
    allowed = {*sandbox._ALLOWED.values(), *sandbox._COMMANDS, sandbox._OPENAT}
    found = sandbox.run_python(EVERY_CALL.format(allowed=allowed), seconds=60.0)
    assert found.splitlines() == ["[]", "[]", "[1, 2, 3, 1030]", "[21505, 21584, 21585]", "[0, 1, 2, 3, 4, 8, 14, 15]"]


@pytest.fixture
def without_landlock(load, tmp_path):
    """The sandbox as on a kernel before 5.13: Landlock's system calls have numbers that no kernel knows."""
    text, known = (DIRECTORY / "sandbox.py").read_text(), "= 444, 445, 446"
    assert known in text
    (tmp_path / "sandbox.py").write_text(text.replace(known, "= 9444, 9445, 9446"))
    return load("sandbox", tmp_path)


@pytest.fixture
def outside(tmp_path):
    with contextlib.closing(Outside(tmp_path / "outside")) as around:
        yield around


@pytest.mark.parametrize("area", escapes.AREAS)
def test_no_escape_gets_out(load, outside, area):
    run = functools.partial(load("sandbox").run_python, seconds=60.0)
    assert escapes.got_out(run, escapes.AREAS[area], outside) == []


@pytest.mark.parametrize("area", [area for area in escapes.AREAS if area != "reading"])
def test_an_older_kernel_lets_only_files_be_read(without_landlock, outside, area):
    run = functools.partial(without_landlock.run_python, seconds=60.0)
    assert escapes.got_out(run, escapes.AREAS[area], outside) == []


@pytest.mark.parametrize("area", escapes.AREAS)
def test_without_a_sandbox_every_escape_gets_out(tmp_path, area):
    """Each against an outside of its own; what a kernel does not have is left out."""
    capable, filtered = escapes.privileges()
    if filtered or platform.machine() != "x86_64":
        pytest.skip("only on x86-64, without a filter of system calls around the tests")
    tried = [escape for escape in escapes.AREAS[area] if not escape.never and (capable or not escape.root)]
    with contextlib.ExitStack() as stack:
        outsides = [Outside(tmp_path / str(number)) for number in range(len(tried))]
        for around in outsides:
            stack.callback(around.close)
        printed = escapes.without_sandbox(list(zip(tried, outsides, strict=True)))
        for escape, around in zip(tried, outsides, strict=True):
            said = any(f"{word} {escape.name}" in printed for word in ("OUT", "LACKS"))
            deadline = time.monotonic() + 10
            while not (out := said or around.secret_is_in(printed) or around.changes()) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert out, (escape.name, printed)


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody but root can read files of other users")
def test_it_reads_no_files_of_other_users(without_landlock, tmp_path):
    """Neither as root, which has no capabilities in there."""
    (tmp_path / "theirs").write_text("secret")
    (tmp_path / "theirs").chmod(0o600)
    os.chown(tmp_path / "theirs", 65534, 65534)
    assert "PermissionError" in without_landlock.run_python(f"print(open('{tmp_path}/theirs').read())", seconds=30.0)


@pytest.mark.parametrize("take", [escapes.TAKE_RESERVED, pytest.param(escapes.TAKE_USED, marks=pytest.mark.full)])
def test_memory_of_sixteen_at_once_is_bounded(load, take):
    sandbox = load("sandbox")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(functools.partial(sandbox.run_python, seconds=100.0), [take] * 16))
    assert all("MemoryError" in one for one in found)
    held = sum(int(re.search(r"held (\d+)", one)[1]) for one in found) << 22
    assert 0 < held < 16 * sandbox.MEMORY


def test_it_ends_with_who_started_it(load):
    """Also where that is killed, and where it had ended before the sandbox could ask for that."""
    file = load("sandbox").__file__
    start = f"import importlib.util as u; s = u.spec_from_file_location('s', {file!r}); m = u.module_from_spec(s)"
    code = "import ctypes, time\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(200)"
    command = [sys.executable, "-c", f"{start}; s.loader.exec_module(m); m.run_python({code!r}, seconds=200.0)"]
    with subprocess.Popen(command) as started:
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        while not (pids := children.read_text().split()) or not _is_filtered(pids[0]):
            assert started.poll() is None
            time.sleep(0.01)
        sandboxed = os.pidfd_open(int(pids[0]))
        started.kill()
    assert select.select([sandboxed], [], [], 30)[0]  # it has ended
    os.close(sandboxed)
    orphan = [sys.executable, "-I", file, "1"]
    done = subprocess.run(orphan, input="print('ran')", capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("", "nobody waits for this code; it was not run\n")


def _is_filtered(pid):
    """Whether a process has taken its filter of system calls, which comes last."""
    return "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()


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
