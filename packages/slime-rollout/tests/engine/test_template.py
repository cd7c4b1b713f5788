"""Which engines are forked from a process that has imported SGLang; that they are as good is in test_real_template."""

import dataclasses

import pytest

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec
from slime_rollout.engine.template import imported_sglang

SPEC = EngineSpec(model_path="model", device="cpu")


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (EngineConfig(), dataclasses.replace(SPEC, device="cuda")),
        (EngineConfig(rollout_external_engine_addrs=("127.0.0.1:1",)), SPEC),
        (EngineConfig(sglang_config="models.yaml"), SPEC),
    ],
    ids=["on a GPU", "external", "of several kinds"],
)
def test_no_process_is_started_for_engines_that_are_not_forked(config, spec, monkeypatch):
    monkeypatch.setattr("slime_rollout.engine.template.template", None)
    with imported_sglang(config, spec) as unchanged:
        assert unchanged == config
