"""What docs/reference/features.md says was run: every accepted pair of features of a train step
takes one, with a tiny model.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCRIPT = TESTS.parents[2] / "scripts" / "features_page.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="outside the repository")
AT_ONCE = 60
"""Commands for one process: process groups that are left hold on to threads."""
SECONDS = 600  # for them, beside all else that a machine may do
MODEL = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
BASE = (
    "--hf-checkpoint hf --load hf --rollout-batch-size 4 --num-rollout 2 --prompt-data rows.jsonl --micro-batch-size 2"
)
BASE += " --actor-num-gpus-per-node 1 --trainer-threads 1 --lr 1e-4"
FEW = ("GRPO", "DPO", "LoRA", "bfloat16")
"""Features whose pairs a normal run of the tests takes a step with."""


@pytest.fixture
def installed_sglang():
    """The commands that are checked have a stand-in of their own."""


@pytest.fixture(scope="module")
def features_page():
    spec = importlib.util.spec_from_file_location("features_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["features_page"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    with module.stand_ins():
        yield module
    del sys.modules["features_page"]


@pytest.fixture
def workspace(tmp_path, features_page):
    """A tiny model of random weights, which is the teacher, too, and users' functions."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(tmp_path / "hf")
    (tmp_path / "teacher").symlink_to(tmp_path / "hf")
    (tmp_path / "own.py").write_text(features_page.OWN)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "label": "1"}\n')
    return tmp_path


def words(one, other, usual):
    """The words of a command with two features."""
    groups = usual["groups"] in (*one.instead, *other.instead)
    size = "" if groups else "--n-samples-per-prompt 2 --colocate"
    own = " ".join(feature.words.replace("--prompt-data rows.jsonl", "") for feature in (one, other))
    return f"{BASE} {size} {own}".split()


def take_steps(commands, workspace):
    """What the commands gave, by name."""
    given = list(commands.items())
    for start in range(0, len(given), AT_ONCE):
        file = workspace / "commands.json"
        file.write_text(json.dumps(dict(given[start : start + AT_ONCE])))
        program = [sys.executable, "-W", "ignore", str(TESTS / "support" / "step_program.py"), str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                answer = json.loads(line)
                yield answer["name"], answer


def wrong(answer, num_steps):
    """What is wrong with steps; ``None`` if nothing is."""
    if "error" in answer:
        return answer["error"]
    steps = answer["steps"]
    right = [math.isfinite(one["loss"]) and one["grad_norm"] > 0 for one in steps]
    return None if right == [True] * num_steps else f"steps {steps}"


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("only", [pytest.param(FEW, id="few"), pytest.param((), id="all", marks=pytest.mark.full)])
def test_every_accepted_pair_takes_a_step(features_page, workspace, only):
    chosen = [
        pair for pair in features_page.pairs() if all(one.step and (not only or one.name in only) for one in pair)
    ]
    accepted = {" + ".join(one.name for one in pair): pair for pair in chosen if not features_page.answer(*pair)[0]}
    commands = {name: words(*pair, features_page.USUAL) for name, pair in accepted.items()}
    answers = dict(take_steps(commands, workspace))
    assert answers.keys() == commands.keys()
    steps = {name: 2 if "--num-steps-per-rollout" in given else 1 for name, given in commands.items()}
    found = {name: problem for name, answer in answers.items() if (problem := wrong(answer, steps[name]))}
    assert found == {}
    if not only:
        assert f"{len(accepted)} were run." in features_page.PAGE.read_text(encoding="utf-8")
