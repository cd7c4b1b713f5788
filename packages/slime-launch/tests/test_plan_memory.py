"""What a plan says about memory, against runs that others published: those that ran out of it, and those that ran."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_launch.cli import main
from slime_launch.devices import DEVICES, described, find_device
from slime_launch.flags import parse_train
from slime_launch.plan.cost import Sizes
from slime_launch.plan.engines import engine_groups, engine_memory, num_parameters
from slime_launch.plan.fit import check_engine, check_phases, check_trainer
from slime_launch.plan.memory import host_phase, phases, trainer_memory
from slime_rollout.engine.server import KV_TOKENS

DATA = Path(__file__).parent / "data"
REPORTS = json.loads((DATA / "memory_reports.json").read_text())
KNOWN_TO_RUN = json.loads((DATA / "known_to_run.json").read_text())


def llama(layers, hidden, ffn, heads, groups, vocab=32000):
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


# Layers, widths and vocabularies from the models' published config.json.
OTHERS = {
    "llama2-7B": llama(32, 4096, 11008, 32, 32),
    "llama-13B": llama(40, 5120, 13824, 40, 40),
    "llama-33B": llama(60, 6656, 17920, 52, 52),
    "llama3.2-90B": llama(100, 8192, 28672, 64, 8, 128256),
    "mistral-7B": llama(32, 4096, 14336, 32, 8),
    "baichuan2-13B": llama(40, 5120, 13696, 40, 40, 125696),
    "qwen2-72B": llama(80, 8192, 29568, 64, 8, 152064),
}
BILLIONS = {"llama2-7B": 6.74, "llama-13B": 13.02, "llama-33B": 32.53, "mistral-7B": 7.24, "qwen2-72B": 72.7}


def shape_of(model):
    return PUBLISHED[model].shape if model in PUBLISHED else ModelShape.from_hf_config(OTHERS[model])


def settings_of(case):
    words = ["--hf-checkpoint", "hf", "--load", "hf", "--prompt-data", "p.jsonl", "--num-rollout", "1"]
    words += ["--rollout-batch-size", "8", "--actor-num-gpus-per-node", str(min(case["gpus"], 8))]
    words += ["--actor-num-nodes", str(max(1, case["gpus"] // 8))]
    words += ["--rollout-num-gpus-per-engine", str(case.get("engine_gpus", 1))]
    words += ["--colocate"] if case.get("colocate") else ["--rollout-num-gpus", str(case.get("rollout_gpus", 1))]
    words += ["--advantage-estimator", "ppo"] if case.get("critic") else []
    settings = parse_train(words)
    offload = {"megatron_args": {"optimizer_cpu_offload": True}} if case.get("cpu_optimizer") else {}
    megatron = dataclasses.replace(settings.megatron, **{"bf16": True} | offload | case["flags"])
    args = {"mem-fraction-static": case["mem_fraction"]} if "mem_fraction" in case else {}
    engine = dataclasses.replace(settings.engine, sglang_args=args)
    return dataclasses.replace(settings, megatron=megatron, engine=engine)


def memory_of_engine(settings, shape, device):
    [group] = engine_groups(settings, None)
    return engine_memory(settings, shape, device, group)


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


@pytest.mark.parametrize("model", BILLIONS)
def test_parameters_are_as_many_as_the_models_makers_say(model):
    assert num_parameters(shape_of(model)) / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)


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


def test_the_cache_takes_what_weights_leave_of_the_fraction():
    case = {"model": "llama3-8B", "device": "h100", "gpus": 1, "tokens": 1, "flags": {}, "mem_fraction": "0.5"}
    memory = memory_of_engine(settings_of(case), shape_of("llama3-8B"), DEVICES["h100"])
    per_token = 2 * 32 * 8 * 128 * 2  # keys and values, layers, groups, channels, bf16
    assert memory.kv_tokens == (int(DEVICES["h100"].memory * 0.5) - memory.weights) // per_token
    assert memory.weights == 2 * 8_030_261_248  # as the model card counts


@pytest.mark.parametrize(("model", "tokens"), [("llama3-8B", KV_TOKENS), ("qwen3-4B", 40960)])
def test_on_a_cpu_the_cache_of_all_ranks_has_a_number_of_tokens_and_room_for_the_longest(model, tokens):
    """Llama's context is 8192 tokens, Qwen3's 40960; both have eight groups of 128 channels."""
    settings = settings_of({"model": model, "device": "h100", "gpus": 2, "engine_gpus": 2, "tokens": 1, "flags": {}})
    memory = memory_of_engine(settings, shape_of(model), find_device("cpu", None))
    layers = {"llama3-8B": 32, "qwen3-4B": 36}[model]
    assert (memory.kv_tokens, memory.kv_cache) == (tokens, tokens * 2 * layers * 8 * 128 * 2)


def test_host_memory_of_frozen_and_sleeping_models_is_compared_where_it_is_known():
    """A reference and the policy, and what ranks that sleep give back: weights, master weights and two moments."""
    case = {"model": "llama3-8B", "device": "h100", "gpus": 8, "tokens": 1024, "colocate": True}
    case |= {"flags": {"tensor_model_parallel_size": 8, "sequence_parallel": True}}
    settings = settings_of(case)
    settings = dataclasses.replace(settings, algorithm=dataclasses.replace(settings.algorithm, use_kl_loss=True))
    trainer = trainer_memory(
        settings, shape_of("llama3-8B"), DEVICES["h100"], tokens=1024, micro_batches=1, overrides={}
    )
    assert trainer.host == 2 * trainer.weights and trainer.waiting == trainer.weights + trainer.optimizer
    needed = 8 * (3 * trainer.weights + trainer.optimizer)
    enough, less = (dataclasses.replace(DEVICES["h100"], host_memory=needed - short) for short in (0, 1))
    check_phases(enough, [host_phase(settings, enough, trainer, 8)])
    take = re.escape(f"take {needed / 2**30:.1f} GiB of the host memory of a node, which has {needed / 2**30:.1f} GiB")
    with pytest.raises(ConfigError, match=f"{take}.* --no-offload-train"):
        check_phases(less, [host_phase(settings, less, trainer, 8)])


def test_evaluation_alone_takes_weights_and_no_critic():
    case = {"model": "llama3-8B", "device": "h100", "gpus": 8, "tokens": 1024, "critic": True, "flags": {}}
    trains = settings_of(case)
    evaluates = dataclasses.replace(trains, run=dataclasses.replace(trains.run, num_rollout=0))
    given = {"tokens": 1024, "micro_batches": 1, "overrides": {}}
    before, after = (
        trainer_memory(settings, shape_of("llama3-8B"), DEVICES["h100"], **given) for settings in (trains, evaluates)
    )
    assert min(before.gradients, before.optimizer, before.critic) > 0
    assert (after.gradients, after.optimizer, after.critic, after.weights) == (0, 0, 0, before.weights)


def test_an_offloaded_optimizer_is_counted_in_host_memory():
    """Of the actor and the critic; what waits there while a trainer sleeps is weights alone."""
    case = {"model": "llama3-8B", "device": "h100", "gpus": 8, "tokens": 1024, "colocate": True, "critic": True}
    case |= {"flags": {"tensor_model_parallel_size": 8, "sequence_parallel": True, "use_distributed_optimizer": True}}
    shape, device = shape_of("llama3-8B"), DEVICES["h100"]
    gpu, host = (
        trainer_memory(settings_of(each), shape, device, tokens=1024, micro_batches=1, overrides={})
        for each in (case, case | {"cpu_optimizer": True})
    )
    assert host.optimizer == 0 < gpu.optimizer and host.total == gpu.total - gpu.optimizer - gpu.critic + host.critic
    assert host.host - gpu.host == pytest.approx(2 * gpu.optimizer * 16 / 12, rel=0.1)  # the critic's head is smaller
    assert host.waiting == host.weights + host.critic
    phase = host_phase(settings_of(case | {"cpu_optimizer": True}), device, host, 8)
    assert phase.needed == 8 * (host.host + host.waiting)


def test_devices_are_found_by_name_and_by_what_a_driver_says():
    assert find_device("H100", None) is DEVICES["h100"]
    assert find_device("h100", 64).memory == 64 * 2**30
    assert find_device("cpu", None).is_cpu
    with pytest.raises(ConfigError, match="did you mean h100"):
        find_device("h1000", None)
    assert described("NVIDIA A100-SXM4-40GB", 40 * 2**30).bandwidth == DEVICES["a100-40"].bandwidth
    assert described("NVIDIA H100 80GB HBM3", 80 * 2**30).operations == DEVICES["h100"].operations


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
