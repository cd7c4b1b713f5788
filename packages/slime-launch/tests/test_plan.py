"""The command `plan`: what it prints, and that it refuses what `train` refuses, and more."""

import json
import subprocess
import sys

import pytest

from slime_launch.cli import main
from slime_launch.devices import DEVICES, find_device
from slime_launch.flags import parse_train
from slime_launch.plan.command import split_words
from slime_launch.plan.cost import PhaseTime, run_seconds
from slime_launch.plan.engines import engine_groups
from slime_launch.plan.layout import place

MINIMAL = "--hf-checkpoint hf --load hf --prompt-data p --num-rollout 1 --rollout-batch-size 1"
HOOK = """
def reward(args, sample, **kwargs):
    return 1.0
"""


@pytest.fixture
def words(flags, workspace, to_words):
    """A good command, whose tokenizer knows the prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate([*map(str, range(10)), "+", "=", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(workspace / "hf" / "tokenizer.json"))
    (workspace / "hf" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return lambda *more, **changed: [*to_words(flags | changed), *more]


def run(words, capsys):
    """Exit code, standard output, standard error."""
    code = main(["plan", *words])
    return code, *capsys.readouterr()


def test_a_good_command_is_planned(words, workspace, capsys):
    code, out, err = run(words("--n-samples-per-prompt", "2"), capsys)
    assert (code, err) == (0, "")
    assert "4 prompts × 2 samples = 8 = 1 steps × global batch 8" in out
    assert "first prompt, 4 tokens, label '1':\n    0 + 1 =" in out
    assert f"{workspace / 'train.jsonl'}: 8 usable rows" in out
    assert "node 0: trainer ranks 0; engine 0 on slot 0" in out
    assert not (workspace / "out").exists()
    assert not (workspace / "save").exists()


def test_json_has_the_same_facts(words, workspace, capsys):
    (workspace / "own.py").write_text(HOOK)
    code, out, _ = run(words("--json", "--custom-rm-path", f"{workspace}/own.py:reward"), capsys)
    plan = json.loads(out)
    assert code == 0 and plan["problems"] == []
    assert plan["batch"]["samples"] == 8
    seconds = plan["run"].pop("seconds")
    assert plan["run"].pop("seconds_at_most") == seconds > 0  # its old name
    assert plan["run"].pop("tokens_per_second") == pytest.approx(16 * 512 / seconds, rel=0.2)  # of rounded seconds
    tokens = {"tokens": 16 * 512, "tokens_at_most": 16 * 512}
    assert plan["run"] == {"rollouts": 2, "optimizer_steps": 2, "samples": 16} | tokens
    assert plan["prompt"]["tokens"] == 4
    assert plan["checkpoints"] == {"policy": str((workspace / "dist" / "release").resolve())}
    assert plan["hooks"] == [f"--custom-rm-path {workspace}/own.py:reward"]
    assert {one["name"] for one in plan["transports"] if one["problem"]} == {"nccl", "disk", "disk, delta"}
    assert [one["phase"] for one in plan["times"]] == ["generate", "train", "hand over", "send weights", "save"]
    assert plan["trainer"]["total"] > plan["trainer"]["weights"] > 0


def test_generation_and_training_overlap_where_rollouts_are_made_ahead():
    settings = MINIMAL.split()
    seconds = {"generate": (10.0, 3), "train": (8.0, 3), "send weights": (1.0, 4), "save": (20.0, 1)}
    times = [PhaseTime(phase=phase, seconds=value, of="", times=count) for phase, (value, count) in seconds.items()]
    assert run_seconds(parse_train(settings), times) == 30 + 24 + 4 + 20
    assert run_seconds(parse_train([*settings, "--async-buffer-size", "1"]), times) == 30 + 4 + 20


@pytest.fixture
def times(words, workspace, capsys):
    """The phases of a plan of ten rollouts on an H100, each as (times, seconds), and the seconds of the run."""

    def planned(*more):
        held = ["--eval-prompt-data", str(workspace / "train.jsonl"), "--n-samples-per-eval-prompt", "16"]
        given = words("--device", "h100", "--json", *held, *more, **{"--num-rollout": "10"})
        code, out, err = run(given, capsys)
        assert code == 0, err
        plan = json.loads(out)
        return {one["phase"]: (one["times"], one["seconds"]) for one in plan["times"]}, plan["run"]["seconds"]

    return planned


def test_evaluations_saves_and_hand_overs_count_as_often_as_they_come(times):
    found, whole = times("--eval-interval", "4", "--save-interval", "5")
    counts = {phase: count for phase, (count, _) in found.items()}
    assert counts == {"generate": 10, "train": 10, "hand over": 10, "send weights": 11, "save": 2, "evaluate": 4}
    assert whole == pytest.approx(sum(count * seconds for count, seconds in found.values()), abs=0.1)
    # 128 held-out samples of 8 prompts against 8 samples of 4 prompts in a rollout.
    assert found["evaluate"][1] > found["generate"][1] > 0
    fewer, _ = times("--skip-eval-before-train", "--no-offload-train", "--update-weights-interval", "5")
    assert {phase: count for phase, (count, _) in fewer.items()} == {
        **{"generate": 10, "train": 10, "send weights": 3, "save": 1, "evaluate": 1}
    }
    longer, _ = times("--eval-max-response-len", "100")
    assert longer["evaluate"][1] < found["evaluate"][1]
    exported, _ = times("--save-hf", "export/{rollout_id}")
    assert exported["save"][1] > found["save"][1]
    assert times("--no-async-save")[0]["save"][1] > found["save"][1] == times("--async-save")[0]["save"][1]
    offloaded, _ = times("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    half, _ = times("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--optimizer-offload-fraction", "0.5")
    assert offloaded["optimizer on the host"] == (10, pytest.approx(2 * half["optimizer on the host"][1]))
    assert "optimizer on the host" not in found


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


def test_all_problems_come_at_once_with_what_is_known(words, capsys):
    changed = {"--global-batch-size": "7", "--load": "/nowhere", "--save": "/proc/save"}
    code, out, err = run(words("--device-memory-gib", "0.25", **changed), capsys)
    lines = [line for line in err.splitlines() if line.startswith("slime-launch: ")]
    assert code == 2
    for text in ("must equal global_batch_size (7)", "/nowhere does not exist", "/proc/save can't be written"):
        assert sum(text in line for line in lines) == 1
    assert "first prompt, 4 tokens" in out


def problems_of(words, capsys):
    """What is wrong with a command, as `plan --json` says it; the same lines are on standard error."""
    code, out, err = run([*words, "--json"], capsys)
    problems = json.loads(out)["problems"]
    assert code == 2
    assert [f"slime-launch: {line}" for line in problems] == err.splitlines()[-len(problems) :]
    return problems


def test_what_cannot_be_read_is_reported_with_all_else(words, capsys):
    wrong = {"--num-rollout": None, "--num-rolout": "3", "--lr": "abc", "--load": "/none", "--global-batch-size": "7"}
    given = [word for word in words(**wrong) if word != "--num-rollout"]
    found = problems_of([*given, "--sglang-port", "1", "--sglang-model-path", "x", "--router-port", "1"], capsys)
    expected = [
        "unknown flag --num-rolout; did you mean --num-rollout",
        "--router-port cannot be given",
        "--sglang-model-path cannot be given",
        "--sglang-port cannot be given",
        "--lr: 'abc' is not a number",
        "/none does not exist",
        "rollout_batch_size (4) × n_samples_per_prompt (2) = 8 must equal global_batch_size (7)",
    ]
    assert len(found) == len(expected), found
    assert all(any(text in line for line in found) for text in expected), found


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


def test_deltas_without_receivers_are_refused_where_engines_are_on_another_node(words, capsys, flags):
    del flags["--colocate"]
    deltas = "--update-weight-transport disk --update-weight-mode delta --update-weight-disk-dir published"
    more = ["--device", "h100", *deltas.split(), "--rollout-num-gpus", "1"]
    local = ["--update-weight-local-checkpoint-dir", "local"]
    assert run(words(*more, *local, "--gpus-per-node", "2"), capsys)[0] == 0
    code, _, err = run(words(*more, *local, "--gpus-per-node", "1"), capsys)
    assert code == 2 and "give --update-weight-receivers in place of --update-weight-local-checkpoint-dir" in err
    receivers = ["--update-weight-receivers", "node2:9000"]
    assert run(words(*more, *receivers, "--gpus-per-node", "1"), capsys)[0] == 0


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


def test_a_prompt_that_leaves_no_room_is_refused(words, capsys):
    code, _, err = run(words("--rollout-max-context-len", "4"), capsys)
    assert code == 2 and "a prompt of 4 tokens leaves no room for a response within 4" in err


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("--actor-num-gpus-per-node 8 --rollout-num-gpus 4", [(range(8), []), ((), [0, 1])]),
        (
            "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 2",
            [(range(8), []), (range(8, 16), []), ((), [0])],
        ),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", [(range(4), [0, 1])]),
        ("--actor-num-gpus-per-node 4 --colocate", [(range(4), [0, 1])]),
    ],
)
def test_nodes_are_filled_one_after_the_other(words, nodes):
    settings = parse_train([*MINIMAL.split(), *words.split(), "--rollout-num-gpus-per-engine", "2"])
    groups = engine_groups(settings, None)
    found = place(settings, DEVICES["h100"], 8, groups)
    assert [(list(node.trainer_ranks), [engine.number for engine in node.engines]) for node in found] == [
        (list(ranks), engines) for ranks, engines in nodes
    ]
    assert len(place(settings, find_device("cpu", None), 8, groups)) == 1


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
