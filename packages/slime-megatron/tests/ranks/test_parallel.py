"""Every parallel layout computes what one process computes: losses, gradients and weights of three steps."""

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from slime_core.config import AlgorithmConfig
from support.layouts import DENSE, EPS, LAYOUTS, PP2, WITH_EXPERTS, Layout, deal, suits, unevenly_rewarded

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
# With a KL term no sample is left out.
WITHOUT_KL = AlgorithmConfig()


SHOWN = {
    "qwen3/4": (
        "tp2",
        "tp2+sp, pp2",
        "pp2+vpp2",
        "cp2, pp2",
        "dp2+dist-opt+overlap",
        "full recomputation",
        "recomputed mlp",
        "shared prompts, pp2+vpp2",
    ),
    "qwen3-moe/4": ("tp2+sp, dp2, ep2",),
    "deepseek/4": (
        "cp2",
        "dynamic micro-batches, ep2",
        "uneven ranks, ep2",
        "recomputed experts",
        "recomputed shared experts",
        "fused activations",
    ),
}
"""In the normal run: each way of splitting and of recomputing once. Of experts, if it has to do with them."""


def is_shown(name, layout):
    return layout in SHOWN.get(name, ()) or (layout == "dp2" and name != "glm4-moe/4")


IN_BF16 = ("tp2+sp", "pp2+vpp2", "cp2", "dp2+dist-opt", "ep2", "shared prompts")
SHOWN_IN_BF16 = (("llama-tied/4", "dp2+dist-opt"),)
# With 1e-3 and more rounding also moves tokens over the clip range of the ratio within three steps.
BF16_LR = 1e-5


@pytest.fixture
def train(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """Trains a model in a layout: each step's metrics and gradients, and the weights after the last."""

    def run(name, layout, mutation=None, **settings):
        model, samples = tiny_model(name), make_samples(groups=6, per_group=4, masks=True)
        config = tiny_config(load=model.checkpoint, adam_eps=EPS, **layout.settings, **settings)
        shards = deal(make_shards, unevenly_rewarded(samples) if layout.uneven else samples, layout, config)
        ranks.start(layout.world, config, model.shape, WITHOUT_KL if layout.uneven else GRPO)
        answers = ranks.call("train_and_watch_gradients", shards, mutation)
        assert all(report.steps == answers[0][0].steps for report, _ in answers), "metrics of ranks"
        return answers[0][0].steps, answers[0][1], ranks.first("weights")

    return run


@pytest.fixture(scope="session")
def known():
    return {}


@pytest.fixture
def alone(train, known):
    """A model's training in one process, in one micro-batch a step; each is computed once."""

    def compute(name, uneven=False, **settings):
        key = (name, uneven, *settings.items())
        if key not in known:
            known[key] = train(name, Layout(1, {}, uneven=uneven), **settings)
        return known[key]

    return compute


def largest_differences(found, expected, least=0.1):
    """The largest difference of each kind: relative, of a metric to ``least`` at least, of a gradient to its largest
    element; of weights absolute."""
    (steps, grads, weights), (expected_steps, expected_grads, expected_weights) = found, expected
    largest = {}
    for step, wanted in zip(steps, expected_steps, strict=True):
        for metric in (name for name in ("loss", "grad_norm", "kl_loss") if name in wanted):
            difference = abs(step[metric] - wanted[metric]) / max(least, abs(wanted[metric]))
            largest[metric] = max(largest.get(metric, 0.0), difference)
    # The later gradients are those of weights that float32 has rounded.
    assert grads[0].keys() == expected_grads[0].keys()
    largest["gradient"] = max(
        float(np.abs(grads[0][key] - wanted).max() / max(float(np.abs(wanted).max()), 1e-4))
        for key, wanted in expected_grads[0].items()
    )
    assert weights.keys() == expected_weights.keys()
    largest["weight"] = max(float(np.abs(weights[key] - value).max()) for key, value in expected_weights.items())
    return largest


def check(largest, bounds):
    for kind, value in largest.items():
        assert value <= bounds[kind], f"{kind} differs by {value:.1e}, of at most {bounds[kind]}"


def record(record_property, precision, name, layout, largest):
    """A cell of the table of docs/reference/layouts.md: see scripts/equality_table.py."""
    for key, value in {"precision": precision, "layout": layout, "family": name, **largest}.items():
        record_property(key, value)


EVERY = [(name, layout) for name in DENSE + WITH_EXPERTS for layout in LAYOUTS if suits(name, layout)]


FP32 = dict.fromkeys(("loss", "grad_norm", "kl_loss", "gradient", "weight"), 1e-5)


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*one, marks=[] if is_shown(*one) else [pytest.mark.full]) for one in EVERY]
)
def test_a_layout_equals_one_process(train, alone, name, layout, record_property):
    expected = alone(name, LAYOUTS[layout].uneven)
    largest = largest_differences(train(name, LAYOUTS[layout]), expected)
    record(record_property, "fp32", name, layout, largest)
    check(largest, FP32)


