"""The seeds' commands and upstream's layouts go through `plan`: they pass, or what is refused is named as not built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_convert.errors import UnsupportedModelError
from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_launch.cli import main
from slime_launch.shell_words import read_command

DATA = Path(__file__).parents[1] / "data"
SEEDS = json.loads((DATA / "seed_commands.json").read_text())
REST = "--num-rollout 3 --rollout-batch-size 16 --n-samples-per-prompt 8"
NOT_BUILT = ("--colocate on several nodes needs", "works within one machine")
REFUSED = {
    "slime's arguments, reinforce_plus_plus": "set --normalize-advantages",
}
"""Commands that cannot run, and what is said."""
MODELS = {"Megatron's arguments": "llama3-8B"}
"""Stand-ins of another shape than qwen3-0.6B: those flags are compared with it."""
GENERATE = """
async def custom_generate(args, samples, evaluation=False):
    return samples
"""
REWARD = """
class CustomRewardModel:
    def __init__(self, model_path):
        self.model_path = model_path

    def compute_reward(self, prompts, responses):
        return [0.0 for _ in responses]
"""


@pytest.fixture
def model(workspace, monkeypatch):
    """Makes the workspace's model one of a published shape, with a tokenizer that has a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*"0123456789+=", "?"])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(workspace / "hf" / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (workspace / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    (workspace / "custom_generate.py").write_text(GENERATE)
    (workspace / "custom_rm.py").write_text(REWARD)
    monkeypatch.chdir(workspace)
    monkeypatch.delenv("PYTHONPATH")

    def choose(name, **changes):
        config = (dict(PUBLISHED[name].config) if name else {}) | changes
        (workspace / "hf" / "config.json").write_text(json.dumps(config))
        return config

    return choose


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_commands_are_planned(name, model, workspace, capsys):
    model(MODELS.get(name, "qwen3-0.6B"))
    hf, dist, data = (str(workspace / part) for part in ("hf", "dist", "train.jsonl"))
    filled = {"CKPT": f"--hf-checkpoint {hf} --load {dist}", "DATA": data, "REST": REST, "HF": hf, "DIR": dist}
    filled["SAVE"] = str(workspace / "save")
    text = " ".join(filled.get(word, word) for word in SEEDS[name].split())
    words = read_command(text if text.startswith("ray ") else f"python {text}", workspace).words
    code = main(["plan", "--device", "h100", *words])
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slime-launch: ")]
    if name in REFUSED:
        assert code == 2 and REFUSED[name] in problems[0]
        return
    assert (code == 2) == bool(problems)
    assert [line for line in problems if not any(text in line for text in NOT_BUILT)] == []


