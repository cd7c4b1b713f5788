"""Rows of weight transports: each loads what it names, and one of a single mode is chosen like any other."""

from pkgutil import resolve_name

import pytest

from slime_core.errors import ConfigError
from slime_core.flags import collected_problems
from slime_core.interfaces import WeightChannel
from slime_rollout.engine import transports as table
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import API_KEY, EngineConfig
from slime_rollout.engine.transports import MODES, TRANSPORTS, Route, WeightSyncConfig, chosen_of, refusal

ROUTE = Route(engines=2, within_node=True, cuda=False, shared=False)
DELTA = {"update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "l", "update_weight_disk_dir": "d"}


@pytest.mark.parametrize("row", TRANSPORTS, ids=lambda row: f"{row.name}-{row.mode}")
def test_a_row_names_classes_that_are_there(row):
    assert issubclass(resolve_name(row.channel), WeightChannel)
    assert row.receiver is None or callable(resolve_name(row.receiver).stop)


def test_a_transport_without_whole_tensors_is_chosen_and_asked_for_its_mode(monkeypatch):
    monkeypatch.setattr(table, "TRANSPORTS", [row for row in TRANSPORTS if (row.name, row.mode) != ("disk", "full")])
    deltas = WeightSyncConfig(update_weight_transport="disk", **DELTA)
    for modes, name in ((("full",), "disk"), (MODES, "disk, delta")):
        chosen = chosen_of(table.ways_of(deltas, ROUTE, modes=modes))
        assert (chosen.name, chosen.problem) == (name, None)
    with pytest.raises(ConfigError, match="transport disk sends no whole tensors; give another --update-weight-mode"):
        WeightSyncConfig(update_weight_transport="disk", update_weight_disk_dir="d")


def test_a_transport_that_has_no_deltas_still_says_what_else_it_needs():
    with collected_problems() as problems:
        config = WeightSyncConfig(update_weight_transport="nccl", **DELTA)
    assert any("goes through files" in problem for problem in problems)
    assert refusal(config, ROUTE) == (
        "--update-weight-transport nccl needs CUDA; leave it out, or give tensor or gloo or disk"
    )


def test_no_key_is_shown_with_the_settings_of_a_channel():
    spec = ChannelSpec(("http://e",), sync=EngineConfig(sglang_args={API_KEY: "a secret"}), key="a secret")
    assert "a secret" not in repr(spec)
