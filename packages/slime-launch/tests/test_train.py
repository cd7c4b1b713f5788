"""What `slime-launch train` does before a run is below its supervisor."""

import contextlib
import dataclasses

import pytest

from slime_launch.flags import parse_train
from slime_launch.train import importing_sglang

BASE = "--hf-checkpoint hf --load dist --prompt-data p --rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 2"


@pytest.fixture
def imported(monkeypatch):
    """The configs of engines for which SGLang is imported ahead."""
    configs = []

    @contextlib.contextmanager
    def import_ahead(config, spec):
        configs.append(config)
        yield dataclasses.replace(config, template="its address")

    monkeypatch.setattr("slime_rollout.engine.imported_sglang", import_ahead)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return configs


def test_engines_are_forked_from_a_process_with_their_number_of_threads(imported):
    settings = parse_train(f"{BASE} --colocate --engine-threads 3".split())
    with importing_sglang(settings) as given:
        assert given.engine == dataclasses.replace(settings.engine, template="its address")
    assert [config.threads for config in imported] == [3]


@pytest.mark.parametrize("more", ["--loss-type sft_loss", "--load-debug-rollout-data r_{rollout_id}.npz"])
def test_sglang_is_not_imported_for_a_run_without_engines(imported, more):
    settings = parse_train(f"{BASE} {more}".split())
    with importing_sglang(settings) as given:
        assert given == settings
    assert imported == []


def test_nor_on_a_cluster_whose_engines_start_elsewhere(imported, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    settings = parse_train(f"{BASE} --colocate".split())
    with importing_sglang(settings) as given:
        assert given == settings
    assert imported == []
