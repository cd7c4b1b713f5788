import json
import subprocess
import sys
import time

import pytest

from slime_core.errors import ConfigError
from slime_rollout.engine import sglang_flags
from slime_rollout.engine.sglang_flags import (
    CONTROLLED,
    SglangFlag,
    check_sglang_args,
    engine_device,
    installed_flags,
)

FLAGS = {
    flag.name: flag
    for flag in [
        SglangFlag(name="mem-fraction-static", takes_value=True, type="float"),
        SglangFlag(name="enable-metrics", takes_value=False),
        SglangFlag(name="lora-paths", takes_value=True, several=True),
        SglangFlag(name="cuda-graph-bs", takes_value=True, several=True, type="int"),
        SglangFlag(name="schedule-policy", takes_value=True, choices=("lpm", "fcfs")),
        SglangFlag(name="disaggregation-mode", takes_value=True),
        SglangFlag(name="ssl-keyfile", takes_value=True),
        SglangFlag(name="tp-size", takes_value=True, type="int"),
    ]
}


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"mem-fraction-static": "0.5"},
        {"enable-metrics": True},
        {"lora-paths": "a"},
        {"lora-paths": ("a", "b")},
        {"cuda-graph-bs": ("1", "2"), "schedule-policy": "lpm"},
    ],
)
def test_good_flags_pass(args):
    check_sglang_args(args, FLAGS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"mem-fraction": "0.5"}, "did you mean --sglang-mem-fraction-static?"),
        ({"tp-sise": "2"}, "--sglang-tp-sise is not a flag of the installed SGLang; see"),
        ({"tp-size": "2"}, "--sglang-tp-size cannot be given: use --rollout-num-gpus-per-engine"),
        ({"mem-fraction-static": True}, "--sglang-mem-fraction-static needs a value"),
        ({"enable-metrics": "1"}, "--sglang-enable-metrics takes no value, got '1'"),
        ({"mem-fraction-static": ("1", "2")}, "--sglang-mem-fraction-static takes one value, got '1 2'"),
        ({"mem-fraction-static": "half"}, "--sglang-mem-fraction-static half is not a number"),
        ({"cuda-graph-bs": ("1", "2.5")}, "--sglang-cuda-graph-bs 2.5 is not a whole number"),
        ({"schedule-policy": "both"}, "--sglang-schedule-policy both is unknown; allowed: lpm, fcfs"),
        (
            {"disaggregation-mode": "decode"},
            "--sglang-disaggregation-mode cannot be given: use worker_type in --sglang",
        ),
        ({"ssl-keyfile": "key"}, "--sglang-ssl-keyfile cannot be given: slime talks plain HTTP to engines"),
    ],
)
def test_bad_flags_are_refused(args, message):
    with pytest.raises(ConfigError) as caught:
        check_sglang_args(args, FLAGS)
    assert message in str(caught.value)


def test_flags_are_those_of_sglangs_own_parser(sglang_python):
    flags = installed_flags(sglang_python())
    assert flags["page-size"] == SglangFlag(
        name="page-size", takes_value=True, type="int", help="tokens of a page", default="1"
    )
    assert flags["model"] == SglangFlag(name="model", takes_value=True)
    assert flags["enable-metrics"].takes_value is False
    assert flags["lora-paths"].several
    assert flags["mem-fraction-static"].type == "float"
    assert flags["grammar-backend"].choices == ("xgrammar", "none")


def test_they_are_read_once(sglang_python, monkeypatch):
    python = sglang_python()
    first = installed_flags(python)
    monkeypatch.setattr(subprocess, "run", None)
    assert installed_flags(python) == first
    started = time.perf_counter()
    for _ in range(10):
        installed_flags(python)
    assert (time.perf_counter() - started) / 10 < 0.05


def edit(site):
    file = site / "sglang" / "srt" / "server_args.py"
    file.write_text(file.read_text().replace("page-size", "page-length"))


def add_source(site):
    edit(site)
    (site / "sglang" / "srt" / "arg_groups").mkdir()
    (site / "sglang" / "srt" / "arg_groups" / "more.py").write_text("")


def install_beside(site):
    (site / "plugin.dist-info").mkdir()
    edit(site)


@pytest.mark.parametrize("change", [edit, add_source, install_beside])
def test_a_changed_sglang_is_read_again(sglang_python, tmp_path, change):
    python = sglang_python()
    assert "page-length" not in installed_flags(python)
    change(tmp_path / "site")
    assert "page-length" in installed_flags(python)


def test_a_damaged_cache_is_replaced(sglang_python, tmp_path):
    python = sglang_python()
    flags = installed_flags(python)
    (cache,) = (tmp_path / "cache" / "slime").iterdir()
    cache.write_text(cache.read_text()[:100])
    assert installed_flags(python) == flags
    assert json.loads(cache.read_text())["version"] == "1.2"


def test_without_a_place_for_a_cache_one_command_reads_them_once(sglang_python, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    python = sglang_python()
    assert "page-length" not in installed_flags(python)
    assert "page-length" not in installed_flags(python)
    assert caplog.text.count("reading the flags of the SGLang in") == 1
    edit(tmp_path / "site")
    assert "page-length" in installed_flags(python)


def test_an_interpreter_without_sglang(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=f"SGLang is not installed in {python}"):
        installed_flags(str(python))


@pytest.mark.parametrize("source", ["class ServerArgs: pass", "import a_cuda_package"])
def test_an_sglang_that_does_not_report_its_flags(sglang_python, tmp_path, source):
    python = sglang_python()
    (tmp_path / "site" / "sglang" / "srt" / "server_args.py").write_text(source)
    with pytest.raises(ConfigError, match=r"does not report its flags .*: (AttributeError|ModuleNotFoundError): "):
        installed_flags(python)
    assert not (tmp_path / "cache").exists()


@pytest.mark.real
@pytest.mark.timeout(180)
def test_the_flags_of_the_installed_sglang(engine_python, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = time.perf_counter()
    flags = installed_flags(engine_python)
    first = time.perf_counter() - started
    assert installed_flags(engine_python) == flags
    print(f"reading SGLang's flags took {first:.2f} s, and then {time.perf_counter() - started - first:.4f} s")
    assert set(CONTROLLED) <= set(flags)
    assert len(flags) > 500
    assert sorted(flags["disaggregation-mode"].choices) == ["decode", "null", "prefill"]
    assert "torch_native" in flags["attention-backend"].choices
    assert flags["mem-fraction-static"].type == "float"
    assert flags["cuda-graph-bs-decode"].several and flags["cuda-graph-bs-decode"].type == "int"
    assert not flags["sleep-on-idle"].takes_value
    check_sglang_args({"mem-fraction-static": "0.5", "sleep-on-idle": True, "cuda-graph-bs-decode": ("1", "2")}, flags)


@pytest.mark.parametrize(
    ("nodes", "torch", "device"),
    [
        ((), "2.13.0+cu130", "cpu"),
        (("nvidia0", "nvidiactl"), "2.13.0+cu130", "cuda"),
        (("nvidiactl",), "2.13.0+cu130", "cpu"),
        (("kfd",), "2.13.0+rocm7.0", "cuda"),
        (("kfd",), "2.13.0+cpu", "cpu"),
    ],
)
def test_the_device_that_engines_use(nodes, torch, device, tmp_path, monkeypatch):
    for node in nodes:
        (tmp_path / node).touch()
    monkeypatch.setattr(sglang_flags, "version", lambda name: torch)
    assert engine_device(tmp_path) == device