# Of upstream's scripts whose models can be trained here: the shape, and the layout of trainer and engines. A layout may
# be larger than the script's, where that keeps the optimizer on the CPU.
LAYOUTS = {
    "glm4-9B": "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --tensor-model-parallel-size 2 "
    "--context-parallel-size 2 --max-tokens-per-gpu 4608",
    "qwen3-4B": "--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2 "
    "--tensor-model-parallel-size 2 --max-tokens-per-gpu 9216 --sglang-mem-fraction-static 0.7",
    "qwen3-32B": "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 "
    "--tensor-model-parallel-size 8 --max-tokens-per-gpu 20480 --update-weight-transport nccl",
    "qwen3-30B-A3B": "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 "
    "--rollout-num-gpus-per-engine 8 --tensor-model-parallel-size 4 --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1 --max-tokens-per-gpu 20480 --update-weight-transport nccl",
    "moonlight": "--actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 "
    "--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--max-tokens-per-gpu 8192 --update-weight-transport nccl",
}
COMMON = (
    "--sequence-parallel --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --use-dynamic-batch-size --num-rollout 3000 --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --rollout-max-response-len 8192 --global-batch-size 256 --advantage-estimator grpo "
    "--use-kl-loss"
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_upstreams_layouts_are_planned(name, model, workspace, capsys):
    model(name)
    hf, dist, data = (str(workspace / part) for part in ("hf", "dist", "train.jsonl"))
    words = f"--hf-checkpoint {hf} --load {dist} --prompt-data {data} {COMMON} {LAYOUTS[name]}".split()
    code = main(["plan", "--device", "h100", *words])
    out, err = capsys.readouterr()
    problems = [line for line in err.splitlines() if line.startswith("slime-launch: ")]
    assert (code, problems) == (0, [])
    assert "32 prompts × 8 samples = 256 = 1 steps × global batch 256" in out


# `upstream_runs.json` has upstream's run scripts as flags: paths are stand-ins, `$name` is a block of flags that many
# share, and the shape's flags are those of the model.
RUNS = json.loads((DATA / "upstream_runs.json").read_text())
MODEL_SCRIPTS = json.loads((DATA / "upstream_scripts.json").read_text())["models"]
SHOWN = [
    "llama3.2-3B-Instruct",
    "qwen2.5-0.5B",
    "qwen3-0.6B",
    "glm4.5-106B-A12B",
    "qwen3-next-80B-A3B",
    "mimo-7B-rl",
    "minimax-m2",
]
"""Models that no run script here has, one of each family."""
QUANTIZED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "all": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}}
        },
    },
}
QUANTIZED_WEIGHTS = {
    "fp8": {"model.layers.0.mlp.up_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)},
    "int4": {"model.layers.0.mlp.experts.0.up_proj.weight_packed": torch.ones(8, 4, dtype=torch.int32)},
}
PARTS_NOT_BUILT = (
    *NOT_BUILT,
    "is not built: ",
    " is upstream's own; ",
    "leave --label-key out, and it is in the sample's metadata",  # Search-R1's labels are objects
    "model_type '",  # of the families qwen3_5, qwen3_5_moe and minimax_m2
    "which cannot be trained yet",
    "it is a setting of Transformer Engine's layers",
    "No module named 'slime_plugins'",
    "norm_topk_prob null of hf/config.json",  # the stand-in of GLM-5 has sizes alone
)
"""Parts of commands that are refused as not built."""
DOES_NOT_FIT = ("a trainer rank takes", "an engine on", "ranks and engines need")
"""What follows where a model script's model is larger than the layout that all are tried with."""
THEIR_OWN = {
    "scripts/run-kimi-k2-Instruct.sh": (
        *("missing --hf-checkpoint, --rollout-batch-size", "missing ", "grpo compares the samples of a prompt"),
    ),
    "scripts/run-glm4.7-30B-A3B.sh": ("8 trainer ranks are not a multiple of --expert-model-parallel-size 8 × ",),
    "examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh": (
        "2 does not divide the model's num_layers 47",
        "engines are on other nodes than the trainer's first rank; give --update-weight-receivers",
    ),
}
"""Scripts that Megatron refuses, too: one lacks a backslash, and so most flags; layouts of the others do not fit, and
one applies deltas on another node, which takes receivers here."""
REFUSED_RUNS = {
    "examples/coding_agent_rl/run_qwen36_35b_a3b_swe_8nodes.sh",
    "examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh",
    "examples/fully_async/run-qwen3.5-9B-fully_async.sh",
    "examples/geo3k_vlm/run_geo3k_qwen35.sh",
    "examples/search-r1/run_qwen2.5_3B.sh",
    "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh",
    "scripts/run-glm4.7-30B-A3B.sh",
    "scripts/run-glm5-744B-A40B.sh",
    "scripts/run-glm5.2-744B-A40B.sh",
    "scripts/run-kimi-k2-Instruct.sh",
    "scripts/run-mimo-7B-rl-eagle.sh",
    "scripts/run-minimax-m2.sh",
    "scripts/run-qwen3-next-80B-A3B.sh",
    "scripts/run-qwen3.5-27B.sh",
    "scripts/run-qwen3.5-35B-A3B-sft.sh",
    "slime_plugins/rollout_buffer/rollout_buffer_example.sh",
}
"""All other run scripts are planned as they are."""


EACH = {"num_gpus_per_engine": 64, "overrides": {"dp_size": 64, "ep_size": 64, "enable_dp_attention": True}}
TOPOLOGY = [{"worker_type": "prefill", "num_gpus": 64, **EACH}, {"worker_type": "decode", "num_gpus": 192, **EACH}]
"""Server groups of upstream's script for GLM-5.2."""


@pytest.fixture
def files(model, workspace, monkeypatch):
    """Stand-ins of a script's paths by their names."""
    monkeypatch.setattr(
        "slime_megatron.settings.megatron_check._ask_megatron", lambda question: None
    )  # 2 s, and tested there
    talk = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    chat = {"messages": talk, "label": "2"}
    save_file({"model.norm.weight": torch.ones(8)}, workspace / "hf" / "model.safetensors")
    (workspace / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 128)
    (workspace / "evals.yaml").write_text("eval:\n  datasets: [{name: aime, path: train.jsonl}]\n")
    (workspace / "tasks.jsonl").write_text("".join(json.dumps({"index": number}) + "\n" for number in range(64)))
    question = {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}}
    (workspace / "search.jsonl").write_text((json.dumps(question) + "\n") * 64)
    (workspace / "topology.yaml").write_text(json.dumps({"sglang": [{"name": "default", "server_groups": TOPOLOGY}]}))
    (workspace / "own.yaml").write_text("threshold: 2\n")
    (workspace / "score.py").write_text("async def score(args, sample, **kwargs):\n    return {'score': 0.0}\n")
    (workspace / "weigh.py").write_text("def weigh(**given):\n    return given['pg_loss'], given['loss_masks'], {}\n")
    return {
        "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": "weigh.py:weigh",
        **{"HF": "hf", "REF": "dist", "SAVE": "save", "DATA": "train.jsonl", "CHATS": "chats.jsonl", "OWN": "own.yaml"},
        **{
            "TASKS": "tasks.jsonl",
            "SEARCH": "search.jsonl",
            "TOPOLOGY": "topology.yaml",
            "SHARED": "shared",
            "LOCAL": "l",
        },
        **{"EVALS": "evals.yaml", "IMAGES": '{"image": "images"}', "REWARD": "score.py:score"},
        **{"GENERATE": "custom_generate.py:custom_generate"},
    }


