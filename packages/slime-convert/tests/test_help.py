"""The words of the commands: help, versions, flags for Megatron, one line at the end, lines in a log."""

import ast
import importlib.metadata
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

import slime_convert
from slime_convert import SHAPE_FLAGS, ModelShape
from slime_convert.cli import main
from slime_convert.commands import COMMANDS
from slime_convert.formats import open_checkpoint
from slime_convert.published import PUBLISHED
from support.family_models import make_model, weights_of

PACKAGE = Path(slime_convert.__file__).parent
NAMES = [command.name for command in COMMANDS]
WITH_SHAPE = [command.name for command in COMMANDS if command.takes_shape]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def no_lines(monkeypatch):
    """No progress, however slow the machine is."""
    for name in ("_LOG_PAUSE_SECONDS", "_LOG_SECONDS"):
        monkeypatch.setattr(f"slime_convert.progress.{name}", float("inf"))


def said(capsys, *words, code=0):
    """What a command writes to stdout, and nothing to stderr."""
    capsys.readouterr()  # bars of transformers, with which models were made
    try:
        found = main(list(words))
    except SystemExit as end:
        found = end.code
    out, err = capsys.readouterr()
    assert (found, err) == (code, "")
    return out


class TestHelp:
    @pytest.mark.parametrize("name", NAMES)
    def test_it_begins_with_what_it_does_and_an_example(self, capsys, name):
        command = next(command for command in COMMANDS if command.name == name)
        lines = said(capsys, name, "--help").splitlines()
        assert lines[0].startswith(f"usage: slime-convert {name}") and lines[1] == ""
        assert lines[2:5] == [command.help, "", f"  slime-convert {command.example}"]
        # Everything on the first page.
        assert len(lines) <= 24 and "Megatron" not in lines[0]

    @pytest.mark.parametrize("name", NAMES)
    def test_the_example_is_a_command_line_that_is_understood(self, capsys, monkeypatch, name):
        """All of it but the files."""
        command = next(command for command in COMMANDS if command.name == name)
        words = command.example.split()
        if name == "list-models":
            assert said(capsys, *words)
            return
        monkeypatch.chdir(Path(__file__).parent / "families")
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.search(r"there is no |cannot read ", err), err

    def test_the_flags_that_matter_stand_first(self, capsys):
        text = said(capsys, "hf-to-torch-dist", "--help")
        flags = re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", text, flags=re.MULTILINE)
        five = ["--hf-checkpoint", "--save", "--force", "--adapter", "--make-vocab-size-divisible-by"]
        assert flags == ["--help", *five, "--quiet", "--help-shape"]
        assert text.splitlines()[0] == "usage: slime-convert hf-to-torch-dist --hf-checkpoint DIR --save DIR [flags]"

    @pytest.mark.parametrize("name", WITH_SHAPE)
    def test_shape_flags_have_a_help_of_their_own(self, capsys, name):
        text = said(capsys, name, "--help")
        assert "--num-layers" not in text and "(--help-shape)" in text
        listed = said(capsys, name, "--help-shape")
        assert re.findall(r"^  (--\S+)", listed, flags=re.MULTILINE) == [flag.name for flag in SHAPE_FLAGS]
        assert all(flag.help in listed for flag in SHAPE_FLAGS)

    def test_every_command_is_listed(self, capsys):
        text = said(capsys, "--help")
        assert all(f"  {command.name}" in text and command.help.split(",")[0] in text for command in COMMANDS)
        assert text.index(f"slime-convert {COMMANDS[0].example}") < text.index("COMMAND\n")

    def test_every_flag_is_described(self):
        for command in COMMANDS:
            assert all(flag.options["help"] for flag in command.flags)
            assert command.help and not command.help.endswith(".") and len(command.help) < 110


