"""Full disks, and inputs that are damaged, incomplete, of another model, or hostile: told in one line, nothing lost."""

import os
import pickle
import re
import shutil
import subprocess

import pytest
import torch

from slime_convert import hf_to_torch_dist, torch_dist_to_hf
from slime_convert.cli import main
from slime_convert.errors import OutputError
from support.family_models import contents, make_model, tree


@pytest.fixture(scope="module")
def hf(made):
    """A model. Not to be changed."""
    return made("llama-tied")


@pytest.fixture
def td(hf, tmp_path):
    """Its checkpoint, to be damaged."""
    hf_to_torch_dist(hf, tmp_path / "td", part_bytes=12_000)
    return tmp_path / "td"


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 48 KiB that can be made larger."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(*words):
        return subprocess.run(["mount", *words, place], capture_output=True, text=True, timeout=240)

    made = mount("-t", "tmpfs", "-o", "size=48k", "tmpfs")
    if made.returncode:
        pytest.skip(f"a disk can be mounted by root only: {made.stderr.strip()}")
    try:
        yield place, lambda size: mount("-o", f"remount,size={size}")
    finally:
        subprocess.run(["umount", place], check=True, timeout=240)


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_disk_that_is_really_full(hf, td, tmp_path, small_disk, way):
    place, resize = small_disk

    def convert(out, **kwargs):
        if way == "there":
            hf_to_torch_dist(hf, out, part_bytes=12_000, **kwargs)
        else:
            torch_dist_to_hf(td, out, hf, max_shard_bytes=12_000, **kwargs)

    convert(tmp_path / "whole")
    with pytest.raises(OutputError, match=r"No space left on device.*make room, and run the same command again"):
        convert(place / "out")
    assert [path.name for path in place.iterdir()] == [".out.partial"]
    assert resize("4m").returncode == 0
    calls = []
    convert(place / "out", on_progress=lambda *call: calls.append(call))
    assert calls[0][0] > 0 and contents(place / "out") == contents(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_disk_that_is_full_at_any_page(hf, td, tmp_path, small_disk, way):
    place, resize = small_disk

    def convert(out, **kwargs):
        if way == "there":
            hf_to_torch_dist(hf, out, part_bytes=12_000, **kwargs)
        else:
            torch_dist_to_hf(td, out, hf, max_shard_bytes=12_000, **kwargs)

    convert(tmp_path / "whole")
    for pages in range(1, 200):
        shutil.rmtree(place / "out", ignore_errors=True)
        assert resize(f"{pages * 4}k").returncode == 0
        full = False
        try:
            convert(place / "out")
        except OutputError as error:
            full = True
            assert "No space left on device" in str(error)
            kept = (place / ".out.partial").is_dir()
            assert kept == ("run the same command again" in str(error)) and not (place / "out").exists()
        assert resize("4m").returncode == 0
        if full:
            convert(place / "out")
        assert contents(place / "out") == contents(tmp_path / "whole")
        assert [path.name for path in place.iterdir()] == ["out"]
        if not full:
            break
    assert pages > 15 and not full


def parts_of(td):
    return sorted((td / "release").glob("*.distcp"))


def flip(path):
    data = bytearray(path.read_bytes())
    # In the middle of the file: a weight's bytes, or what torch wrote around them.
    data[data.index(b"archive/data/0") + 200] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2000])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip, r"__1_0\.distcp is damaged: the checksum of decoder\.layers\.\S+ at \(1, 0, 0\) is wrong"),
        (cut, r"__1_0\.distcp is cut off: it has \d+ of \d+ bytes"),
        (os.unlink, r"1 of the 5 files that \S+ names are missing, such as __1_0\.distcp"),
    ],
)
def test_a_damaged_part_is_told_by_file(hf, td, tmp_path, damage, told, capsys):
    damage(td / "release" / "__1_0.distcp")
    before = tree(tmp_path)
    back = ["torch-dist-to-hf", "--input-dir", td, "--output-dir", tmp_path / "out", "--origin-hf-dir", hf]
    for words in (back, ["verify", td, hf]):
        assert main([str(word) for word in words]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and re.search(told, line), line
        assert tree(tmp_path) == before


@pytest.mark.parametrize(("damage", "told"), [(cut, "is cut off"), (os.unlink, "are missing")])
def test_a_damaged_shard_is_told(hf, tmp_path, capsys, damage, told):
    shutil.copytree(hf, tmp_path / "hf")
    damage(sorted((tmp_path / "hf").glob("*.safetensors"))[1])
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(tmp_path / "hf"), "--save", str(tmp_path / "out")]
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and told in line and "model-00002-of-" in line
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_another_models_directory_is_told(td, tmp_path, capsys):
    other = make_model("llama-tied", tmp_path / "other", num_hidden_layers=4)
    capsys.readouterr()
    for origin, told in ((other, "num_layers 3 (config: 4)"), (td, "config.json"), (tmp_path / "none", "config.json")):
        words = ["torch-dist-to-hf", "--input-dir", td, "--output-dir", tmp_path / "out", "--origin-hf-dir", origin]
        assert main([str(word) for word in words]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and told in line
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self._mark}",))


def hostile_metadata(td, hostile):
    (td / "release" / ".metadata").write_bytes(pickle.dumps(hostile))


def hostile_in_metadata(td, hostile):
    path = td / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = hostile
    path.write_bytes(pickle.dumps(metadata))


def hostile_common(td, hostile):
    torch.save(hostile, td / "release" / "common.pt")


def hostile_in_common(td, hostile):
    common = torch.load(td / "release" / "common.pt")
    common["args"]["extra"] = common["extra"] = hostile
    torch.save(common, td / "release" / "common.pt")


def hostile_weight(td, hostile):
    """In place of the first weight in a file; the zip archive is a valid one."""
    path = td / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    torch.save(hostile, td / "release" / "hostile.distcp")
    index, place = next((index, place) for index, place in metadata.storage_data.items() if "norm" in index.fqn)
    metadata.storage_data[index] = type(place)("hostile.distcp", 0, (td / "release" / "hostile.distcp").stat().st_size)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("poison", "code"),
    [
        (hostile_metadata, 2),
        (hostile_in_metadata, 2),  # torch would run it
        (hostile_common, 0),
        (hostile_in_common, 0),
        (hostile_weight, 2),
    ],
)
def test_a_hostile_pickle_runs_nothing(hf, td, tmp_path, capsys, poison, code):
    mark = tmp_path / "mark"
    poison(td, Hostile(mark))
    for words in (
        ["torch-dist-to-hf", "--input-dir", td, "--output-dir", tmp_path / "one", "--origin-hf-dir", hf],
        ["megatron-to-hf", "--load", td, "--output-dir", tmp_path / "two", "--origin-hf-dir", hf],
        ["verify", hf, td],
    ):
        assert main([str(word) for word in words]) == code, capsys.readouterr().err
    assert main(["inspect", str(td)]) in (0, 2)
    assert not mark.exists()
    os.system(f"touch {mark}")  # the mark could be made
    assert mark.exists()
