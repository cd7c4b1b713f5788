"""``slime-convert inspect`` and ``slime-convert verify`` as a user types them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slime_convert.cli import main
from slime_convert.convert import hf_to_torch_dist

COMMAND = Path(sys.executable).with_name("slime-convert")


@pytest.fixture(scope="module")
def td(one_origin, tmp_path_factory):
    path = tmp_path_factory.mktemp("td") / "td"
    hf_to_torch_dist(one_origin, path)
    return path


@pytest.fixture
def changed(one_origin, tmp_path):
    """The sign of one element is another."""
    path = tmp_path / "changed"
    shutil.copytree(one_origin, path)
    shard = sorted(path.glob("*.safetensors"))[0]
    weights = load_file(shard)
    name = next(name for name in weights if "down_proj" in name)
    weights[name].view(-1)[5] *= -1
    save_file(weights, shard)
    return path, name


def test_exit_codes(one_origin, td, changed, tmp_path):
    path, name = changed
    words = [COMMAND, "verify", one_origin, path]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (1, "")
    assert name in result.stdout and result.stdout.splitlines()[-1].startswith("different: 35 equal, 1 values (")
    assert main(["verify", str(td), str(one_origin)]) == 0
    assert main(["verify", str(td), str(tmp_path / "none")]) == 2


def test_verify_as_json(td, changed, capsys):
    path, name = changed
    assert main(["verify", str(td), str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["counts"]["values"], told["counts"]["equal"]) == (False, 1, 35)
    (difference,) = told["differences"]
    assert (difference["name"], difference["num_differing"]) == (name, 1)
    tolerance = str(difference["max_abs_diff"])
    assert main(["verify", str(td), str(path), "--tolerance", tolerance]) == 0
    assert "equal: 35 equal, 1 within tolerance (" in capsys.readouterr().out


def test_the_origin_may_give_the_shape(one_origin, td, tmp_path, capsys):
    assert main(["verify", str(td), str(one_origin), "--origin-hf-dir", str(one_origin)]) == 0
    assert main(["verify", str(td), str(one_origin), "--origin-hf-dir", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_inspect_as_table_and_json(one_origin, td, capsys):
    assert main(["inspect", str(one_origin)]) == 0
    assert capsys.readouterr().out.startswith("format        hf\n")
    assert main(["inspect", str(td), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["iteration"]) == ("torch_dist", "release")


@pytest.mark.parametrize("which", ["hf", "torch_dist"])
def test_inspect_imports_no_torch(one_origin, td, which):
    code = "import sys; from slime_convert.cli import main; print(main(sys.argv[1:]), HEAVY & set(sys.modules))"
    code = code.replace("HEAVY", "{'torch', 'numpy', 'safetensors'}")
    words = ["inspect", one_origin if which == "hf" else td]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "0 set()"


def test_verify_tells_the_likely_mistakes_before_torch_is_imported(one_origin, tmp_path):
    code = "import sys; from slime_convert.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["verify", one_origin, tmp_path / "none"]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2 False\n" and result.stderr.startswith("slime-convert: there is no ")


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("shard cut off", "is cut off"),
        ("shard gone", "are missing, such as"),
        ("metadata", "the checkpoint is damaged, use another"),
        ("distcp cut off", "is cut off"),
        ("distcp gone", "are missing, such as"),
        ("common", "the checkpoint is damaged, use another"),
        ("format", "use a complete torch_dist checkpoint"),
        ("nothing", "is no checkpoint of a known format"),
    ],
)
def test_damage_is_one_line_that_says_what_to_do(one_origin, td, tmp_path, capsys, command, damage, told):
    broken = tmp_path / "broken"
    shutil.copytree(one_origin if damage.startswith("shard") else td, broken)
    release = broken / "release"
    target = {
        "shard": sorted(broken.glob("*.safetensors"))[-1:],
        "metadata": [release / ".metadata"],
        "distcp": [release / "__0_0.distcp"],
        "common": [release / "common.pt"],
        "format": [release / "metadata.json"],
    }.get(damage.split()[0])
    if target is None:
        shutil.rmtree(broken)
        broken.mkdir()
    elif damage.endswith("gone"):
        target[0].unlink()
    else:
        target[0].write_bytes(target[0].read_bytes()[:-40])
    words = [command, str(broken)] + ([str(one_origin)] if command == "verify" else [])
    assert main(words) == 2
    line = capsys.readouterr().err
    assert told in line and line.count("\n") == 1 and line.startswith("slime-convert: ")


def test_wrong_words_are_told_in_one_line(capsys):
    for words in (["inspect"], ["verify", "x"], ["verify", "x", "y", "--tolerance", "much"], ["inspect", "x", "--jsn"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1
