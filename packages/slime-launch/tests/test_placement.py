import socket

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_launch.config import ClusterConfig
from slime_launch.errors import PlacementError
from slime_launch.placement import (
    Placement,
    check_transport,
    interface_of,
    layout_notes,
    order_bundles,
    own_share,
    plan_layout,
    shortage,
)
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.transports import Route, chosen_of, in_words, ways_of


def test_disaggregated_halves_have_bundles_of_their_own():
    layout = plan_layout(ClusterConfig(actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=3), cuda=True)
    assert layout.trainer == (0, 1, 2, 3)
    assert layout.rollout == (4, 5, 6)
    assert layout.bundles == ({"GPU": 1.0, "CPU": 1.0},) * 7
    assert layout.trainer_resources() == {"num_cpus": 0.5, "num_gpus": 1.0}


@pytest.mark.parametrize(("rollout", "bundles"), [(None, 4), (2, 4), (6, 6)])
def test_colocated_halves_share(rollout, bundles):
    cluster = ClusterConfig(actor_num_gpus_per_node=4, rollout_num_gpus=rollout, colocate=True)
    layout = plan_layout(cluster, cuda=True)
    assert len(layout.bundles) == bundles
    assert layout.trainer == (0, 1, 2, 3)
    assert layout.rollout == tuple(range(rollout or 4))
    assert layout.trainer_resources()["num_gpus"] == 0.5


def test_what_was_not_run_on_shared_gpus_is_said():
    shared, apart = ClusterConfig(colocate=True), ClusterConfig(rollout_num_gpus=1)
    [line] = layout_notes(plan_layout(shared, cuda=True), hands_over=True)
    assert "was not run there; scripts/gpu-check tries the trainer" in line
    [line] = layout_notes(plan_layout(shared, cuda=True), hands_over=False)
    assert "`slime-launch plan` says whether both fit" in line
    for layout in (plan_layout(apart, cuda=True), plan_layout(shared, cuda=False)):
        assert layout_notes(layout, hands_over=True) == []


def test_without_cuda_a_gpu_is_a_cpu_worker():
    layout = plan_layout(ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=1), cuda=False)
    assert layout.bundles == ({"CPU": 1.0},) * 3
    assert layout.trainer_resources()["num_gpus"] == 0.0


@given(actor=st.integers(1, 8), rollout=st.integers(1, 8), colocate=st.booleans())
def test_every_bundle_is_used_and_none_is_missing(actor, rollout, colocate):
    cluster = ClusterConfig(actor_num_gpus_per_node=actor, rollout_num_gpus=rollout, colocate=colocate)
    layout = plan_layout(cluster, cuda=True)
    assert set(layout.trainer) | set(layout.rollout) == set(range(len(layout.bundles)))
    assert bool(set(layout.trainer) & set(layout.rollout)) == colocate


def test_a_command_with_neither_half_has_a_layout_for_its_plan():
    layout = plan_layout(ClusterConfig(), cuda=False, trains=False)
    assert (layout.trainer, layout.rollout, len(layout.bundles)) == ((), (), 1)


def test_shortage_names_every_figure():
    layout = plan_layout(ClusterConfig(rollout_num_gpus=3), cuda=True)
    text = shortage(layout, {"GPU": 1.0, "CPU": 9.0}, {"GPU": 2.0, "CPU": 16.0})
    assert text == "GPU needed 4, free 1 of 2, CPU needed 4, free 9 of 16"


def test_ranks_of_one_node_follow_each_other():
    assert order_bundles({0: "b", 1: "a", 2: "b", 3: "a"}, {}) == [0, 2, 1, 3]
    assert order_bundles({0: "b", 1: "a", 2: "b", 3: "a"}, {0: 1, 1: 0, 2: 0, 3: 1}) == [2, 0, 1, 3]


@pytest.mark.parametrize(("workers", "cores", "threads"), [(1, 2, 2), (2, 2, 1), (3, 2, 1), (4, 16, 4)])
def test_threads_are_shared_fairly(workers, cores, threads, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(cores)})
    assert own_share(workers) == threads


def test_where_others_run_the_engines_there_are_trainers_only():
    layout = plan_layout(ClusterConfig(actor_num_gpus_per_node=2), cuda=True)
    assert layout.trainer == (0, 1)
    assert layout.rollout == ()
    assert layout.bundles == ({"GPU": 1.0, "CPU": 1.0},) * 2
    assert layout.trainer_resources() == {"num_cpus": 0.5, "num_gpus": 1.0}
    place = Placement(group=None, layout=layout, trainer=(0, 1), rollout=(), nodes={}, gpus={})
    assert place.rollout_worker == 0


