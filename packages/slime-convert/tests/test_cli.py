"""The command line as a user types it: exit codes, one line about each mistake, and what a stop leaves."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoConfig

import slime_convert
from slime_convert import ModelShape, hf_to_torch_dist
from slime_convert.cli import main
from support.family_models import tree, without_progress, write_gguf

COMMAND = Path(sys.executable).with_name("slime-convert")


def run(*words, **kwargs):
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=120, **kwargs)


def test_there_and_back_as_a_user_types_it(one_origin, tmp_path):
    flags = ModelShape.from_hf_config(one_origin).to_megatron_flags()
    there = run("hf-to-torch-dist", "--hf-checkpoint", one_origin, "--save", tmp_path / "td", *flags)
    assert (there.returncode, without_progress(there.stderr)) == (0, "")
    assert re.fullmatch(r"wrote 27 weights, \d+\.\d KiB, in \d+\.\d s, .*/s: .*/td\n", there.stdout)
    words = ["--input-dir", tmp_path / "td", "--output-dir", tmp_path / "hf", "--origin-hf-dir", one_origin]
    back = run("torch-dist-to-hf", *words, "--quiet")
    assert (back.returncode, back.stdout, back.stderr) == (0, "", "")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    result = run("hf-to-torch-dist", "--hf-checkpoint", tmp_path / "none", "--save", tmp_path / "td")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("slime-convert: cannot read ")
    assert not any(tmp_path.iterdir())


def test_a_refused_command_changes_nothing(one_origin, one_converted, tmp_path, capsys):
    """Not even directories above the output are made."""
    words = [
        ["hf-to-torch-dist", "--hf-checkpoint", one_origin, "--num-layers", 9, "--save"],
        ["hf-to-torch-dist", "--hf-checkpoint", tmp_path / "none", "--save"],
        ["hf-to-fp8", "--hf-checkpoint", one_converted, "--save"],
        ["megatron-to-hf", "--load", one_converted, "--origin-hf-dir", one_converted, "--output-dir"],
        ["megatron-to-hf", "--load", one_origin, "--origin-hf-dir", one_origin, "--output-dir"],
        ["gguf-to-hf", "--gguf", one_origin, "--save"],
    ]
    for command in words:
        assert main([*map(str, command), str(tmp_path / "some" / "where" / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", [".", "below/it", "release/it"])
def test_an_output_inside_the_input_is_refused(one_origin, tmp_path, capsys, place):
    hf_to_torch_dist(one_origin, tmp_path / "td")
    before = tree(tmp_path)
    words = ["--load", str(tmp_path / "td" / "release"), "--origin-hf-dir", str(one_origin)]
    for output in (tmp_path / "td" / "release" / place, tmp_path / "td"):
        assert main(["megatron-to-hf", *words, "--force", "--output-dir", str(output)]) == 2
        assert re.search(r"output \S+ (is or holds|lies in) the input", capsys.readouterr().err)
        assert tree(tmp_path) == before


FORK = multiprocessing.get_context("fork")  # a fresh process would import torch for seconds


def wait_at_the_first_byte(words, ready):
    def wait(*_):
        ready.set()
        time.sleep(60)

    os.pwrite = wait
    sys.exit(main(words))


@contextmanager
def under_way(words):
    """A process that has made its output directory and is about to fill it."""
    ready = FORK.Event()
    process = FORK.Process(target=wait_at_the_first_byte, args=([str(word) for word in words], ready))
    process.start()
    try:
        assert ready.wait(30)
        yield process
    finally:
        process.kill()
        process.join(30)


@pytest.fixture(scope="module")
def commands(one_origin, one_converted, tmp_path_factory):
    """The words of each command but its output, and the flag that names the output."""
    small = tmp_path_factory.mktemp("small") / "a.gguf"
    write_gguf(one_origin, small)
    origin = ["--origin-hf-dir", one_origin]
    return {
        "gguf-to-hf": (["--gguf", small], "--save"),
        "hf-to-torch-dist": (["--hf-checkpoint", one_origin], "--save"),
        "torch-dist-to-hf": (["--input-dir", one_converted, *origin], "--output-dir"),
        "megatron-to-hf": (["--load", one_converted, *origin], "--output-dir"),
    }


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("gguf-to-hf", signal.SIGTERM),
        ("hf-to-torch-dist", signal.SIGINT),
        ("torch-dist-to-hf", signal.SIGHUP),
        ("megatron-to-hf", signal.SIGTERM),
    ],
)
def test_a_stop_leaves_what_the_next_run_continues(commands, one_origin, tmp_path, capfd, monkeypatch, name, stop):
    config = AutoConfig.from_pretrained(one_origin)
    # The file has no tokenizer.
    monkeypatch.setattr("slime_convert.conversions.from_gguf._load_settings", lambda file: (config, None))
    words, output = commands[name]
    with under_way([name, *words, output, tmp_path / "out"]) as process:
        assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
        os.kill(process.pid, stop)
        process.join(30)
        assert process.exitcode == 130
    partial = tmp_path / ".out.partial"
    told = f"slime-convert: interrupted; run the same command again to continue, or delete {partial}\n"
    assert capfd.readouterr().err == told
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_a_second_interrupt_does_not_keep_the_earlier_output_from_coming_back(one_origin, tmp_path, monkeypatch):
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(tmp_path / "td")]
    assert main(words) == 0
    before = tree(tmp_path)
    rename, renamed = Path.rename, []

    def interrupted(self, target):
        renamed.append(self.name)
        if self.name == "output":
            signal.raise_signal(signal.SIGTERM)
        elif self.name == "earlier":
            signal.raise_signal(signal.SIGINT)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        assert main([*words, "--force"]) == 130
    assert renamed[-3:] == ["td", "output", "earlier"]
    after = {name: entry for name, entry in tree(tmp_path).items() if not name.startswith(".td.partial")}
    assert after == before
    with pytest.raises(KeyboardInterrupt):  # the caller's own handling is back
        signal.raise_signal(signal.SIGINT)
    assert main([*words, "--force"]) == 0 and [path.name for path in tmp_path.iterdir()] == ["td"]


@pytest.mark.parametrize(
    "words",
    [
        ["hf-to-torch-dist", "--save", "out", "--hf-checkpoint"],
        ["torch-dist-to-hf", "--input-dir", "CONVERTED", "--output-dir", "out", "--origin-hf-dir"],
        ["megatron-to-hf", "--load", "CONVERTED", "--output-dir", "out", "--origin-hf-dir"],
    ],
    ids=lambda words: words[0],
)
def test_the_likely_mistakes_are_told_before_torch_is_imported(one_origin, one_converted, words):
    code = (
        "import sys; from slime_convert.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    words = [*(one_converted if word == "CONVERTED" else word for word in words), one_origin, "--num-layers", "9"]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240)
    assert result.stdout == "2 False\n" and "--num-layers 9" in result.stderr


TO_TORCH_DIST = ["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "required: COMMAND"),
        (["fly"], "unknown command 'fly'; see slime-convert --help"),
        (["hf-to-torch"], "unknown command 'hf-to-torch'; did you mean hf-to-torch-dist?"),
        (["hf-to-torch-dist", "--save", "x"], "required: --hf-checkpoint"),
        # The flag that is misspelt, not that it is missing.
        (["hf-to-torch-dist", "--hf-checkpiont", "x"], "unknown flag --hf-checkpiont; did you mean --hf-checkpoint?"),
        ([*TO_TORCH_DIST, "--num-layer", "2"], "unknown flag --num-layer; did you mean --num-layers?"),
        ([*TO_TORCH_DIST, "--zzzz=1"], "unknown flag --zzzz; see"),
        ([*TO_TORCH_DIST, "--zzzz=1", "--qqqq"], "unknown flags --zzzz --qqqq; see"),
        ([*TO_TORCH_DIST, "--tp", "2"], "unknown flag --tp (no parallel layout has to be given: checkpoints are read"),
        ([*TO_TORCH_DIST, "--num-layers", "two"], "invalid int value: 'two'"),
        ([*TO_TORCH_DIST, "--make-vocab-size-divisible-by", "0"], "'0' must be a whole number of 1 or more"),
        ([*TO_TORCH_DIST, "stray"], "unrecognized arguments: stray; see"),
        (["hf-to-torch-dist", "--hf-checkpoint", "", "--save", "y"], "'' must be the name of a file or directory"),
        (["torch-dist-to-hf", "--max-shard-gib", "many"], "'many' must be a whole number of 1 or more"),
        (["inspect"], "required: PATH"),
        (["verify", "x"], "required: PATH"),
        (["verify", "x", "y", "--tolerance", "much"], "invalid float value: 'much'"),
        (["inspect", "x", "--jsn"], "unknown flag --jsn; did you mean --json?"),
        # argparse takes it for the end of the flags, and leaves no value.
        (["hf-to-torch-dist", "--hf-checkpoint", "x", "--save=--"], "argument --save: '--' is not a value"),
        (["hf-to-int4", "--hf-checkpoint", "x", "--save", "y", "--ignore=--"], "--ignore: '--' is not a value"),
        (["verify", "x", "--", "--"], "argument PATH: '--' is not a value"),
    ],
)
def test_wrong_words_are_told_in_one_line(capsys, words, told):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    told_, line = capsys.readouterr()
    assert told in line and line.count("\n") == 1 and not told_


def test_a_mistake_without_a_stderr_to_tell_it_is_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["verify", str(tmp_path), str(tmp_path)]) == 2


@contextmanager
def no_room():
    with Path("/dev/full").open("w") as full:
        yield full


@contextmanager
def no_reader():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        yield pipe


@pytest.mark.parametrize("unwritable", [no_room, no_reader])
@pytest.mark.parametrize("words", [["verify", "/none", "/none"], ["verify"], ["fly"]])
def test_a_mistake_that_stderr_does_not_take_is_exit_code_2(unwritable, words):
    """With 1 the shell would be told that two checkpoints differ, with 120 that something else went wrong."""
    with unwritable() as stderr:
        assert subprocess.run([COMMAND, *words], stderr=stderr, timeout=240, check=False).returncode == 2


@pytest.mark.parametrize("unwritable", [no_room, no_reader])
def test_a_conversion_whose_notes_stderr_does_not_take_ends_well(monkeypatch, capsys, unwritable):
    def convert(*, on_progress, **_):
        on_progress(1, 10)  # a line, as an earlier run left something
        return slime_convert.Converted(Path("/x"), 1, 12, 0.0, notes=("more of it",))

    monkeypatch.setattr(slime_convert, "hf_to_fp8", convert)
    with unwritable() as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["hf-to-fp8", "--hf-checkpoint", "x", "--save", "y"]) == 0
    assert capsys.readouterr().out == "wrote 1 weight, 12 bytes, in 0.0 s: /x\n"


@pytest.mark.parametrize("unwritable", [no_room, no_reader])
def test_a_mistake_of_ours_that_stderr_does_not_take_is_exit_code_2(monkeypatch, unwritable):
    monkeypatch.setattr(slime_convert, "inspect_checkpoint", lambda _: 1 // 0)
    with unwritable() as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["inspect", "x"]) == 2


def test_a_conversion_that_stdout_does_not_take_is_said_to_be_complete(one_origin, tmp_path):
    words = ["hf-to-torch-dist", "--hf-checkpoint", one_origin, "--save", tmp_path / "td"]
    with no_room() as full:
        result = subprocess.run([COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 2 and without_progress(result.stderr) == (
        "slime-convert: cannot write the output (No space left on device); "
        f"the conversion is complete: {tmp_path / 'td'}\n"
    )
    assert main(["verify", str(one_origin), str(tmp_path / "td")]) == 0


def test_main_runs_in_a_thread(one_origin, capsys):
    """In which no signals can be handled."""
    with ThreadPoolExecutor(1) as beside:
        assert beside.submit(main, ["inspect", str(one_origin)]).result() == 0
    assert "parameters" in capsys.readouterr().out


def test_an_interrupt_while_modules_are_imported_leaves_no_traceback():
    """The signal comes with the first import of the package's own modules."""
    code = (
        "import signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'slime_convert.commands': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "import slime_convert.cli\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_importing_the_command_line_leaves_signals_alone():
    code = "import signal, slime_convert.cli; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_what_is_printed_commands_no_terminal(monkeypatch, capsys):
    """Nor does it look like another line."""
    forged = "a\nwrote 9 weights\x1b[2J"
    converted = slime_convert.Converted(Path(f"/x{forged}"), 1, 12, 0.0, copied=(forged,))
    monkeypatch.setattr(slime_convert, "torch_dist_to_hf", lambda **_: converted)
    words = ["--input-dir", "in", "--output-dir", "out", "--origin-hf-dir", f"o{forged}"]
    assert main(["torch-dist-to-hf", *words]) == 0
    shown = r"a\nwrote 9 weights\x1b[2J"
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"copied from o{shown}: {shown}" and second == f"wrote 1 weight, 12 bytes, in 0.0 s: /x{shown}"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "."],
        ["verify", ".", "/"],
        ["megatron-flags", "."],
        ["hf-to-torch-dist", "--save", "/none/x", "--hf-checkpoint", "."],
    ],
)
def test_a_working_directory_that_is_gone_is_told(tmp_path, words):
    (tmp_path / "gone").mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    result = subprocess.run(
        ["sh", "-c", script, "sh", tmp_path / "gone", COMMAND, *words], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "output" not in result.stderr


@pytest.mark.parametrize(
    "words", [["inspect", "x"], ["verify", "x", "y"], ["gguf-to-hf", "--save", "y", "--gguf", "x"]]
)
def test_what_could_not_be_read_is_told(monkeypatch, capsys, words):
    def unreadable(*_, **__):
        raise OSError(5, "Input/output error")

    for name in ("inspect_checkpoint", "verify", "gguf_to_hf"):
        monkeypatch.setattr(slime_convert, name, unreadable)
    assert main(words) == 2
    paths = "x or y" if words[0] == "verify" else "x"
    told = f"cannot use {paths} (Input/output error); correct this and run the command again\n"
    assert capsys.readouterr().err == f"slime-convert: {told}"


@pytest.mark.parametrize("collects", [False, True])
def test_inspect_leaves_the_callers_garbage_collection(one_origin, capsys, collects):
    assert gc.isenabled()
    try:
        if not collects:
            gc.disable()
        assert main(["inspect", str(one_origin)]) == 0
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_a_model_directory_may_have_the_name_of_a_json_file(one_origin, tmp_path, capsys):
    (tmp_path / "m.json").symlink_to(one_origin, target_is_directory=True)
    assert main(["megatron-flags", str(tmp_path / "m.json")]) == 0
    there = capsys.readouterr().out
    assert main(["megatron-flags", str(one_origin / "config.json")]) == 0
    assert capsys.readouterr().out == there


def test_contradicting_flags_are_told_together(one_origin, tmp_path, capsys):
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(tmp_path / "td")]
    assert main([*words, "--num-layers", "9", "--hidden-size", "10"]) == 2
    line = capsys.readouterr().err
    assert "--num-layers 9" in line and "--hidden-size 10" in line and line.count("\n") == 1


def test_existing_output_needs_force(one_origin, tmp_path, capsys):
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(tmp_path / "td")]
    assert main(words) == 0
    before = tree(tmp_path)
    assert main(words) == 2
    assert "replace it with --force" in capsys.readouterr().err and tree(tmp_path) == before
    assert main([*words, "--force"]) == 0
    assert tree(tmp_path) == before


def test_force_replaces_only_what_slime_convert_wrote(one_origin, tmp_path, capsys):
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(tmp_path / "td"), "--force"]
    assert main(words) == 0
    (tmp_path / "td" / "notes.txt").write_text("years of work")
    before = tree(tmp_path)
    assert main(words) == 2
    line = capsys.readouterr().err
    assert "is not as slime-convert wrote it (it holds notes.txt), so --force does not replace it" in line
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("function", "words"), [("inspect_checkpoint", ["inspect"]), ("verify", ["verify", "x"])])
def test_a_mistake_of_ours_is_no_difference(monkeypatch, capsys, function, words):
    def broken(*_, **__):
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(slime_convert, function, broken)
    assert main([*words, "x"]) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[-1] == "RuntimeError: what nobody thought of" and "report it with the lines above" in line
