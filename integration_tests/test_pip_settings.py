"""What pip was told reaches uv: from its file, from its variables, and not over what uv was told itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "pip_settings.py"
pytestmark = pytest.mark.timeout(60)


def exported(tmp_path: Path, config: str, **variables: str) -> list[str]:
    path = tmp_path / "pip.conf"
    path.write_text(config)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_")) and k != "SSL_CERT_FILE"}
    environment = {**clean, "PIP_CONFIG_FILE": str(path), **variables}
    # The interpreter below the environment: that one has pip.
    python = getattr(sys, "_base_executable", sys.executable)
    result = subprocess.run([python, str(SCRIPT)], env=environment, capture_output=True, text=True, check=True)
    return result.stdout.split("\n")[:-1]


def test_a_file_of_pip_alone_is_enough(tmp_path: Path) -> None:
    config = (
        "[global]\nindex-url = https://a.example/simple\ncert = /certs/my ca.pem\nfind-links =\n    /one\n    /two\n"
    )
    assert exported(tmp_path, config) == [
        "export UV_DEFAULT_INDEX=https://a.example/simple",
        "export UV_FIND_LINKS=/one,/two",
        "export SSL_CERT_FILE='/certs/my ca.pem'",
    ]


def test_a_variable_of_pip_wins_over_its_file(tmp_path: Path) -> None:
    lines = exported(
        tmp_path, "[global]\ncert = /certs/file.pem\n[install]\ncert = /certs/install.pem\n", PIP_CERT="/v.pem"
    )
    assert "export SSL_CERT_FILE=/v.pem" in lines


def test_the_install_section_wins_over_the_global_one(tmp_path: Path) -> None:
    lines = exported(tmp_path, "[install]\nindex-url = https://b.example\n[global]\nindex-url = https://a.example\n")
    assert "export UV_DEFAULT_INDEX=https://b.example" in lines


def test_what_uv_was_told_stays(tmp_path: Path) -> None:
    lines = exported(tmp_path, "[global]\nfind-links = /one\n", UV_FIND_LINKS="/mine")
    assert not any("UV_FIND_LINKS" in line for line in lines)
