"""A weight that arrives wrong at a real engine is noticed before anything is generated with it, and named."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faults
import pytest
from launching import Assets, make_assets

import ranks
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_launch.canary import Canary
from slime_launch.derived import CANARY_LIMITS
from slime_launch.errors import RunError
from slime_megatron.settings.config import MegatronConfig
from slime_rollout.canary import EngineCanary
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.weights import TensorWeightChannel

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
ALGORITHM = AlgorithmConfig()
UPDATES = 500
LAYER = "model.layers.1."
SOME = [  # one of each kind: lost, of another form, of another order, of another number, of another time
    "a shard is missing",
    "a part is transposed",
    "two experts change places",
    "a scale is dropped",
    "the head is not updated",
    "all weights are stale",
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets("qwen3-moe", tmp_path_factory.mktemp("qwen3-moe"))


def launch(assets: Assets, logs: Path, config: EngineConfig | None = None, **differences: Any) -> EngineFleet:
    """An engine for each of ``differences``."""
    config = config or EngineConfig(sglang_python=assets.engine_python, engine_threads=1)
    config = dataclasses.replace(config, sglang_args={"max-total-tokens": "2048", "max-running-requests": "8"})
    spec = EngineSpec(model_path=str(assets.hf), dtype="float32", context_length=128)
    specs = [dataclasses.replace(spec, **other) for other in differences.values()]
    return EngineFleet.launch(config, specs, log_dir=logs)


@pytest.fixture(scope="module")
def fleet(
    assets: Assets, engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineFleet]:
    """Two engines as they should be, and one that computes with another rotary base."""
    rope = {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    other = {"sglang_args": {"json-model-override-args": json.dumps(rope)}}
    logs = tmp_path_factory.mktemp("logs")
    with launch(assets, logs, engine_config, first={}, second={}, third=other) as running:
        yield running


def train(assets: Assets) -> ranks.Ranks:
    """A trainer of two tensor-parallel ranks."""
    config = MegatronConfig(
        load=str(assets.torch_dist), trainer_threads=1, lr=1e-2, tensor_model_parallel_size=2, sequence_parallel=True
    )
    return ranks.Ranks(2, config, ALGORITHM, ModelShape.from_hf_config(assets.hf))


@pytest.fixture(scope="module")
def trainer(assets: Assets) -> Iterator[ranks.Ranks]:
    with train(assets) as running:
        yield running


class Halves:
    """Trainer and engines, as the canary asks them."""

    def __init__(self, trainer: ranks.Ranks, assets: Assets, tp_size: int = 1) -> None:
        self.tp_size = tp_size
        self.trainer, self.engines = trainer, EngineCanary(key=None, timeout=60.0)
        memory: Any = types.SimpleNamespace(to_inspect=lambda: None)
        shape, own = ModelShape.from_hf_config(assets.hf), self
        self.canary = Canary(CANARY_LIMITS["float32"], shape, own, own, memory)  # type: ignore[arg-type]
        self.version = 0

    def canary_log_probs(self, urls: Any, rows: Any) -> Any:
        found = self.engines(urls, rows)
        return types.SimpleNamespace(done=lambda: True, results=lambda: [found])

    def log_probs(self, shard: Any, *, on_poll: Any) -> list[Any]:
        return list(self.trainer.call(ranks.log_probs, [shard])[0])

    def inspect(self, channel: ChannelSpec, version: int, *, on_poll: Any) -> list[str]:
        mismatches = self.trainer.call(ranks.export_mismatches)[0]
        if not mismatches and (problem := self.trainer.call(ranks.inspect, channel.inspector(), version)[0]):
            raise WeightSyncError(problem)
        return list(mismatches)

    def update(self, urls: list[str], fault: str | None = None, wrong: list[str] | None = None) -> float:
        """Send weights, with a fault to the engines of ``wrong``, or all; the distance that is found."""
        self.version += 1
        wrong = urls if wrong is None and fault is not None else wrong or []
        for url in urls:
            channel: Any = TensorWeightChannel(ChannelSpec((url,), tp_size=self.tp_size))
            channel = faults.FaultyChannel(channel, fault) if fault is not None and url in wrong else channel
            self.trainer.call(ranks.push, channel, self.version)
        self.canary.sent(ChannelSpec(tuple(urls), tp_size=self.tp_size), self.version, lambda: None)
        self.canary.check(lambda: None)
        return self.canary.row()["perf/weight_canary_abs_diff"]


@pytest.mark.parametrize("names", [SOME, pytest.param([*faults.FAULTS], marks=pytest.mark.full)], ids=["some", "all"])
def test_faults_are_noticed_and_named(
    assets: Assets, fleet: EngineFleet, trainer: ranks.Ranks, names: list[str]
) -> None:
    assert inject(Halves(trainer, assets), list(fleet.engine_urls[:2]), names) == []


@pytest.mark.full
def test_in_an_engine_of_two_ranks_faults_are_noticed_and_named(tmp_path: Path) -> None:
    assets = make_assets("qwen3-moe-split", tmp_path)
    with launch(assets, tmp_path / "logs", split={"tp_size": 2}) as running, train(assets) as trainer:
        assert inject(Halves(trainer, assets, 2), list(running.engine_urls)) == []
        assert_damage_is_named(trainer, running.engine_urls, 2)


@pytest.mark.full
def test_of_experts_that_a_cpu_pads_it_is_said_that_they_may_differ(
    assets: Assets, trainer: ranks.Ranks, tmp_path: Path
) -> None:
    with launch(assets, tmp_path, split={"tp_size": 2}) as running:
        halves, good = Halves(trainer, assets, 2), list(running.engine_urls)
        trainer.call(ranks.nudge, 1)
        with pytest.raises(RunError, match=r"every engine holds .*experts.w13_weight, .* otherwise, in all"):
            halves.update(good, "two experts change places")


STALE_IN_DECODING = """
def install():
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM as Model

    derive, forward = Model.post_load_weights, Model.forward

    def attentions(self):
        return [layer.self_attn for layer in self.model.layers]

    def derive_and_keep_first(self, *args, **kwargs):
        derive(self, *args, **kwargs)
        if not hasattr(self, "first"):
            self.first = [(one.w_kc.clone(), one.w_vc.clone()) for one in attentions(self)]

    def decode_with_first(self, input_ids, positions, forward_batch, *args, **kwargs):
        right = [(one.w_kc, one.w_vc) for one in attentions(self)]
        for one, halves in zip(attentions(self), self.first if forward_batch.forward_mode.is_decode() else right):
            one.w_kc, one.w_vc = halves
        try:
            return forward(self, input_ids, positions, forward_batch, *args, **kwargs)
        finally:
            for one, halves in zip(attentions(self), right):
                one.w_kc, one.w_vc = halves

    Model.post_load_weights, Model.forward = derive_and_keep_first, decode_with_first