def model_words(name, model, **changes):
    """The flags of one of upstream's model scripts, after its config was written."""
    entry = dict(RUNS["models"].get(name, {"like": name})) | changes
    config = model(entry.pop("like", None), **entry)
    named = MODEL_SCRIPTS[name]["named"]
    words = [word for flag in named for word in (flag, *RUNS["values"].get(flag, "").split())]
    try:
        return [*ModelShape.from_hf_config(config).to_megatron_flags(), *words]
    except UnsupportedModelError:
        return words


def planned(words, capsys):
    """What a plan says is wrong with a command."""
    code = main(["plan", "--device", "h100", *words])
    lines = capsys.readouterr().err.splitlines()
    problems = [line for line in lines if line and not line.startswith(("this command", "slime-launch train"))]
    assert (code == 2) == bool(problems), lines
    return problems


def unexplained(problems):
    """Those that name no part which is not built."""
    return [line for line in problems if not any(part in line for part in PARTS_NOT_BUILT)]


@pytest.mark.parametrize("name", RUNS["scripts"])
def test_upstreams_run_scripts_are_planned(name, model, files, capsys):
    script, config = RUNS["scripts"][name], {}
    if "quantized" in script:
        config["quantization_config"] = QUANTIZED[script["quantized"]]
        save_file(QUANTIZED_WEIGHTS[script["quantized"]], "hf/model.safetensors")
    given = [RUNS["blocks"][word[1:]] if word[0] == "$" else word for word in script["words"].split()]
    words = model_words(script["model"], model, **config)
    words += [files.get(word, word) for word in " ".join(given).split()]
    problems = planned(words, capsys)
    assert bool(problems) == (name in REFUSED_RUNS)
    own = THEIR_OWN.get(name, ())
    assert all(any(text in line for line in problems) for text in own)
    assert [line for line in unexplained(problems) if not any(text in line for text in own)] == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHOWN else [pytest.mark.full]) for name in MODEL_SCRIPTS],
)
def test_upstreams_model_scripts_are_planned(name, model, files, capsys):
    run = "--hf-checkpoint hf --load dist --prompt-data train.jsonl --num-rollout 3 --rollout-batch-size 32 "
    run += "--n-samples-per-prompt 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 "
    run += "--update-weight-transport nccl --bf16"
    words = [*model_words(name, model), *run.split()]
    problems = [line for line in planned(words, capsys) if not any(part in line for part in DOES_NOT_FIT)]
    assert unexplained(problems) == []


def test_all_of_upstreams_scripts_are_planned():
    assert RUNS["scripts"].keys() == json.loads((DATA / "upstream_scripts.json").read_text())["scripts"].keys()
    assert (len(RUNS["scripts"]), len(MODEL_SCRIPTS)) == (45, 39)
