"""A folder of traps: what would run, and what would be written to, if a command opened more than it was given."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pkgutil
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

RAN = "ran.txt"
OPTIONAL = (
    *("apex", "bitsandbytes", "cupy", "deep_ep", "deepspeed", "flash_attn", "flash_attn_interface", "fused_dense_lib"),
    *("causal_conv1d", "flashinfer", "grouped_gemm", "kernels", "mamba_ssm", "modelopt", "nvidia_resiliency_ext"),
    *("onnxruntime", "peft", "sgl_kernel", "sglang_router", "tensorboardX", "tensorflow", "transformer_engine"),
    *("transformer_engine_torch", "triton", "vllm", "wandb", "zarr", "zstandard", "isal", "indexed_gzip", "gguf"),
    *("math_verify", "sympy", "datasets", "pandas", "pyarrow", "matplotlib", "IPython", "debugpy", "viztracer"),
    *("slime", "slime_plugins", "megatron", "mbridge", "sitecustomize", "usercustomize", "conftest", "setup", "test"),
    *("reward", "rewards", "utils", "tools", "config", "model", "configuration_trap", "modeling_trap"),
)
"""Modules that are looked for where they may not be installed, and that people have in a folder of their own."""
PROGRAMS = (
    *("python", "python3", "git", "nvidia-smi", "uv", "pip", "cc", "gcc", "g++", "c++", "nvcc", "ninja", "ray", "sh"),
    *(".venv-engine/bin/python", ".venv/bin/python", "venv/bin/python", "bin/python", "bin/git", ".git/hooks/any"),
)
TEXTS = {
    ".env": "PYTHONPATH={folder}\nLD_PRELOAD={folder}/trap.so\nPATH={folder}\n",
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "setup"\nbackend-path = ["."]\n'
    '[tool.pytest.ini_options]\naddopts = "-p conftest"\n',
    "setup.cfg": "[options]\npy_modules = setup\n",
    "trap.pth": "import conftest\n",
    "pip.conf": "[global]\nindex-url = http://127.0.0.1:9/\n",
    "uv.toml": 'index-url = "http://127.0.0.1:9/"\n',
    "pyvenv.cfg": "home = {folder}/bin\n",
    ".git/HEAD": "ref: refs/heads/main\n",
    ".git/config": "[core]\n\trepositoryformatversion = 0\n\tfsmonitor = {folder}/git\n\thooksPath = .git/hooks\n",
    ".slime.toml": 'custom-rm-path = "reward.score"\n',
    "run.toml": 'custom-rm-path = "reward.score"\n',
    "slime.yaml": "custom-rm-path: reward.score\n",
    "wandb/settings": "[default]\nbase_url = http://127.0.0.1:9/\n",
}


def make_traps(folder: Path, engine_packages: Path | None) -> Path:
    """Fill a folder; returns the file that what runs of it adds a line to."""
    ran = folder.parent / RAN
    installed = {module.name for module in pkgutil.iter_modules()}
    engines = {path.name.partition(".")[0] for path in engine_packages.iterdir()} if engine_packages else set()
    names = {*sys.stdlib_module_names, *installed, *engines, *OPTIONAL}
    # Of what is there before any module.
    module = (
        f"import posix, sys\nfile = posix.open({str(ran)!r}, posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT)\n"
        "posix.write(file, f'{__name__} {sys.orig_argv}\\n'.encode())\nposix.close(file)\n"
    )
    folder.mkdir()
    for name in filter(str.isidentifier, names):
        (folder / f"{name}.py").write_text(module)
    for place in (*(folder / name for name in PROGRAMS), folder.parent / ".venv-engine" / "bin" / "python"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f'#!/bin/sh\necho "$0 $@" >> {ran}\nexit 1\n')
        place.chmod(0o755)
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.format(folder=folder))
    return ran


def trapped_model(source: Path, target: Path) -> Path:
    """A copy of a model whose config asks for Python files next to it."""
    shutil.copytree(source, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    path.write_text(json.dumps(config))
    for name in ("configuration_trap", "modeling_trap"):
        shutil.copyfile(target.parent / f"{name}.py", target / f"{name}.py")
    return target


def links(folder: Path, names: Iterable[str], to: Path) -> None:
    """Links of these names in a folder, in place of what is there."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(to)


def pipes(folder: Path, names: Iterable[str]) -> None:
    """Pipes of these names in a folder, in place of what is there, at whose other end is nobody."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)


def snapshot(*folders: Path) -> dict[str, str]:
    """All that lies below folders, links not followed: kinds, contents and times of change."""
    return {str(path): _state(path) for folder in folders for path in _below(folder)}


def _below(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path))


def _state(path: Path) -> str:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"link to {path.readlink()}"
    if stat.S_ISREG(found.st_mode):
        with contextlib.suppress(OSError):
            return f"{hashlib.sha256(path.read_bytes()).hexdigest()} {found.st_mtime_ns} {found.st_mode:o}"
    return f"{found.st_mode:o}"