"""


def write_plugin(directory: Path, name: str, text: str) -> None:
    """A plugin that SGLang finds if ``directory`` is on its path."""
    described = directory / f"{name}.dist-info"
    described.mkdir(parents=True)
    (directory / f"{name}.py").write_text(text)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:install\n")


@pytest.mark.full
def test_weights_that_an_engine_does_not_derive_again_are_noticed_in_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang decodes with halves of MLA's up-projection that it computes after loading. On CUDA it may read a prompt
    without them, and does not on a CPU, so here they are stale in decoding alone."""
    assets = make_assets("deepseek", tmp_path)
    write_plugin(tmp_path / "plugins", "stale_in_decoding", STALE_IN_DECODING)
    config = MegatronConfig(load=str(assets.torch_dist), trainer_threads=1, lr=1e-2)
    with (
        launch(assets, tmp_path / "right", right={}) as right,
        monkeypatch.context() as changed,
        ranks.Ranks(1, config, ALGORITHM, ModelShape.from_hf_config(assets.hf)) as trainer,
    ):
        path = filter(None, (str(tmp_path / "plugins"), os.getenv("PYTHONPATH")))
        changed.setenv("PYTHONPATH", os.pathsep.join(path))
        with launch(assets, tmp_path / "wrong", wrong={}) as wrong:
            halves, urls = Halves(trainer, assets), [*right.engine_urls, *wrong.engine_urls]
            trainer.call(ranks.nudge, 1)
            with pytest.raises(RunError, match=r"1 of 2 engines .*computes again what it derives") as caught:
                halves.update(urls)
    assert re.search(f"{re.escape(wrong.engine_urls[0])} by .* nats in decoding", str(caught.value))