ROUTE = {"engines": 2, "within_node": True, "cuda": False, "shared": False}
APART = {"within_node": False}


@pytest.mark.parametrize(
    ("given", "route", "chosen"),
    [
        ("auto", {}, "tensor"),
        ("auto", APART, "gloo"),
        ("auto", {"cuda": True}, "nccl"),
        ("auto", {"cuda": True, "shared": True}, "tensor"),
        ("auto", {"cuda": True, **APART}, "nccl"),
        ("auto", {"cuda": True, "shared": True, **APART, "senders": 2}, "tensor"),
        ("auto", {"cuda": True, "shared": True, **APART}, "gloo"),
        ("gloo", {"cuda": True}, "gloo"),
        ("tensor", {}, "tensor"),
        ("tensor", {"shared": True, **APART, "senders": 2}, "tensor"),
        ("disk", APART, "disk"),
    ],
)
def test_weights_travel_by_the_fastest_way_that_is_possible(given, route, chosen):
    engine = EngineConfig(update_weight_transport=given, update_weight_disk_dir="d" if given == "disk" else None)
    route = Route(**{**ROUTE, **route})
    ways = ways_of(engine, route)
    assert check_transport(engine, route).name == chosen
    if given == "auto":
        assert min((way for way in ways if way.problem is None), key=lambda way: way.seconds).name == chosen


def test_a_slow_link_and_a_directory_change_what_is_fastest(monkeypatch):
    cuda = Route(engines=1, within_node=True, cuda=True, shared=False, link=4e9)
    assert chosen_of(ways_of(EngineConfig(), cuda)).name == "tensor"
    far = Route(**{**ROUTE, **APART})
    monkeypatch.setattr("slime_rollout.engine.transports.DISK", 10e9)
    assert chosen_of(ways_of(EngineConfig(), far)).name == "gloo"
    assert chosen_of(ways_of(EngineConfig(update_weight_disk_dir="d"), far)).name == "disk"


def test_a_transport_that_does_not_reach_is_refused():
    apart = Route(**{**ROUTE, **APART})
    with pytest.raises(PlacementError, match=r"tensor works within one machine.*leave it out, or give gloo$"):
        check_transport(EngineConfig(update_weight_transport="tensor"), apart)
    with pytest.raises(PlacementError, match=r"transport nccl needs CUDA; leave it out, or give tensor or gloo$"):
        check_transport(EngineConfig(update_weight_transport="nccl"), Route(**ROUTE))
    deltas = {"update_weight_transport": "disk", "update_weight_mode": "delta", "update_weight_disk_dir": "d"}
    local = EngineConfig(**deltas, update_weight_local_checkpoint_dir="l")
    with pytest.raises(PlacementError, match=r"deltas within one machine, .* give --update-weight-receivers in place"):
        check_transport(local, apart)
    assert check_transport(local, Route(**ROUTE)).name == "disk"
    elsewhere = EngineConfig(**deltas, update_weight_receivers=("node2:9000",))
    assert check_transport(elsewhere, apart).name == "disk"
    line = in_words(ways_of(EngineConfig(), apart))
    assert line == (
        "gloo, about 1.1 s (tensor works within one machine, nccl needs CUDA, disk needs --update-weight-disk-dir)"
    )


def test_weights_go_from_a_rank_of_each_node_where_every_engine_is_beside_one():
    layout = plan_layout(ClusterConfig(actor_num_gpus_per_node=4, colocate=True), cuda=False)
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    place = Placement(group=None, layout=layout, trainer=(0, 1, 2, 3), rollout=(0, 1, 2, 3), nodes=nodes, gpus={})
    assert place.senders(1) == place.senders(2) == {"a": 0, "b": 2}
    assert place.senders(4) == {}  # it spans them
    apart = Placement(group=None, layout=layout, trainer=(0, 1), rollout=(2, 3), nodes=nodes, gpus={})
    assert apart.senders(1) == {}


def test_where_a_run_is_on_two_nodes():
    layout = plan_layout(ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=2), cuda=False)
    nodes = {0: "a", 1: "b", 2: "b", 3: "b"}
    place = Placement(group=None, layout=layout, trainer=(0, 1), rollout=(2, 3), nodes=nodes, gpus={})
    assert (place.on_several_nodes, place.rollout_worker, place.sends_within_node) == (True, 2, False)
    assert [place.neighbours(bundle) for bundle in place.trainer] == [1, 1]


def test_an_address_has_an_interface():
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.1") is None and interface_of("2001:db8::1") is None
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address:
                assert interface_of(one.address) == name
