"""The examples of the README and of the page on this package run as they stand, and what the README names is there."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_megatron import service
from slime_megatron.step import losses
from slime_megatron.worker import MegatronWorker

README = Path(__file__).parents[1] / "README.md"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "megatron.md"


def test_the_example(tiny_model, tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        code = code.replace("port=29500", f"port={probe.getsockname()[1]}")
    model = tiny_model("llama-tied")
    (tmp_path / "model_hf").symlink_to(model.hf_directory)
    (tmp_path / "model_torch_dist").symlink_to(model.checkpoint)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loss, grad_norm, _ = done.stdout.split(maxsplit=2)
    assert float(loss) == -1.0 and float(grad_norm) > 0
    assert (tmp_path / "run" / "iter_0000001" / "metadata.json").is_file()


def names_of(column: str) -> list[str]:
    """The names in the first cells of the README's table with such a first column."""
    (table,) = re.findall(rf"\| {column} \| what it does \| more \|\n.*?\n\n", README.read_text(), re.DOTALL)
    return [name for row in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_the_ten_names_are_there():
    names = names_of("name")
    assert len(names) == 10
    for name in names:
        assert hasattr(losses if name == "LossInputs" else service, name), name
    for method in names_of("method"):
        assert callable(getattr(MegatronWorker, method)), method


@pytest.mark.skipif(not PAGE.exists(), reason="the page belongs to the repository, not to the package")
def test_the_example_of_megatrons_other_arguments():
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), scope)
    assert scope["config"].megatron_args == {"decoupled_lr": 1e-5, "moe_router_dtype": "fp64"}
