"""Whether a run fits, against runs that others published: those that ran out of memory, and those that ran."""

import itertools
import json
import re
from pathlib import Path

import pytest

from slime_convert.published import PUBLISHED
from slime_core.errors import ConfigError
from slime_launch.cli import main
from slime_launch.devices import DEVICES
from slime_launch.plan.cost import Sizes
from slime_launch.plan.fit import check_engine, check_phases, check_trainer
from slime_launch.plan.memory import phases, trainer_memory
from support.published_runs import OTHERS, memory_of_engine, settings_of, shape_of

DATA = Path(__file__).parents[1] / "data"


REPORTS = json.loads((DATA / "memory_reports.json").read_text())


KNOWN_TO_RUN = json.loads((DATA / "known_to_run.json").read_text())


def check(case):
    settings, shape, device = settings_of(case), shape_of(case["model"]), DEVICES[case["device"]]
    sizes = Sizes(prompt_tokens=0, response_tokens=case["tokens"], prompts=8, samples=8)
    trainer = trainer_memory(settings, shape, device, tokens=case["tokens"], micro_batches=4, overrides={})
    check_trainer(settings, shape, device, trainer, sizes, {})
    if "mem_fraction" in case:
        engine = memory_of_engine(settings, shape, device)
        check_engine(device, engine, sizes)
        check_phases(device, phases(settings, device, trainer, [engine]))


@pytest.mark.parametrize("case", REPORTS, ids=lambda case: case["source"])
def test_what_ran_out_of_memory_elsewhere_is_refused(case):
    with pytest.raises(ConfigError, match="a trainer rank takes") as caught:
        check(case)
    text = str(caught.value)
    total, parts, there = re.match(
        r"a trainer rank takes ([\d.]+) GiB in a step \((.*)\), and .* has ([\d.]+) GiB;", text
    ).groups()
    assert sum(float(part.split()[-2]) for part in parts.split(", ")) == pytest.approx(float(total), abs=0.3)
    assert float(there) == round(DEVICES[case["device"]].memory / 2**30, 1) < float(total)
    assert "\n" not in text


@pytest.mark.parametrize("case", KNOWN_TO_RUN, ids=lambda case: case["source"])
def test_what_is_known_to_run_is_not_refused(case):
    check(case)
    if case.get("cpu_optimizer"):  # which alone makes it fit
        with pytest.raises(ConfigError, match=r"a trainer rank takes [^;]*optimizer"):
            check(case | {"cpu_optimizer": False})


def test_the_advice_fits():
    case = {"model": "llama3-8B", "device": "a100", "gpus": 8, "tokens": 4096, "flags": {}}
    with pytest.raises(ConfigError, match=r"; --use-distributed-optimizer (.*)needs \d+\.\d GiB") as caught:
        check(case)
    words = str(caught.value).partition("; ")[2].rpartition(" needs")[0].split()
    advised = {"use_distributed_optimizer": True}
    for name, value in itertools.pairwise(words):
        if name.startswith("--") and not value.startswith("--"):
            advised[name[2:].replace("-", "_")] = int(value) if value.isdigit() else value
    check(case | {"flags": advised})


def test_an_engine_whose_weights_do_not_fit_is_refused():
    case = {"model": "qwen2-72B", "device": "a100", "gpus": 8, "tokens": 4096, "flags": {}, "engine_gpus": 1}
    settings, shape, device = settings_of(case), shape_of(case["model"]), DEVICES["a100"]
    sizes = Sizes(prompt_tokens=0, response_tokens=4096, prompts=8, samples=8)
    with pytest.raises(ConfigError, match=r"do not fit.*--rollout-num-gpus-per-engine"):
        check_engine(device, memory_of_engine(settings, shape, device), sizes)
    split = settings_of(case | {"engine_gpus": 4, "rollout_gpus": 4})
    check_engine(device, memory_of_engine(split, shape, device), sizes)


# Reports that go through the command line: with full recomputation, with a critic, of pairs, and of several ranks.
THROUGH_THE_COMMAND = {
    "NVIDIA/Megatron-LM#606": "",
    "OpenRLHF/OpenRLHF#698": "",
    "OpenRLHF/OpenRLHF#762": "--advantage-estimator ppo",
    "huggingface/alignment-handbook#22": "--loss-type dpo_loss --micro-batch-size 2 --rollout-max-context-len 512",
}


PAIR = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}


@pytest.fixture
def refused(workspace, tokenizer, capsys, monkeypatch):
    """Plans a command for a published model on a device; gives the lines of refusal, on standard error and as JSON."""
    monkeypatch.delenv("PYTHONPATH")

    def run(model, device, words):
        config = PUBLISHED[model].config if model in PUBLISHED else OTHERS[model]
        (workspace / "hf" / "config.json").write_text(json.dumps(dict(config)))
        paths = {"--hf-checkpoint": "hf", "--load": "dist", "--prompt-data": "train.jsonl"}
        given = [word for name, path in paths.items() for word in (name, str(workspace / path))]
        given += ["--num-rollout", "1", "--rollout-batch-size", "8", "--n-samples-per-prompt"]
        given += ["1" if "dpo_loss" in words else "2", *words.split()]
        code = main(["plan", "--json", "--device", device, *given])
        out, err = capsys.readouterr()
        lines = [line.removeprefix("slime-launch: ") for line in err.splitlines() if line.startswith("slime-launch: ")]
        assert json.loads(out)["problems"] == lines and code == (2 if lines else 0)
        return lines

    return run


@pytest.mark.parametrize("source", THROUGH_THE_COMMAND)
def test_the_command_refuses_what_ran_out_of_memory_elsewhere(source, refused, workspace):
    [case] = [case for case in REPORTS if case["source"] == source]
    if "dpo_loss" in THROUGH_THE_COMMAND[source]:
        (workspace / "train.jsonl").write_text(json.dumps(PAIR) + "\n")
    words = f"--actor-num-gpus-per-node {case['gpus']} --rollout-num-gpus 1 --rollout-max-response-len {case['tokens']}"
    if not case["flags"].get("use_distributed_optimizer"):
        words += " --no-use-distributed-optimizer"
    for name, value in case["flags"].items():
        words += f" --{name.replace('_', '-')}{'' if value is True else f' {value}'}"
    lines = refused(case["model"], case["device"], f"{words} {THROUGH_THE_COMMAND[source]}")
    assert len(lines) == 1 and lines[0].startswith("a trainer rank takes ")


ENGINES = [
    ("qwen2-72B", "a100", "--debug-rollout-only --rollout-num-gpus 1", "its weights, 135.4 GiB each, do not fit"),
    (
        "qwen3-4B",
        "h100",
        "--actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 2 --sequence-parallel "
        "--no-offload-train --no-offload-rollout --sglang-mem-fraction-static 0.9",
        "to generate, ranks and engines need",
    ),
]


@pytest.mark.parametrize(("model", "device", "words", "line"), ENGINES, ids=["engine", "colocated"])
def test_the_command_refuses_engines_that_do_not_fit(model, device, words, line, refused):
    lines = refused(model, device, words)
    assert len(lines) == 1 and line in lines[0]


def test_the_command_takes_what_is_known_to_run(refused):
    words = "--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 "
    words += "--tensor-model-parallel-size 2 --sequence-parallel --rollout-max-response-len 8192 "
    words += "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert refused("qwen3-4B", "h100", words) == []
