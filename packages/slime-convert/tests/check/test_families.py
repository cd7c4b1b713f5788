"""Every family: published configs, from which tiny models are made that must come there and back and run in Megatron.

The table of ``docs/reference/model-families.md`` stands on it.
"""

import dataclasses
import json
import os
import sys

import pytest
from transformers import AutoConfig

from slime_convert.check import check_models, proofs
from slime_convert.errors import ConvertError
from slime_convert.families import FAMILIES
from slime_convert.shape import ModelShape
from support.prediction_modules import all_logits
from support.published_configs import CONFIGS, PUBLISHED

# transformers has no classes for these names: Kimi-K2 is DeepSeek V3, and MiMo's layers are Qwen2's.
CLASSES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Left out, it counts as none here; in some classes of transformers as one, which they do not build.
KNOWN_TO_DIFFER = {"num_nextn_predict_layers"}


# One of each way in which Megatron's layers differ.
QUICK = (
    "llama, other constants",
    "qwen2_moe",
    "qwen3_next",
    "mimo",
    "glm4",
    "deepseek_v3",
    "glm_moe_dsa",
    "gpt_oss",
    "gemma3_text",
)
EVERY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CONFIGS]


@pytest.fixture(scope="module")
def results(request):
    """What is found of each config that a test asks for.

    They share a process of Megatron's, with parts for what stock core lacks.
    """
    asking = [item for item in request.session.items if "results" in getattr(item, "fixturenames", ())]
    names = [item.callspec.params["name"] for item in asking]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "_MEGATRON", "support.core_parts")
        patch.setattr(proofs, "missing_in_megatron", lambda shape: "")
        patch.setattr(proofs, "expected_logits", all_logits)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        return dict(zip(names, check_models([CONFIGS[name] for name in names]), strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_a_tiny_model_of_each_kind_passes_every_proof(results, name):
    outcomes = {row.name: (row.outcome, row.detail) for row in results[name].rows}
    assert len(outcomes) == 5
    assert {outcome for outcome, _ in outcomes.values()} == {"passed"}, outcomes
    print(results[name].to_text())


def test_every_family_is_proven():
    assert PUBLISHED.keys() == FAMILIES.keys()


def saved(config):
    """A config as transformers saves it, with everything that it fills in."""
    values = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    filled = AutoConfig.for_model(CLASSES.get(config["model_type"], config["model_type"]), **values)
    return json.loads(filled.to_json_string(use_diff=False)) | {"model_type": config["model_type"]}


def differences(config):
    """The fields of a shape in which a config and its saved form differ."""
    given, written = (dataclasses.asdict(ModelShape.from_hf_config(form)) for form in (config, saved(config)))
    return {name: (given[name], written[name]) for name in given if given[name] != written[name]}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_means_the_same(name):
    assert differences(CONFIGS[name]) == {}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_key_that_is_left_out_counts_as_in_transformers(name):
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    left_out = 0
    for key in config.keys() - KNOWN_TO_DIFFER - {"model_type"}:
        shorter = {other: value for other, value in config.items() if other != key}
        try:
            ModelShape.from_hf_config(shorter)
        except ConvertError:
            continue  # it must be there
        assert differences(shorter) == {}, key
        left_out += 1
    assert left_out > 3