def test_the_version(capsys):
    assert said(capsys, "--version") == f"slime-convert {importlib.metadata.version('slime-convert')}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hf-to-torch-dist", "--sav", "td"], "unknown flag --sav; did you mean --save?"),
        (["hf-to-torch-dist", "--hf", "x", "--save", "y"], "unknown flag --hf; did you mean --hf-checkpoint?"),
        (["hf-to-torch-dist", "--hf_checkpoint=x"], "unknown flag --hf_checkpoint; did you mean --hf-checkpoint?"),
        (["torch-dist-to-hf", "--input", "x"], "unknown flag --input; did you mean --input-dir?"),
        (["megatron-to-hf", "--laod", "x"], "unknown flag --laod; did you mean --load?"),
        (["merge-lora", "--adaptor", "x"], "unknown flag --adaptor; did you mean --adapter?"),
        (["gguf-to-hf", "--guff", "x"], "unknown flag --guff; did you mean --gguf?"),
        # The first letter of a flag; none of the many shape flags.
        (["hf-to-torch-dist", "-s", "x"], "unknown flag -s; did you mean --save?"),
        (["hf-to-torch-dist", "-F"], "unknown flag -F; did you mean --force?"),
        (["torch-dist-to-hf", "-i", "x"], "unknown flag -i; did you mean --input-dir?"),
        (["hf-to-torch-dist", "-o", "x"], "unknown flag -o; see"),
        (["torch-dist-to-hf", "-o", "x"], "unknown flag -o; see"),  # --output-dir, or --origin-hf-dir
        (["hf-to-fp8", "-z"], "unknown flag -z; see"),
        (["verfy", "x", "y"], "unknown command 'verfy'; did you mean verify?"),
    ],
)
def test_near_misses(capsys, words, told):
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and told in err and (out, err.count("\n")) == ("", 1)


def test_short_flags_may_be_joined(no_lines, one_origin, tmp_path, capsys):
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(tmp_path / "td")]
    assert said(capsys, *words, "-q") == said(capsys, *words, "-fq") == said(capsys, *words, "-q", "-f") == ""
    with pytest.raises(SystemExit):
        main([*words, "-fx"])
    assert "unknown flag -fx; see" in capsys.readouterr().err


class TestMegatronFlags:
    SCRIPTS = next((up / "scripts/models" for up in Path(__file__).parents if (up / "scripts/models").is_dir()), None)

    @pytest.mark.skipif(SCRIPTS is None, reason="outside the workspace there are no scripts")
    @pytest.mark.parametrize("name", ["qwen3-4B", "glm4.5-106B-A12B", "deepseek-v3", "llama3.2-3B"])
    def test_a_directory_gives_what_the_script_of_that_model_has(self, tmp_path, capsys, name):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].config))
        text = said(capsys, "megatron-flags", str(tmp_path))
        script = re.search(r"MODEL_ARGS=\((.*)\)", (self.SCRIPTS / f"{name}.sh").read_text(), flags=re.DOTALL)
        assert [line.strip() for line in script[1].strip().splitlines()] == text.splitlines()
        assert said(capsys, "megatron-flags", name) == text

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_a_shell_reads_them_as_words(self, capsys, name):
        text = said(capsys, "megatron-flags", name)
        assert len(text.splitlines()) == text.count("--")
        shell = ["bash", "-c", f"printf '%s\\n' {text}".replace("\n", " ")]
        words = subprocess.run(shell, capture_output=True, text=True, timeout=240, check=True).stdout.splitlines()
        assert words == PUBLISHED[name].shape.to_megatron_flags()

    def test_they_are_accepted_with_the_model(self, made, tmp_path, capsys):
        """Whatever the family."""
        for name in ("qwen3-next", "gpt-oss", "glm5", "gemma3"):
            words = ModelShape.from_hf_config(made(name)).to_megatron_flags()
            text = said(capsys, "megatron-flags", str(made(name)))
            assert re.sub(r'"(.*?)"', r"\1", text).split() == words
            save = ["--save", str(tmp_path / name)]
            assert main(["hf-to-torch-dist", "--hf-checkpoint", str(made(name)), "-q", *save, *words]) == 0

    def test_what_is_no_model(self, tmp_path, capsys):
        near = "no published model of that name; did you mean qwen3-8B? slime-convert list-models"
        for model, told in (("qwen3-5B", near), (tmp_path, "")):
            assert main(["megatron-flags", str(model)]) == 2
            out, err = capsys.readouterr()
            assert out == "" and told in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def inputs(one_origin, one_converted, tmp_path_factory):
    """For each conversion its words but the output, and the flag that names that."""
    root = tmp_path_factory.mktemp("inputs")
    wide = {"hidden_size": 192, "num_hidden_layers": 1, "intermediate_size": 128, "head_dim": 32}
    plain = make_model("llama-tied", root / "plain", **wide)
    for there in ("fp8", "int4"):
        assert main([f"hf-to-{there}", "--hf-checkpoint", str(plain), "--save", str(root / there), "-q"]) == 0
    megatron = ["--origin-hf-dir", one_origin]
    return {
        "hf-to-torch-dist": (["--hf-checkpoint", one_origin], "--save"),
        "torch-dist-to-hf": (["--input-dir", one_converted, *megatron], "--output-dir"),
        "megatron-to-hf": (["--load", one_converted, *megatron], "--output-dir"),
        "hf-to-fp8": (["--hf-checkpoint", plain], "--save"),
        "fp8-to-bf16": (["--hf-checkpoint", root / "fp8"], "--save"),
        "hf-to-int4": (["--hf-checkpoint", plain], "--save"),
        "int4-to-bf16": (["--hf-checkpoint", root / "int4"], "--save"),
    }


