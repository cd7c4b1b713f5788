"""The page of formulas names what exists, and leaves nothing out."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from slime_core import metrics, ops
from slime_core.config import ESTIMATORS, KL_LOSS_TYPES, MIS_LEVELS, MIS_MODES, AlgorithmConfig, MisConfig
from slime_core.flags import flag_specs
from slime_core.types import Sample

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "algorithms.md"
# Flags of other packages that the page names; a test of the whole command line looks for them there.
ELSEWHERE = {
    "--opd-teacher-load",
    "--opd-type",
    "--rm-url",
    "--balance-by-flops",
    "--n-samples-per-prompt",
    "--global-batch-size",
    "--max-tokens-per-gpu",
    "--micro-batch-size",
    "--rollout-temperature",
    "--use-dynamic-batch-size",
}

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the page belongs to the repository, not to the package")


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text()


def test_its_flags_are_those_of_the_algorithms(page):
    flags = {spec.name for config in (AlgorithmConfig, MisConfig) for spec in flag_specs(config)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", page)) == flags | ELSEWHERE


def test_its_functions_exist_and_are_all_there(page):
    names = set(re.findall(r"`([a-z_]+)\.([A-Za-z_]+)`", page))
    missing = [
        f"{module}.{name}"
        for module, name in names
        if not hasattr(importlib.import_module(f"slime_core.{module}"), name)
    ]
    assert not missing
    assert {name for module, name in names if module == "ops"} == set(ops.__all__)


@pytest.mark.parametrize("name", [*ESTIMATORS, *KL_LOSS_TYPES, *MIS_LEVELS, *MIS_MODES])
def test_every_choice_is_there(page, name):
    assert f"`{name}`" in page


def test_its_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("http")]
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in page.splitlines() if line.startswith("#")}
    assert links
    assert all(link[1:] in headings if link.startswith("#") else (PAGE.parent / link).exists() for link in links)


def test_its_metrics_are_those_that_the_functions_give(page):
    table = page[page.index("## Metrics") : page.index("## Critic")]
    named = set(re.findall(r"`([a-z][a-z0-9_/@]*)`", table))
    given = _tensor_metrics() | _rollout_metrics()
    assert named == given | {
        "ratio",
        "mismatch_ratio",
        "mismatch_seq_ratio",
        "loss",
        "opd_reverse_kl",
        "kl",
        "rollout/kl",
    }


def _tensor_metrics():
    """Names of all metrics of the functions on tensors, spreads left out."""
    old = torch.tensor([-1.0, -2.0])
    common = {"mask_T": torch.ones(2), "weights_T": torch.ones(2)}
    pair = {"train_log_probs_T": old, "rollout_log_probs_T": old - 1, **common}
    moved = {"log_probs_T": old + 1, "old_log_probs_T": old, "advantages_T": torch.ones(2), **common}
    mis = MisConfig(mis_rs_level="token", mis_veto_threshold=1e-4)
    objective = {name: moved[name] for name in ("log_probs_T", "old_log_probs_T", "advantages_T", "weights_T")}
    found = [
        ops.policy_objective(
            AlgorithmConfig(use_kl_loss=True), ref_log_probs_T=old, entropy_T=torch.ones(2), **objective
        )[1],
        ops.policy_statistics(**moved, eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0).sums,
        ops.tis_weights(**pair)[1],
        ops.icepop_weights(**pair, lower=0.5, upper=5.0)[1],
        ops.mis_weights(mis, **pair, lengths=[2])[1],
        ops.opsm_mask(**moved, lengths=[2], delta=0.1)[1],
        ops.drift_statistics(**pair, lengths=[2]).sums,
        ops.value_objective(values_T=old, old_values_T=old, returns_T=old, weights_T=torch.ones(2), value_clip=0.2)[1],
        ops.preference_objective(old, old, old, global_pairs=2)[1],
    ]
    return {name for names in found for name in names}


def _rollout_metrics():
    samples = [
        Sample(index=index, group_index=0, prompt="", tokens=[1, 2], response_length=1, reward=1.0)
        for index in range(4)
    ]
    lengths = metrics.length_metrics([1, 2], percentiles=(90,))
    return {
        *metrics.rollout_metrics(samples),
        *metrics.pass_rates(samples),
        *metrics.zero_variance_groups(samples),
        *lengths,
    }
