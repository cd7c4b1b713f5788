"""Tiny models, made once for all integration tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import Assets, engine_python
from tiny import make_model, write_prompts


def _assets(family: str, base: Path) -> Assets:
    hf = make_model(family, base / "hf")
    torch_dist = base / "torch_dist"
    converter = Path(sys.executable).with_name("slime-convert")
    subprocess.run(
        [converter, "hf-to-torch-dist", "--hf-checkpoint", hf, "--save", torch_dist], check=True, timeout=120
    )
    return Assets(hf, torch_dist, write_prompts(base / "prompts.jsonl", 64), engine_python())


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny Qwen3: untied embeddings, q and k norms."""
    return _assets("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny Llama: tied embeddings."""
    return _assets("llama", tmp_path_factory.mktemp("llama"))
