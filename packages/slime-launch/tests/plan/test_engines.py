"""Plans of several kinds of engines: those of `--sglang-config`, and halves, made where no SGLang is installed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slime_convert.published import PUBLISHED
from slime_launch.cli import main
from slime_launch.devices import DEVICES

H100 = DEVICES["h100"].memory
FILE = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups: [{num_gpus: 2}]
  - name: judge
    model_path: judge
    server_groups: [{num_gpus: 2, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.5}}]
"""


@pytest.fixture
def planned(workspace, tokenizer, flags, to_words, capsys, monkeypatch):
    """Plans a command for H100s: Qwen3 4B, a judge of 8 billion parameters; gives exit code, plan and problems."""
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(workspace)
    for name in ("hf", "judge"):
        Path(name).mkdir(exist_ok=True)
        model = {"hf": "qwen3-4B", "judge": "llama3-8B"}[name]
        Path(name, "config.json").write_text(json.dumps(dict(PUBLISHED[model].config)))
    del flags["--colocate"]
    flags |= {"--rollout-num-gpus": "4", "--rollout-max-response-len": "1024", "--sglang-python": sys.executable}
    flags |= {"--actor-num-gpus-per-node": "4", "--tensor-model-parallel-size": "4", "--sglang-config": "engines.yaml"}

    def run(*words, file=FILE, without=()):
        Path("engines.yaml").write_text(file)
        kept = {name: value for name, value in flags.items() if name not in without}
        code = main(["plan", "--device", "h100", "--json", *to_words(kept), *words])
        out, err = capsys.readouterr()
        return code, json.loads(out), [line for line in err.splitlines() if line.startswith("slime-launch: ")]

    return run


def test_each_model_has_its_gpus_and_its_memory(planned):
    code, plan, problems = planned()
    assert (code, problems) == (0, [])
    assert plan["nodes"][0]["engines"] == [
        {"number": 0, "title": "actor", "gpus": [4, 5]},
        {"number": 1, "title": "judge", "gpus": [6, 7]},
    ]
    actor, judge = plan["engines"]
    assert actor["weights"] == pytest.approx(4.02e9 * 2 / 2, rel=0.01)
    assert judge["weights"] == pytest.approx(8.03e9 * 2 / 2, rel=0.01)
    assert (judge["weights"] + judge["kv_cache"]) / H100 == pytest.approx(0.5, rel=1e-3)
    assert [phase["where"] for phase in plan["phases"]] == ["trainer GPU", "actor engine GPU", "judge engine GPU"]
    assert next(one for one in plan["times"] if one["phase"] == "generate")["of"].startswith("1 engine, ")
    [tensor] = [one for one in plan["transports"] if one["name"] == "tensor"]
    assert tensor["received"] == tensor["sent"]  # by one engine: the judge gets no weights


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_gpus: 2}]", "num_gpus: 4}]", "uses 6 GPUs (actor 4, judge 2), and --rollout-num-gpus is 4"),
        ("name: actor", "name: actor\n    update_weights: false", "no model gets the trainer's weights"),
        ("server_groups: [{num_gpus: 2}]", "server_groups: [{gpus: 2}]", "gpus is not a key"),
        ("mem_fraction_static: 0.5", "mem_fraction_static: 0.05", "a judge engine on 2 GPUs of h100"),
    ],
)
def test_a_file_that_cannot_work_is_refused(planned, old, new, message):
    code, _, problems = planned(file=FILE.replace(old, new, 1))
    assert code == 2 and len(problems) == 1 and message in problems[0]


def test_a_file_that_is_not_there_is_refused(planned):
    code, plan, problems = planned("--sglang-config", "none.yaml")
    assert code == 2 and len(problems) == 1 and "none.yaml" in problems[0]
    assert plan["engines"] == [] and plan["nodes"][0]["engines"] == []


def test_a_model_of_an_unknown_family_is_said_to_be_unknown(planned):
    Path("judge/config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    code, plan, _ = planned()
    assert code == 0 and [engine["group"]["model"] for engine in plan["engines"]] == ["actor"]
    assert "the memory of the judge engines is not known, and not in this plan" in plan["notices"]


def test_a_quantized_judge_takes_what_its_files_hold(planned):
    config = dict(PUBLISHED["llama3-8B"].config)
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    Path("judge/config.json").write_text(json.dumps(config | quantized))
    save_file({"weight": np.zeros(1000, np.int8)}, "judge/model.safetensors")
    assert planned()[1]["engines"][1]["weights"] == Path("judge/model.safetensors").stat().st_size // 2


def test_halves_are_placed_apart(planned):
    code, plan, _ = planned("--prefill-num-servers", "1", "--sglang-api-key", "secret", without=("--sglang-config",))
    assert code == 0
    titles = [(engine["title"], engine["gpus"]) for engine in plan["nodes"][0]["engines"]]
    assert titles == [("prefill", [4]), ("decode", [5]), ("decode", [6]), ("decode", [7])]
    assert next(one for one in plan["times"] if one["phase"] == "generate")["of"].startswith("3 engines, ")
    assert [engine["group"]["role"] for engine in plan["engines"]] == ["prefill", "decode"]
    assert "secret" not in json.dumps(plan)
    code, _, problems = planned("--prefill-num-servers", "4", without=("--sglang-config",))
    assert code == 2 and "leaves no engine to generate" in problems[0]


def test_engines_of_other_models_stay_awake_beside_trainers(planned):
    """The judge shares its GPUs with trainer ranks, and keeps its cache while they train."""
    shared = ("--rollout-num-gpus",)
    _, plan, _ = planned("--colocate", "--update-weight-transport", "tensor", without=shared)
    worst = {phase["phase"]: phase for phase in plan["phases"]}
    judge = plan["engines"][1]
    assert worst["train"]["where"] == "shared GPU, engine awake"
    assert worst["train"]["needed"] == judge["total"] + plan["trainer"]["total"]


def test_an_engine_on_two_nodes_with_unequal_shares_is_refused(planned):
    """The first engine, too."""
    words = ["--rollout-num-gpus", "6", "--rollout-num-gpus-per-engine", "6"]
    code, _, problems = planned(*words, without=("--sglang-config", "--rollout-num-gpus"))
    assert code == 2 and any("engine 0 gets 4 + 2 GPUs on 2 nodes" in line for line in problems)