def inject(halves: Halves, good: list[str], names: Sequence[str] = tuple(faults.FAULTS)) -> list[str]:
    """Have faults be noticed, in turn in all engines and in the last; those whose weight is not named."""
    named = {}
    for number, fault in enumerate(names):
        weight, _ = faults.FAULTS[fault]
        halves.trainer.call(ranks.nudge, number)
        wrong = good[-1:] if number % 2 else good
        with pytest.raises(RunError, match="compute other log-probs of fixed tokens than the trainer") as caught:
            print(f"{fault}: {halves.update(good, fault, wrong):.2g} is not noticed")
        text = str(caught.value)
        named[fault] = weight in text and all((f"{url} holds" in text) == (url in wrong) for url in good)
        print(f"{fault}: {text[: text.index(' for a token')][-60:]}; {text[text.index('; ') :][:160]}")
        assert halves.update(good) < CANARY_LIMITS["float32"] / 10
    return [fault for fault, found in named.items() if not found]


def assert_damage_is_named(trainer: ranks.Ranks, urls: Sequence[str], tp_size: int) -> None:
    found = {}
    for damaged in ("", f"{LAYER}self_attn.k_proj.weight", f"{LAYER}mlp.experts.5.up_proj.weight", "lm_head.weight"):
        spec = ChannelSpec(tuple(urls), tp_size=tp_size, sync=WeightSyncConfig(check_weight_update_equal=True))
        channel = faults.DamagingChannel(spec, damaged)
        found[damaged] = trainer.call(ranks.inspect, channel, 1)[0]
    held = ("", f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}mlp.experts.w13_weight", "lm_head.weight")
    wrong = ["; ".join(f"{url} holds {name} wrong" for url in urls) for name in held]
    assert [*found.values()] == ["", *(f"weight version 1: {one}; send the weights again" for one in wrong[1:])]


def test_an_update_whose_checksums_are_compared_names_what_arrives_wrong(
    fleet: EngineFleet, trainer: ranks.Ranks
) -> None:
    assert_damage_is_named(trainer, fleet.engine_urls[:2], 1)


def test_an_engine_that_computes_otherwise_holds_the_right_weights(
    assets: Assets, fleet: EngineFleet, trainer: ranks.Ranks
) -> None:
    halves = Halves(trainer, assets)
    trainer.call(ranks.nudge, 1)  # without which experts are chosen by rounding
    with pytest.raises(
        RunError, match=r"1 of 3 engines compute other.*every weight that can be compared is the trainer"
    ) as caught:
        halves.update(list(fleet.engine_urls))
    assert fleet.engine_urls[2] in str(caught.value) and fleet.engine_urls[0] not in str(caught.value)


def test_what_the_trainer_gathers_wrong_is_named(assets: Assets, fleet: EngineFleet, trainer: ranks.Ranks) -> None:
    halves, good = Halves(trainer, assets), list(fleet.engine_urls[:1])
    trainer.call(ranks.nudge, 1)
    halves.update(good)
    weight = "decoder.layers.1.self_attention.linear_qkv.weight"
    trainer.call(faults.double_a_shard, weight)
    with pytest.raises(RunError, match=f"the trainer sends these otherwise than it has them: {re.escape(weight)}$"):
        halves.update(good)
    trainer.call(faults.mend)
    halves.update(good)


@pytest.mark.full
def test_one_engine_of_four_has_stale_weights(assets: Assets, trainer: ranks.Ranks, tmp_path: Path) -> None:
    with launch(assets, tmp_path, first={}, second={}, third={}, fourth={}) as running:
        halves, urls = Halves(trainer, assets), list(running.engine_urls)
        trainer.call(ranks.nudge, 1)  # without which experts are chosen by rounding
        halves.update(urls)
        trainer.call(ranks.nudge, 2)
        with pytest.raises(RunError, match="1 of 4 engines compute other") as caught:
            halves.update(urls, "all weights are stale", urls[2:3])
    assert [url for url in urls if f"{url} holds" in str(caught.value)] == urls[2:3]


@pytest.mark.full
def test_no_false_alarm_in_500_updates(assets: Assets, fleet: EngineFleet, trainer: ranks.Ranks) -> None:
    halves, good = Halves(trainer, assets), list(fleet.engine_urls[:2])
    largest = 0.0
    for number in range(UPDATES):
        trainer.call(ranks.nudge, number)
        largest = max(largest, halves.update(good))
    print(f"{UPDATES} updates of 2 engines: log-probs of fixed tokens differ by {largest:.1e} nats on average at most")
    assert largest < CANARY_LIMITS["float32"] / 10
