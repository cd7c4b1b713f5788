"""The benchmarks' arithmetic, what they measure with, and the table that compares."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmarks")]


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_formula_counts_what_torch_counts(kv_heads: int) -> None:
    from _flops import forward_flops, training_flops

    batch, length, logits = 3, 16, 5
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    ids = torch.arange(batch * length).view(batch, length) % 97
    sizes = {"tokens": batch * length, "context": length, "logits": batch * logits}
    with FlopCounterMode(display=False) as forward:
        out = model(ids, logits_to_keep=logits).logits
    assert out.shape == (batch, logits, 97)
    assert forward.get_total_flops() == forward_flops(config.to_dict(), **sizes)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == pytest.approx(training_flops(config.to_dict(), **sizes), rel=0.02)


def test_the_table_marks_what_lost_a_fifth() -> None:
    from bench import table

    def record(metric: str, value: float, more_is_better: bool | None) -> dict[str, object]:
        return {"case": "a", "metric": metric, "value": value, "unit": "u", "more_is_better": more_is_better}

    records = [
        record("rate", 7.9, True),
        record("rate kept", 8.1, True),
        record("time", 12.6, False),
        record("time kept", 12.4, False),
        record("size", 99.0, None),
        record("new", 1.0, True),
    ]
    before = {("a", str(each["metric"])): 10.0 for each in records[:-1]}
    lines = table(records, before).splitlines()
    assert lines[0].split() == ["case", "metric", "value", "unit", "baseline", "ratio"]
    assert [line.endswith("worse") for line in lines[1:]] == [True, False, True, False, False, False]
    assert lines[1].split() == ["a", "rate", "7.900", "u", "10.000", "0.79", "worse"]
    assert lines[-1].split() == ["a", "new", "1.000", "u"]


def test_the_table_marks_missed_goals() -> None:
    from bench import table

    def record(metric: str, value: float, goal: float | None, more_is_better: bool = False) -> dict[str, object]:
        return {
            "case": "a",
            "metric": metric,
            "value": value,
            "unit": "u",
            "more_is_better": more_is_better,
            "goal": goal,
        }

    records = [
        record("time", 1.36, 1.35),
        record("time reached", 1.35, 1.35),
        record("speed", 4.9, 5.0, True),
        record("speed reached", 5.0, 5.0, True),
        record("other", 9.0, None),
    ]
    lines = table(records, {("a", "time"): 1.0}).splitlines()
    assert lines[0].split() == ["case", "metric", "value", "unit", "goal", "baseline", "ratio"]
    assert lines[1].split() == ["a", "time", "1.360", "u", "<=", "1.35", "1.000", "1.36", "worse,", "missed"]
    assert [line.endswith("missed") for line in lines[1:]] == [True, False, True, False, False]
    assert lines[4].split() == ["a", "speed", "reached", "5.000", "u", ">=", "5"]


def test_every_benchmark_says_what_it_measures_and_its_baseline_can_be_read() -> None:
    from bench import BENCHMARKS, baseline, first_line

    names = [path.stem for path in BENCHMARKS.glob("[!_]*.py")]
    assert "quickstart_vs_trl" in names
    for name in names:
        assert first_line(BENCHMARKS / f"{name}.py")
    for path in (BENCHMARKS / "baselines").glob("*.json"):
        assert path.stem in names
        assert json.loads(path.read_text())["machine"]["cpu"]
        assert baseline(path.stem)


def test_only_benchmarks_that_have_larger_runs_are_asked_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench
    from _records import Record

    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(bench, "OUTPUTS", tmp_path / "out")
    monkeypatch.syspath_prepend(tmp_path)
    for name, further, value in (("one_size", "", "2 * quick"), ("two_sizes", ", full=False", "2 * quick + full")):
        text = f"from _records import Record\ndef main(out, *, quick{further}):\n"
        (tmp_path / f"{name}.py").write_text(text + f"    return [Record('a', 'b', {value}, 'c')]\n")
        for quick, full in ((False, False), (True, False), (False, True)):
            expected = Record("a", "b", 2 * quick + (full and bool(further)), "c")
            assert bench.run(name, quick=quick, full=full)["records"] == [vars(expected)]


@pytest.mark.parametrize("at_once", [1, 2])
def test_each_of_several_has_a_process_of_its_own_and_a_failure_ends_none_but_itself(
    at_once: int, capfd: pytest.CaptureFixture[str]
) -> None:
    import bench

    one = "import os, sys; print('ran', sys.argv[1], os.getpid()); sys.exit(sys.argv[1] == 'bad')"
    assert bench.run_each(["good", "bad", "last"], [sys.executable, "-c", one], at_once=at_once) == 1
    said = capfd.readouterr().out
    assert len(set(re.findall(r"ran \w+ (\d+)", said))) == 3
    assert re.findall(r"^(\w+) +[\d.]+ s(?:  exit code (\d))?$", said, re.M) == [
        ("good", ""),
        ("bad", "1"),
        ("last", ""),
    ]
    assert bench.run_each(["good"], [sys.executable, "-c", one]) == 0


def test_our_seconds_add_up_to_the_step() -> None:
    from quickstart_vs_trl import our_seconds

    row = {
        "perf/rollout_time": 5.0,
        "perf/forward_backward_time": 4.0,
        "perf/optimizer_time": 0.5,
        "perf/ref_log_probs_time": 1.0,
        "perf/update_weights_time": 0.25,
        "perf/step_time": 11.0,
    }
    seconds = our_seconds(row)
    assert seconds == pytest.approx(
        {"generate": 5, "reference": 1, "train": 4.5, "send weights": 0.25, "other": 0.25, "step": 11}
    )


def test_a_conversion_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    from _conversions import Widths, layers_in, measure, write_model

    widths = Widths(hidden=256, ffn=512, heads=2, groups=1, vocab=20_000)
    layers = layers_in(widths, 23e6)
    assert layers == 2
    size = write_model(tmp_path / "hf", widths, layers, sparse=False)
    assert size == 2 * (2 * 20_000 * 256 + 256 + 2 * (256 * (3 * 512 + 6 * 128) + 2 * 256))
    words = ("there-and-back", tmp_path / "hf", tmp_path / "torch_dist", tmp_path / "back")
    run = measure("_convert.py", *words, log=tmp_path / "log.txt")
    assert (tmp_path / "back" / "config.json").exists()
    # 4 MiB are read at a time, whatever a weight has; torch, which would take hundreds of MB, is not imported.
    assert 4 * 2**20 < run.peak < 40e6
    assert 10e6 < run.imported < 100e6
    assert min(run.cpu, run.seconds) > 0
    with pytest.raises(RuntimeError, match=r"ended without a result:\n(.*\n)*.*OutputError"):
        measure("_convert.py", *words, log=tmp_path / "log.txt")


def test_a_sparse_model_takes_no_room(tmp_path: Path) -> None:
    from _conversions import Widths, write_model

    widths = Widths(hidden=1024, ffn=4096, heads=8, groups=8, vocab=32_000)
    size = write_model(tmp_path / "hf", widths, 1, sparse=True)
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert size < sum(path.stat().st_size for path in files) < size + 10_000
    assert sum(512 * path.stat().st_blocks for path in files) < 100_000


def test_the_page_has_the_committed_figures() -> None:
    import benchmarks_page

    assert benchmarks_page.PAGE.read_text(encoding="utf-8") == benchmarks_page.page(), (
        "run `python scripts/benchmarks_page.py`"
    )
    notes = tomllib.loads((ROOT / "benchmarks" / "notes.toml").read_text(encoding="utf-8"))
    baselines = {path.stem for path in (ROOT / "benchmarks" / "baselines").iterdir()}
    assert {name for name, note in notes.items() if "title" not in note} <= baselines
    assert baselines <= {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