FROM_A_CHECKOUT = r"scripts/|packages/|docs/|\./"

CONVERSIONS = ("hf-to-torch-dist", "torch-dist-to-hf", "megatron-to-hf", "hf-to-fp8", "fp8-to-bf16", "hf-to-int4")


@pytest.mark.parametrize("name", [*CONVERSIONS, "int4-to-bf16"])
def test_one_line_at_the_end_or_none(no_lines, inputs, tmp_path, capsys, name):
    """Weights, bytes, seconds and place; how it went before belongs into a log, which is stderr."""
    words, output = inputs[name]
    words = [name, *map(str, words), output]
    line = said(capsys, *words, str(tmp_path / "out"))
    found = re.fullmatch(r"wrote ([\d,]+) weights, (\S+ \S+), in \d+\.\d s, \S+ \S+/s: (.*)\n", line)
    assert found[3] == str(tmp_path / "out")
    held = open_checkpoint(tmp_path / "out").tensors
    assert int(found[1].replace(",", "")) == len(held)
    assert found[2] == f"{sum(info.nbytes for info in held.values()) / 1024:.1f} KiB"
    assert said(capsys, *words, str(tmp_path / "quiet"), "--quiet") == ""
    assert said(capsys, *words, str(tmp_path / "quiet"), "-q", "-f") == ""


def test_quiet_is_not_silent_about_mistakes_and_differences(
    no_lines, one_origin, one_converted, made, tmp_path, capsys
):
    assert said(capsys, "verify", str(one_origin), str(one_converted), "-q") == ""
    assert "different: " in said(capsys, "verify", str(one_origin), str(made("llama-tied")), "--quiet", code=1)
    assert main(["hf-to-fp8", "--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "out"), "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("slime-convert: cannot read ")


def test_notes_come_before_the_last_line(no_lines, made, tmp_path, capsys):
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(made("qwen3-next")), "--save", str(tmp_path / "td")]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"slime-convert: note: \S+ lacks the model's prediction modules \(1\); .*\n", err)
    assert out.startswith("wrote ") and out.count("\n") == 1


