"""The command `plan`: what it prints, and that it refuses what `train` refuses, and more."""

import json
import subprocess
import sys

import pytest

from slime_launch.devices import DEVICES
from slime_launch.flags import parse_train
from slime_launch.plan.command import split_words
from support.planning import problems_of, run


def test_a_delta_has_its_own_row(words, capsys, tmp_path):
    disk = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "a")]
    delta = ["--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", str(tmp_path / "b")]

    def rows(*more):
        plan = json.loads(run(words("--device", "h100", "--json", *more), capsys)[1])
        return {one["name"]: one for one in plan["transports"]}, plan["times"]

    whole, _ = rows(*disk)
    assert [name for name, row in whole.items() if row["chosen"]] == ["disk"]
    changed, times = rows(*disk, *delta)
    assert [name for name, row in changed.items() if row["chosen"]] == ["disk, delta"]
    tensors = 2 * 11 + 3  # of two layers with norms of queries and keys, and three others
    assert changed["disk, delta"]["sent"] == changed["disk"]["sent"] + 300 * tensors
    assert next(one["seconds"] for one in times if one["phase"] == "send weights") == changed["disk, delta"]["seconds"]


def test_flags_that_must_be_given_are_missed_beside_other_problems(capsys):
    found = problems_of(["--num-rolout", "3"], capsys)
    assert any(line.startswith("unknown flag --num-rolout") for line in found)
    assert "missing --hf-checkpoint, --rollout-batch-size; see --help" in found
    assert not any("(not given)" in line for line in found)


def test_flags_of_the_plan_itself_and_a_file_that_is_not_there(words, capsys):
    found = problems_of(words("--device", "h1000", **{"--load": "/none"}), capsys)
    assert "did you mean h100" in found[0] and any("/none does not exist" in line for line in found)
    [line] = problems_of(["--config", "none.toml"], capsys)
    assert line == "--config none.toml does not exist; give a TOML or YAML file"


def test_too_little_memory_is_refused_with_what_would_do(words, capsys):
    code, _, err = run(words("--device-memory-gib", "0.25"), capsys)
    assert code == 2
    assert "a trainer rank takes 0.5 GiB in a step" in err
    code, _, err = run(words("--device-memory-gib", "1"), capsys)
    assert code == 2
    assert "to generate, ranks and engines need 1.2 GiB together (machine), and there are 1.0 GiB" in err


def test_a_cluster_that_is_not_there(words, capsys, flags, monkeypatch):
    del flags["--colocate"]
    monkeypatch.delenv("PYTHONPATH")  # and no SGLang
    changed = {"--save": "/proc/save", "--rollout-num-gpus": "4", "--actor-num-gpus-per-node": "4"}
    more = ["--device", "h100", "--sglang-python", sys.executable]
    code, out, err = run(words(*more, **changed), capsys)
    assert (code, err) == (0, "")
    assert "h100: 79.1 GiB each, 8 on a node" in out
    assert "engine 3 on GPU 7" in out
    assert "h100" in run(words(*more, "--gpus-per-node", "4", **changed), capsys)[1]


def test_sglangs_flags_are_taken_as_given_where_there_is_no_sglang(words, capsys, flags, monkeypatch):
    del flags["--colocate"]
    monkeypatch.delenv("PYTHONPATH")
    changed = {"--rollout-num-gpus": "1", "--sglang-python": sys.executable}
    more = ["--device", "h100", "--json", "--sglang-mem-fraction-static", "0.5", "--sglang-enable-x"]
    code, out, err = run(words(*more, **changed), capsys)
    assert (code, err) == (0, "")
    [engine] = json.loads(out)["engines"]
    assert (engine["kv_cache"] + engine["weights"]) / DEVICES["h100"].memory == pytest.approx(0.5, rel=1e-3)


def test_a_plan_writes_the_settings_that_a_run_reads(words, workspace, capsys):
    file = workspace / "run.toml"
    given = words("--lr", "3e-6", "--weight-decay", "0", "--write", str(file))
    code, _, err = run(given, capsys)
    assert (code, err) == (0, f"\nslime-launch train --config {file}\n")
    before = parse_train(split_words(given, {"--write": True})[1]).flags()
    after = parse_train(["--config", str(file)]).flags()
    assert after.pop("config") == str(file)
    derived = {name for name in after if after[name] != before[name]}
    assert derived == {"rollout_num_gpus", "save_interval"}
    assert all(before[name] is None for name in derived)
    assert after["weight_decay"] == 0 and after["lr"] == 3e-6
    code, _, err = run(words("--write", "run.yaml"), capsys)
    assert code == 2 and "must end in .toml" in err


def test_halves_that_share_gpus_are_planned_by_what_each_phase_leaves_there(words, capsys):
    def needed(*flags: str) -> dict[str, float]:
        code, out, err = run(words("--device", "h100", "--json", *flags), capsys)
        assert code == 0, err
        plan = json.loads(out)
        assert any("was not run there" in line or "says whether both fit" in line for line in plan["notices"])
        return {f"{phase['phase']}, {phase['where']}": phase["needed"] for phase in plan["phases"]}

    both = needed()
    assert list(both) == [
        "generate, shared GPU, trainer asleep",
        "train, shared GPU, engine asleep",
        "send weights, shared GPU, KV cache asleep",
    ]
    neither = needed("--no-offload-train", "--no-offload-rollout", "--sglang-mem-fraction-static", "0.5")
    assert next(iter(neither)) == "generate, shared GPU, trainer awake" and len(neither) == 3
    half = needed("--sglang-mem-fraction-static", "0.5")
    assert half["generate, shared GPU, trainer asleep"] < neither["generate, shared GPU, trainer awake"]
    code, _, err = run(words("--device", "h100", "--no-offload-train", "--sglang-mem-fraction-static", "0.98"), capsys)
    assert code == 2 and "(shared GPU, trainer awake)" in err and "leave out --no-offload-train" in err


def test_an_unknown_device_or_flag_is_refused(words, capsys):
    code, _, err = run(words("--device", "h1000"), capsys)
    assert code == 2 and "did you mean h100? known: cpu, " in err
    code, _, err = run(words("--device-memory", "3"), capsys)
    assert code == 2 and "--device-memory" in err


def test_the_words_of_a_plan_are_told_from_those_of_training():
    words = ["--lr", "1", "--device", "h100", "--json", "--device-memory-gib=3", "--load", "x"]
    known = {"--device": True, "--json": False, "--device-memory-gib": True}
    own, others = split_words(words, known)
    assert own == ["--device", "h100", "--json", "--device-memory-gib=3"]
    assert others == ["--lr", "1", "--load", "x"]


def test_no_torch_and_no_ray_are_imported(words):
    code = (
        "import sys; from slime_launch.cli import main; main(['plan', *sys.argv[1:]]); "
        "found = {'torch', 'ray', 'megatron'} & sys.modules.keys(); print(found, file=sys.stderr); "
        "sys.exit(bool(found))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
