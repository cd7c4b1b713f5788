"""Experts that a real engine chose are the trainer's: R3, on models whose routers leave much to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Assets, make_assets
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample, TrainShard, WeightUpdate
from slime_core.types.routed import count_routed, routed_rows
from slime_megatron.settings.config import MegatronConfig
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec
from slime_rollout.rollout import RolloutManager
from slime_rollout.weights import TensorWeightChannel

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
ALGORITHM = AlgorithmConfig()
TOLERANCE = 1e-4
_ROUTER = "mlp.gate.weight"


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
        ShardSpec(
            algorithm=ALGORITHM,
            temperature=1.0,
            data_parallel_size=1,
            micro_batch_size=8,
            global_batch_size=len(batch.samples),
            keep_groups_together=True,
            needs_experts=needs_experts,
        ),
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
        trainer.call(ranks.push, TensorWeightChannel(ChannelSpec(tuple(fleet.engine_urls))), 0)
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


@pytest.mark.parametrize("assets", ["qwen3-moe"], indirect=True)
@pytest.mark.parametrize("top_p", [0.9, pytest.param(1.0, marks=pytest.mark.full)])
def test_experts_log_probs_and_versions_of_each_token_belong_together_over_updates(
    assets: Assets, fleet: EngineFleet, top_p: float
) -> None:
    """Three updates arrive while responses are being sampled, each with other routers, which leave nothing to rounding:
    a token's log-prob is that of its version's weights with its experts, over the tokens that these weights kept."""
    weights, seeded = load_file(assets.hf / "model.safetensors"), torch.Generator().manual_seed(3)
    versions = [
        weights | {name: torch.randn(one.shape, generator=seeded) for name, one in weights.items() if _ROUTER in name}
        for _ in range(4)
    ]
    channel = TensorWeightChannel(ChannelSpec(tuple(fleet.engine_urls)))
    flags = {"async_buffer_size": 2, "max_weight_staleness": 3, "rollout_batch_size": 8, "n_samples_per_prompt": 1}
    config = _rollouts(assets, **flags, rollout_top_p=top_p, rollout_max_response_len=160)
    given = RolloutManager(config, router_url=fleet.router_url, run_seed=5)
    samples: list[Sample] = []
    try:
        for version in range(4):
            given.hold()
            _send(channel, versions[version], version)
            given.release()
            samples += given.generate(version).samples
    finally:
        given.close()
        _send(channel, weights, 0)
    network = AutoModelForCausalLM.from_pretrained(assets.hf, dtype=torch.float32)
    mixed = sum(len(set(sample.weight_versions)) > 1 for sample in samples)
    worst = max(_distance(network, versions, sample, top_p) for sample in samples)
    print(f"{mixed} of {len(samples)} responses are of several versions; largest distance {worst:.1e}")
    assert mixed > 0
    assert worst < TOLERANCE


def _send(channel: TensorWeightChannel, weights: dict[str, torch.Tensor], version: int) -> None:
    channel.begin(WeightUpdate(version=version))
    channel.send(list(weights.items()))
    channel.end()


@torch.no_grad()
def _distance(network: Any, versions: list[dict[str, torch.Tensor]], sample: Sample, top_p: float) -> float:
    """The largest distance of a sample's log-probs from transformers', and of what was kept from top-p's definition.

    Each version's weights compute the whole sample: with the sample's experts where that version sampled the next
    token, and with those that the routers choose elsewhere, as the engine did.
    """
    start, worst = len(sample.prompt_tokens) - 1, 0.0
    # The prompt is computed by the weights that sample the first token.
    next_T = torch.tensor([sample.weight_versions[0]] * start + sample.weight_versions)
    rows_TW = torch.tensor(routed_rows("sample", sample.routed_experts or "").astype(int))
    assert len(rows_TW) == len(next_T)
    kept = [[int(one) for one in ids.split()] for ids in (sample.kept_tokens or "").split(";")]
    for version in sorted(set(sample.weight_versions)):
        routers = sorted(name for name in versions[version] if _ROUTER in name)
        for name, given_TK in zip(routers, rows_TW.chunk(len(routers), 1), strict=True):
            router = network.get_submodule(name.removesuffix(".weight"))
            router.weight.copy_(versions[version][name])
            router.forward = partial(_chosen, router, given_TK, next_T == version)
        logp_TV = torch.log_softmax(network(torch.tensor([sample.tokens[:-1]])).logits[0].double(), -1)
        for place, (token, given) in enumerate(
            zip(sample.response_tokens, sample.rollout_log_probs or [], strict=True)
        ):
            if sample.weight_versions[place] != version:
                continue
            logp_V, ids = logp_TV[start + place], kept[place] if top_p < 1 else range(logp_TV.shape[1])
            p_K = logp_V[list(ids)].exp()
            over, under = top_p - p_K.sum(), p_K.sum() - p_K.min() - top_p
            worst = max(worst, float(over), float(under), abs(float(logp_V[token] - p_K.sum().log()) - given))
    return worst


def _chosen(
    router: Any, given_TK: torch.Tensor, there_T: torch.Tensor, hidden_TD: torch.Tensor
) -> tuple[Any, Any, Any]:
    """A router of Qwen3's that takes the given experts at some places."""
    logits_TE = torch.nn.functional.linear(hidden_TD.reshape(-1, router.hidden_dim), router.weight)
    probs_TE = logits_TE.softmax(-1)
    ids_TK = torch.where(there_T[:, None], given_TK, probs_TE.topk(router.top_k, -1).indices)
    scores_TK = probs_TE.gather(1, ids_TK)
    return logits_TE, scores_TK / scores_TK.sum(-1, keepdim=True), ids_TK
