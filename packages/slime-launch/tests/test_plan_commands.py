"""The seeds' commands and upstream's layouts go through `plan`: they pass, or what is refused is named as not built."""

import json
from pathlib import Path

import pytest

from slime_convert.published import PUBLISHED
from slime_launch.cli import main
from slime_launch.shell_words import read_command

DATA = Path(__file__).parent / "data"
SEEDS = json.loads((DATA / "seed_commands.json").read_text())
REST = "--num-rollout 3 --rollout-batch-size 16 --n-samples-per-prompt 8"
NOT_BUILT = ("--colocate is not supported on CUDA yet", "nodes, which is not supported yet", "works within one machine")
REFUSED = {"readme, conversion's parallel flags": "--ckpt-format"}
"""Commands that cannot run, and the flag that is named."""
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
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (workspace / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    (workspace / "custom_generate.py").write_text(GENERATE)
    (workspace / "custom_rm.py").write_text(REWARD)
    monkeypatch.chdir(workspace)
    monkeypatch.delenv("PYTHONPATH")

    def choose(name):
        (workspace / "hf" / "config.json").write_text(json.dumps(dict(PUBLISHED[name].config)))

    return choose


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_commands_are_planned(name, model, workspace, capsys):
    model(MODELS.get(name, "qwen3-0.6B"))
    hf, dist, data = (str(workspace / part) for part in ("hf", "dist", "train.jsonl"))
    filled = {"CKPT": f"--hf-checkpoint {hf} --load {dist}", "DATA": data, "REST": REST, "HF": hf, "DIR": dist}
    filled["SAVE"] = str(workspace / "save")
    text = " ".join(filled.get(word, word) for word in SEEDS[name].split())
    words = read_command(f"python {text}", workspace).words
    code = main(["plan", "--device", "h100", *words])
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slime-launch: ")]
    if name in REFUSED:
        assert code == 2 and REFUSED[name] in problems[0]
        return
    assert (code == 2) == bool(problems)
    assert [line for line in problems if not any(text in line for text in NOT_BUILT)] == []


# Of upstream's scripts whose models can be trained here: the shape, and the layout of trainer and engines. A layout may
# be larger than the script's, where that keeps the optimizer on the CPU, which is not built.
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
    assert [line for line in problems if NOT_BUILT[0] not in line] == []
    assert (code == 2) == ("--colocate" in words)
    assert "32 prompts × 8 samples = 256 = 1 steps × global batch 256" in out