@pytest.fixture
def alone_in_bf16(alone):
    """A model's training in one process in bf16, and how far it is from fp32."""

    def compute(name):
        exact, rounded = (alone(name, lr=BF16_LR, **precision) for precision in ({}, {"bf16": True}))
        return rounded, largest_differences(rounded, exact, least=1.0)

    return compute


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in SHOWN_IN_BF16 else [pytest.mark.full])
        for name in DENSE + WITH_EXPERTS
        for layout in IN_BF16
        if suits(name, layout)
    ],
)
def test_a_layout_equals_one_process_in_bf16(train, alone_in_bf16, name, layout, record_property):
    """Three steps are as near as rounding lets them be: to 1e-2, or to twice what it does to one process. It gives an
    expert other tokens, and so another gradient; GLM-4.5's in the first step already."""
    expected, rounding = alone_in_bf16(name)
    found = train(name, LAYOUTS[layout], lr=BF16_LR, bf16=True)
    largest = largest_differences(found, expected, least=1.0)
    record(record_property, "bf16", name, layout, largest)
    if name != "glm4-moe/4":
        assert found[0][0]["grad_norm"] == pytest.approx(expected[0][0]["grad_norm"], rel=1e-2)
    metrics = max(1e-2, 2 * max(rounding["loss"], rounding["grad_norm"]))
    bounds = {"loss": metrics, "grad_norm": metrics, "weight": 1e-2}
    if name in DENSE:
        bounds["gradient"] = 2 * rounding["gradient"]
    check({kind: largest[kind] for kind in bounds}, bounds)


@pytest.mark.full
@pytest.mark.parametrize("name", DENSE + WITH_EXPERTS)
def test_one_process_in_bf16_is_near_fp32(alone_in_bf16, name, record_property):
    _, rounding = alone_in_bf16(name)
    record(record_property, "bf16", name, "one process, from fp32", rounding)
    bounds = dict.fromkeys(("loss", "grad_norm", "weight"), 0.1)
    check({kind: rounding[kind] for kind in bounds}, bounds)


@pytest.mark.parametrize(
    ("name", "virtual", "first", "last"),
    [
        ("qwen3/4", None, None, 3),
        pytest.param("deepseek/4", None, 3, None, marks=pytest.mark.full),
        pytest.param("qwen3/6", 2, 2, None, marks=pytest.mark.full),
    ],
)
def test_stages_of_unequal_length_equal_one_process(train, alone, name, virtual, first, last):
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    settings = PP2 | {"virtual_pipeline_model_parallel_size": virtual}
    settings |= {"megatron_args": {end: layers for end, layers in ends.items() if layers is not None}}
    expected = alone(name)
    check(largest_differences(train(name, Layout(2, settings, 2)), expected), FP32)


@pytest.mark.parametrize(
    ("mutation", "layout", "name", "seen_in"),
    [
        ("swapped chunks", "cp2", "qwen3/4", "loss differs"),
        ("skipped experts", "dp2", "qwen3-moe/4", "loss differs"),
        ("dropped broadcast", "pp2", "qwen3/4", "metrics of ranks"),
    ],
)
def test_what_breaks_between_ranks_is_seen(train, alone, mutation, layout, name, seen_in):
    expected = alone(name)
    with pytest.raises(AssertionError, match=seen_in):
        check(largest_differences(train(name, LAYOUTS[layout], mutation), expected), FP32)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_ranks_meet_at_one_address_and_listen_at_no_other(ranks, tiny_model, tiny_config, address):
    model = tiny_model("llama-tied/4")
    ranks.start(2, tiny_config(load=model.checkpoint), model.shape, address=address)
    assert [host for host in ("127.0.0.1", "127.0.0.2", "::1") if answers(host, ranks.port)] == [address]


def test_ranks_that_meet_in_a_file_open_no_store(ranks, tiny_model, tiny_config):
    """What listens are gloo's own sockets, on this machine alone: none answers as torch's store does."""
    model = tiny_model("llama-tied/4")
    ranks.start(2, tiny_config(load=model.checkpoint), model.shape)
    found = {place for pid in ranks.processes() for place in listening(pid)}
    assert found and {host for host, _ in found} == {"127.0.0.1"}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # shows that a stranger gets in
    fork = multiprocessing.get_context("fork")
    strangers = [fork.Process(target=set_key, args=place) for place in [("127.0.0.1", server.port), *found]]
    begin = time.monotonic()
    for process in strangers:
        process.start()
    strangers[0].join(60)
    taken = time.monotonic() - begin
    for process in strangers[1:]:  # a client of torch's waits for ever for what is not a store
        process.join(1 + taken)
        process.kill()
        process.join()
    assert [process.exitcode for process in strangers] == [0] + [-signal.SIGKILL] * len(found)
    assert server.get("a key") == b"of a stranger"


def set_key(host, port):
    dist.TCPStore(host, port).set("a key", "of a stranger")
    os._exit(0)


def listening(pid):
    """Hosts and ports of the TCP sockets of IPv4 where a process listens."""
    links = (str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in own]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in places]


def answers(host, port):
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    return True