def test_copied_weights_are_named(no_lines, one_converted, one_origin, tmp_path, capsys):
    """One on a line, as people have piped them since version 0.1."""
    origin = shutil.copytree(one_origin, tmp_path / "origin")
    (origin / "model.safetensors.index.json").unlink()
    weights = weights_of(origin)
    save_file({"model.visual.weight": weights["model.norm.weight"]}, origin / "more.safetensors")
    words = ["--input-dir", one_converted, "--output-dir", tmp_path / "hf", "--origin-hf-dir", origin, "-a"]
    first, last = said(capsys, "torch-dist-to-hf", *map(str, words)).splitlines()
    assert first == f"copied from {origin}: model.visual.weight"
    assert last.startswith("wrote 37 weights, ")


class TestLog:
    @pytest.fixture
    def clock(self, monkeypatch):
        """Each look at the clock takes some seconds."""

        def every(seconds):
            now = [time.monotonic()]

            def look():
                now[0] += seconds
                return now[0]

            monkeypatch.setattr("slime_convert.progress.time.monotonic", look)

        return every

    def lines(self, origin, directory, monkeypatch):
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        words = ["hf-to-torch-dist", "--hf-checkpoint", str(origin), "--save", str(directory)]
        assert main(words) == 0
        return sys.stderr.getvalue().splitlines()

    def test_a_conversion_that_takes_long_says_how_far_it_is(self, one_origin, tmp_path, monkeypatch, clock):
        clock(3.0)
        lines = self.lines(one_origin, tmp_path / "td", monkeypatch)
        found = [re.fullmatch(r" *(\d+) %, \S+ \S+ of \S+ KiB, \S+ \S+/s(?:, \d+ s left)?", line) for line in lines]
        percent = [int(match[1]) for match in found]
        assert 5 < len(percent) <= 20
        assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(percent))

    def test_one_that_takes_very_long_says_it_every_minute(self, one_origin, tmp_path, monkeypatch, clock):
        clock(61.0)
        assert len(self.lines(one_origin, tmp_path / "td", monkeypatch)) > 20

    def test_a_quick_one_says_nothing(self, one_origin, tmp_path, monkeypatch, clock):
        clock(0.001)
        assert self.lines(one_origin, tmp_path / "td", monkeypatch) == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A copy of the package and nothing next to it, as a wheel installs it."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, root / "slime_convert", ignore=shutil.ignore_patterns("__pycache__"))
    return root


class TestWithoutACheckout:
    def run(self, alone, *words):
        environment = {"PYTHONPATH": str(alone), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, "-m", "slime_convert", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=alone,
            env=environment,
        )

    def test_it_is_the_copy_that_runs(self, alone):
        code = "import slime_convert; print(slime_convert.__file__)"
        environment = {"PYTHONPATH": str(alone)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment
        )
        assert done.stdout == f"{alone / 'slime_convert' / '__init__.py'}\n"

    @pytest.mark.parametrize("words", [["--help"], ["list-models"], ["megatron-flags", "kimi-k2"]], ids=" ".join)
    def test_commands_that_need_no_model(self, alone, capsys, words):
        done = self.run(alone, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == said(capsys, *words)

    def test_a_conversion(self, alone, one_origin, tmp_path):
        done = self.run(alone, "hf-to-torch-dist", "--hf-checkpoint", one_origin, "--save", tmp_path / "td")
        assert done.returncode == 0 and done.stdout.startswith("wrote 27 weights, ")

    def test_a_mistake(self, alone):
        done = self.run(alone, "inspect", "x")
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("slime-convert: there is no ")

    def test_no_text_names_a_file_of_the_checkout(self):
        """Nor asks to install from one."""
        for path in PACKAGE.rglob("*.py"):
            source = path.read_text()
            if not re.search(FROM_A_CHECKOUT, source):
                continue
            parts = list(ast.walk(ast.parse(source)))
            docs = {id(part.value) for part in parts if isinstance(part, ast.Expr)}
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and id(part) not in docs]
            assert not [text for text in texts if isinstance(text, str) and re.search(FROM_A_CHECKOUT, text)]
