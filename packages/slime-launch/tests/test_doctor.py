import shutil
import sys

import pytest
from packaging.requirements import Requirement

from slime_launch import doctor
from slime_launch.cli import main
from slime_launch.doctor import (
    MISSING,
    NOTE,
    OK,
    check_device,
    check_packages,
    check_sglang,
    check_space,
    check_version,
)


def levels(findings):
    return [finding.level for finding in findings]


def test_what_is_installed_here_is_enough_and_every_part_is_named():
    findings = list(check_packages())
    text = "\n".join(map(str, findings))
    for name in ("megatron-core", "ray", "tensorboard"):
        assert name in text
    assert MISSING not in levels(findings), text


def test_a_version_that_was_not_tested():
    finding = check_version("ray", "1.0", Requirement("ray>=2.40,<3"))
    run = doctor.install_command("ray<3,>=2.40")
    assert str(finding) == f"missing  ray 1.0 is installed, <3,>=2.40 is needed; run: {run}"
    assert check_version("ray", "2.60.0", Requirement("ray>=2.40,<3")).level == OK


def test_no_sglang(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(doctor, "importable_in", lambda *args: False)
    (finding,) = check_sglang(str(python))
    assert finding.level == MISSING
    assert "--sglang-python" in finding.text


def test_a_gpu_with_a_torch_that_cannot_use_it(monkeypatch):
    monkeypatch.setattr(doctor, "_output", lambda *args: "")
    assert levels(check_device("cuda")) == [MISSING]
    monkeypatch.setattr(doctor, "_output", lambda *args: "12.8")
    assert levels(check_device("cuda")) == [OK]
    assert levels(check_device("cpu")) == [NOTE]


def test_room(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    assert levels(check_space(tmp_path, tmp_path)) == [NOTE, MISSING]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=2**40))
    assert levels(check_space(tmp_path, tmp_path)) == [OK, OK]
    assert levels(check_space(tmp_path, tmp_path / "no")) == [OK, MISSING]


@pytest.mark.parametrize(("level", "code"), [(OK, 0), (NOTE, 0), (MISSING, 1)])
def test_the_exit_code(level, code, monkeypatch, capsys):
    for name in ("check_packages", "check_sglang", "check_device", "check_space"):
        monkeypatch.setattr(doctor, name, lambda *args: [])
    monkeypatch.setattr(doctor, "check_machine", lambda *args: [doctor.Finding(level, "this and that")])
    assert main(["doctor"]) == code
    assert capsys.readouterr().out == f"{level:<8} this and that\n"
