"""A field of a config that says something else gives another model, converted rightly, or is refused."""

import copy
import dataclasses
import os
import sys
from functools import partial

import pytest

from slime_convert import hf_to_torch_dist, megatron_to_hf
from slime_convert.check import proofs
from slime_convert.check.tiny import WEIGHTS, build, quiet, tiny_config
from slime_convert.errors import ConvertError
from slime_convert.shape import ModelShape
from support.prediction_modules import all_logits
from support.published_configs import CONFIGS

ALWAYS = ("llama",)
EVERY = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in CONFIGS]
NOT_OF_THE_MODEL = ("model_type", "torch_dtype", "dtype")
# transformers reads these otherwise than engines do, or writes weights of no elements: the weights do not fit, which a
# conversion says.
MAY_NOT_FIT = ("first_k_dense_replace", "n_shared_experts")


def others(key, value):
    """Other values of a field's kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        found = {value * 2, value + 1, max(value // 2, 0)} - {value}
        return sorted(other for other in found if key != "vocab_size" or other > value)  # the proofs' tokens are in it
    if isinstance(value, float):
        return [value * 2, value / 4] if value else [0.5]
    return [{"silu": "gelu", "gelu_pytorch_tanh": "silu"}.get(value, f"{value}2")] if isinstance(value, str) else []


def perturbed(config):
    """The config with another value in one field, for each field and value."""
    for key, value in config.items():
        for other in others(key, value) if key not in NOT_OF_THE_MODEL else ():
            yield f"{key}: {value!r} → {other!r}", config | {key: other}


def built(config, directory):
    """A config's tiny model and its logits.

    None where we or transformers refuse it or fail to compute with it, or where its logits say nothing.
    """
    try:
        ModelShape.from_hf_config(config)
        with quiet():
            model = build(config, directory)
            return model, all_logits(model)
    except (ConvertError, AssertionError, RuntimeError, IndexError):
        return None


def kinds(found, directory):
    """The perturbed models that differ to us or to transformers: of those that are the same to both, one is proven."""
    alike = {}
    for number, (what, config) in enumerate(found):
        if (made := built(config, directory / str(number))) is not None:
            model, logits_KBSV = made
            key = repr(model.map.shape), logits_KBSV.numpy().tobytes(), (model.directory / WEIGHTS).read_bytes()
            alike.setdefault(key, ([], model, logits_KBSV))[0].append(what)
    return list(alike.values())


def there_and_back(model):
    """Convert a model to where the proofs look for it, and back: whether it is the same bit for bit."""
    there, back = proofs._converted(model.directory), proofs._back(model.directory)
    hf_to_torch_dist(model.directory, there, make_vocab_size_divisible_by=proofs._PADDING)
    megatron_to_hf(there, back, model.directory)
    given, found = proofs._stored(model.directory), proofs._stored(back)
    differing = [name for name in given.keys() | found.keys() if given.get(name) != found.get(name)]
    return not differing, f"{differing} differ"


def rounding(model, logits_KBSV):
    """How far two computations of a model in float32 may be apart: twice what one is from float64.

    A norm of almost nothing magnifies rounding. Not more than a tenth of what a mistake makes.
    """
    wide = dataclasses.replace(model, model=copy.deepcopy(model.model).double()).logits()
    return min(2 * (wide - logits_KBSV[0]).abs().max().item(), 10 * proofs.TOLERANCE)


def judged(model, logits_KBSV, outcome):
    """The rows of a model in Megatron: logits that rounding explains are the same."""
    if outcome.get("difference", 0) > proofs.TOLERANCE and outcome["difference"] <= rounding(model, logits_KBSV):
        outcome |= {"difference": proofs.TOLERANCE}
    return proofs._rows_of_megatron(outcome)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", EVERY)
def test_another_value_in_any_field_is_refused_or_converts_as_transformers_reads_it(name, monkeypatch, tmp_path):
    found = kinds(perturbed(tiny_config(CONFIGS[name])), tmp_path)
    assert sum(len(what) for what, _, _ in found) > 10
    rows = [proofs._row("there and back", partial(there_and_back, model)) for _, model, _ in found]
    logits = {model.directory: logits_KBSV for _, model, logits_KBSV in found}
    monkeypatch.setattr(proofs, "_MEGATRON", "support.core_parts")
    monkeypatch.setattr(proofs, "missing_in_megatron", lambda shape: "")
    monkeypatch.setattr(proofs, "expected_logits", lambda model: logits[model.directory])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    outcomes = proofs._run_in_megatron([model for _, model, _ in found], tmp_path, wanted=True)
    refused = [what for (what, _, _), row in zip(found, rows, strict=True) if "weights that a" in row.detail]
    assert all(one.startswith(MAY_NOT_FIT) for what in refused for one in what)
    wrong = {
        "; ".join(what): [(row.name, row.detail) for row in (back, *judged(*made, outcome)) if not row.passed]
        for (what, *made), back, outcome in zip(found, rows, outcomes, strict=True)
        if what not in refused
    }
    assert not any(wrong.values()), {what: rows for what, rows in wrong.items() if rows}
