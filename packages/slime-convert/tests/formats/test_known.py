"""Which format a path holds, by every command alike."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_convert.cli import main
from slime_convert.errors import CheckpointError, GgufError
from slime_convert.formats import FORMATS, TORCH_DIST, detect

TRACKER = "latest_checkpointed_iteration.txt"
RECORD = json.dumps({"sharded_backend": "torch_dist"})

# Files that mark a format, in the order in which formats are looked for.
MARKS = {
    "torch": ["mp_rank_00/model_optim_rng.pt"],
    "torch_dist": [".metadata", "metadata.json"],
    "hf": ["config.json", "model.safetensors"],
    "gguf": ["model.gguf"],
}


def mark(directory, form):
    for name in MARKS[form]:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECORD if name == "metadata.json" else "")


@given(
    forms=st.sets(st.sampled_from(sorted(MARKS)), min_size=1), below=st.sampled_from(["", "release", "iter_0000012"])
)
def test_the_first_that_matches_counts(tmp_path_factory, forms, below):
    """Of Megatron's formats the iteration may be given, or the directory whose tracker names it."""
    root = tmp_path_factory.mktemp("root")
    first = next(form for form in MARKS if form in forms)
    for form in forms:
        mark(root / below if form in ("torch", "torch_dist") else root, form)
    if below and first in ("torch", "torch_dist"):
        (root / TRACKER).write_text("12\n" if below.startswith("iter") else below)
        expected = root / below
    else:
        expected = {"gguf": root / "model.gguf"}.get(first, root)
    found = detect(root)
    assert (found.form.name, found.path) == (first, expected)
    assert detect(expected).path == expected
    allowed = [form.name for form in FORMATS if form.name != first]
    with pytest.raises(
        CheckpointError, match=rf"is a checkpoint of format {first}; allowed: .*; slime-convert .* conv"
    ):
        detect(root, allowed)


def test_what_the_commands_write_is_known(one_origin, one_converted):
    assert detect(one_origin).form.name == "hf" and detect(one_converted).path == one_converted / "release"


def test_a_gguf_file_is_known_by_its_name_or_its_first_bytes(tmp_path):
    for name, data in (("a.gguf", b""), ("blob", b"GGUF and more")):
        (tmp_path / name).write_bytes(data)
        assert detect(tmp_path / name) == (FORMATS[-1], tmp_path / name)
    (tmp_path / "text").write_text("GG")
    with pytest.raises(CheckpointError, match="text is not a checkpoint of a known format"):
        detect(tmp_path / "text")


@pytest.mark.parametrize("form", ["torch_dist", "hf"])
def test_a_file_of_a_checkpoint_that_is_given_for_it_says_to_give_its_directory(tmp_path, form):
    mark(tmp_path, form)
    for name in MARKS[form]:
        words = re.escape(f"{tmp_path / name} is a file of a checkpoint of format {form}; give its directory")
        with pytest.raises(CheckpointError, match=f"^{words}$"):
            detect(tmp_path / name)


def test_a_config_beside_a_gguf_file_does_not_make_it_hugging_faces(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert detect(tmp_path).form.name == "hf"
    (tmp_path / "a.gguf").touch()
    assert detect(tmp_path) == (FORMATS[-1], tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(GgufError, match=r"holds 2 \.gguf files: a\.gguf b\.gguf; give one of them"):
        detect(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert detect(tmp_path).form.name == "hf"


@pytest.mark.timeout(20)
def test_directories_below_are_not_searched(tmp_path):
    """A user's home, or a disk of models: it would take minutes, and find somebody else's file."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.gguf").touch()
    with pytest.raises(CheckpointError, match="is not a checkpoint of a known format"):
        detect(tmp_path)


def not_release(text):
    return lambda root: (root / TRACKER).write_bytes(text)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda root: root.rmdir(), "there is no .*; give a checkpoint: "),
        (lambda root: None, "is not a checkpoint of a known format; give one of these: "),
        (not_release(b"soon"), "holds 'soon'; it must be 'release' or a number"),
        (not_release("²".encode()), "holds '²'; it must be 'release' or a number"),
        (not_release(b"9" * 5000), "holds '9{39}; it must be 'release' or a number"),
        (not_release(b"\xff"), "iteration.txt holds .*; it must be 'release' or a number"),
        (not_release(b"7"), "names iter_0000007, but that has no mp_rank_"),
        (
            lambda root: (root / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "has format 'zarr'; allowed: 't",
        ),
        (lambda root: (root / "metadata.json").write_text("[" * 10**5), "is not a checkpoint of a known format"),
        (lambda root: (root / ".metadata").touch(), r"metadata\.json is missing or names no format; use a complete"),
    ],
    ids=[
        "nothing",
        "empty",
        "tracker",
        "superscript",
        "digits",
        "bytes",
        "no iteration",
        "zarr",
        "nested",
        "no record",
    ],
)
def test_every_command_says_the_same(one_origin, tmp_path, capsys, prepare, words):
    root = tmp_path / "root"
    root.mkdir()
    prepare(root)
    to_hf = ["--output-dir", str(tmp_path / "out"), "--origin-hf-dir", str(one_origin)]
    commands = [
        ["inspect", str(root)],
        ["verify", str(root), str(one_origin)],
        ["torch-dist-to-hf", "--input-dir", str(root), *to_hf],
        ["megatron-to-hf", "--load", str(root), *to_hf],
        ["gguf-to-hf", "--gguf", str(root), "--save", str(tmp_path / "out")],
    ]
    lines = set()
    for command in commands:
        assert main(command) == 2
        lines.add(capsys.readouterr().err.split(": torch")[0].split(": gguf")[0])
    (line,) = lines  # but for the formats that a command reads
    with pytest.raises(CheckpointError, match=words):
        detect(root)
    assert line.startswith("slime-convert: ") and not (tmp_path / "out").exists()


def test_a_legacy_checkpoint_is_not_taken_for_another(legacy_runs):
    run = legacy_runs["llama-tied"]
    with pytest.raises(
        CheckpointError, match=r"format torch; allowed: torch_dist .*; slime-convert megatron-to-hf conv"
    ):
        detect(run.save, (TORCH_DIST,))
    assert detect(run.save).path == run.save / "iter_0000005"
