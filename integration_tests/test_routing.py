"""Experts that a real engine chose are the trainer's: R3, on models whose routers leave much to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
from launching import Assets, make_assets

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.schedule import build_shards
from slime_core.types import RolloutBatch, TrainShard
from slime_core.types.routed import count_routed
from slime_megatron.config import MegatronConfig
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec
from slime_rollout.rollout import RolloutManager
from slime_rollout.weights import TensorWeightChannel

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
ALGORITHM = AlgorithmConfig()
TOLERANCE = 1e-4


@pytest.fixture(
    scope="module",
    params=["qwen3-moe", *(pytest.param(name, marks=pytest.mark.full) for name in ("glm4-moe", "deepseek"))],
)
def assets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def fleet(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """Two engines that say which experts they chose."""
    config = EngineConfig(
        sglang_python=assets.engine_python,
        engine_threads=1,
        sglang_args={"max-total-tokens": "8192", "max-running-requests": "64"},
    )
    spec = EngineSpec(model_path=str(assets.hf), dtype="float32", context_length=256, returns_experts=True)
    with EngineFleet.launch(config, [spec], log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running


def _rollouts(assets: Assets, **changes: object) -> RolloutConfig:
    flags: dict[str, object] = {
        "hf_checkpoint": str(assets.hf),
        "prompt_data": str(assets.prompts),
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 40,
        "use_rollout_routing_replay": True,
        "custom_rm_path": f"{Path(__file__).with_name('reward.py')}:every_eighth_token",
    }
    return RolloutConfig.of(**(flags | changes))


def _shards(batch: RolloutBatch, *, needs_experts: bool = True) -> list[TrainShard]:
    return build_shards(
        batch,
        algorithm=ALGORITHM,
        temperature=1.0,
        data_parallel_size=1,
        micro_batch_size=8,
        global_batch_size=len(batch.samples),
        keep_groups_together=True,
        needs_experts=needs_experts,
    )


def _differences(batch: RolloutBatch, trainer: ranks.Ranks, *, needs_experts: bool = True) -> tuple[float, int]:
    """The largest difference between the engine's and the trainer's log-probs of trained tokens but the first of each
    sample, and how many first ones differ by more than the tolerance.

    SGLang computes the last token of a prompt for every sample, then keeps one of these in its cache, and names the
    experts of that one.
    """
    shards = _shards(batch, needs_experts=needs_experts)
    engine = {sample.index: sample.rollout_log_probs or [] for sample in batch.samples}
    largest, first = 0.0, 0
    for sample, row in zip(shards[0].samples, trainer.call(ranks.log_probs, shards)[0], strict=True):
        far = [abs(ours - theirs) for ours, theirs in zip(row, engine[sample.index], strict=True)]
        first += far[0] > TOLERANCE
        largest = max([largest, *(one for one, trained in zip(far[1:], sample.loss_mask[1:], strict=True) if trained)])
    return largest, first


def test_the_trainer_takes_the_experts_that_the_engine_took(assets: Assets, fleet: EngineFleet) -> None:
    """In one turn, and in several, where the engine says more of a sample with each."""
    config = MegatronConfig(load=str(assets.torch_dist), trainer_threads=1, lr=1e-3, share_prompts="on")
    with ranks.Ranks(1, config, ALGORITHM, ModelShape.from_hf_config(assets.hf)) as trainer:
        trainer.call(ranks.push, TensorWeightChannel(fleet.engine_urls), 0)
        turns = {"custom_generate_function_path": f"{Path(__file__).with_name('three_turns.py')}", "max_turns": 3}
        # No two conversations begin alike: an engine would keep one of two computations of the same tokens.
        apart = {"rollout_batch_size": 16, "n_samples_per_prompt": 1}
        for seed, (name, changes) in enumerate({"one turn": {}, "three turns": turns | apart}.items()):
            manager = RolloutManager(_rollouts(assets, **changes), router_url=fleet.router_url, run_seed=seed)
            batch = manager.generate(0)
            for sample in batch.samples:
                wanted = len(sample.tokens) - 1 - sample.trained_mask[::-1].index(1)
                assert count_routed("sample", sample.routed_experts) == wanted
            replayed, first = _differences(batch, trainer)
            unlike, pairs = trainer.call(ranks.other_experts, _shards(batch))[0]
            plain, _ = _differences(batch, trainer, needs_experts=False)
            print(
                f"{assets.hf.parent.name}, {name}: max |log-prob difference| {replayed:.1e} with replay, {plain:.1e} "
                f"without, where {unlike} of {pairs} choices differ; {first} first tokens of {len(batch.samples)} do"
            )
            assert replayed < TOLERANCE
            assert unlike > 0
            assert plain > 10 * TOLERANCE
