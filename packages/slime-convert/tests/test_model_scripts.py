"""The published shapes: the workspace's ``scripts/models`` say them, and the weights that they give add up."""

import math
import subprocess
from pathlib import Path

import pytest

from slime_convert.mapping import WeightMap, hf_copies
from slime_convert.published import PUBLISHED

SCRIPTS = next((root / "scripts/models" for root in Path(__file__).parents if (root / "scripts/models").is_dir()), None)

# Of the published weights, a tied output layer counted once, a prediction module's copies of embedding and output layer
# again, FP8 scales not.
PARAMETERS = {
    "smollm2-135M": 134_515_008,
    "llama3-8B": 8_030_261_248,
    "llama3-70B": 70_553_706_496,
    "llama3.1-8B": 8_030_261_248,
    "llama3.2-3B": 3_212_749_824,
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen2.5-32B": 32_763_876_352,
    "qwen2.5-32B-Instruct": 32_763_876_352,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-14B": 14_768_307_200,
    "qwen3-32B": 32_762_123_264,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "glm4-9B": 9_400_279_040,
    "glm4-32B": 32_566_081_536,
    "glm4.5-106B-A12B": 110_468_824_832,
    "glm4.5-355B-A32B": 358_337_791_296,
    "glm4.7-30B-A3B": 31_221_488_576,
    "deepseek-v3": 684_489_845_504,
    "kimi-k2": 1_026_408_232_448,
}


@pytest.mark.skipif(SCRIPTS is None, reason="outside the workspace there are no scripts")
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_script_gives_the_flags_of_the_config(name):
    source = f'source "{SCRIPTS / name}.sh" && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    words = subprocess.run(["bash", "-euc", source], capture_output=True, text=True, check=True, timeout=240).stdout
    assert words.split() == PUBLISHED[name].shape.to_megatron_flags()


@pytest.mark.skipif(SCRIPTS is None, reason="outside the workspace there are no scripts")
def test_every_script_is_checked():
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(PUBLISHED)


def test_weights_add_up_to_the_published_number_of_parameters():
    counted = {}
    for name, entry in PUBLISHED.items():
        weights = WeightMap(entry.shape)
        counted[name] = sum(math.prod(weights.megatron_shape(weight)) for weight in weights.megatron_names())
        counted[name] += len(hf_copies(weights.shape)) * entry.shape.vocab_size * entry.shape.hidden_size
    assert round(counted.pop("moonlight") / 1e9, 2) == 15.96  # published rounded
    assert counted == PARAMETERS


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        ("qwen2.5-1.5B", "--rotary-base", "1000000"),
        ("llama3.1-8B", "--rope-scaling-factor", "8"),
        ("llama3.2-3B", "--rope-scaling-factor", "32"),
        ("glm4-32B", "--num-layers", "61"),
        ("glm4-32B", "--num-query-groups", "2"),
        ("kimi-k2", "--beta-fast", "1"),
    ],
)
def test_values_that_are_known_to_be_mistaken_elsewhere(name, flag, value):
    words = PUBLISHED[name].shape.to_megatron_flags()
    assert words[words.index(flag) + 1] == value
