"""Numbers that must agree: engine and trainer, trainer and transformers, one rank and two."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launching import Assets
from tiny import VOCAB_SIZE
from transformers import AutoModelForCausalLM

import ranks
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample, Status, TrainShard
from slime_megatron.settings.config import MegatronConfig
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec
from slime_rollout.rollout import RolloutManager
from slime_rollout.weights import TensorWeightChannel

ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.01, kl_loss_type="low_var_kl")
TOLERANCE = 1e-4
MIN_TOKENS = 2000


@pytest.fixture(params=["qwen3", "llama"])
def assets(request: pytest.FixtureRequest) -> Assets:
    return request.getfixturevalue(request.param)


def _config(assets: Assets, **values: object) -> MegatronConfig:
    return MegatronConfig(load=str(assets.torch_dist), trainer_threads=1, lr=1e-3, **values)


def _rollouts(assets: Assets, **changes: object) -> RolloutConfig:
    return RolloutConfig.of(
        hf_checkpoint=str(assets.hf),
        prompt_data=str(assets.prompts),
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        rollout_max_response_len=40,
        custom_rm_path=f"{Path(__file__).with_name('reward.py')}:every_eighth_token",
        **changes,
    )


def _shards(batch: RolloutBatch, data_parallel_size: int = 1) -> list[TrainShard]:
    return build_shards(
        batch,
        ShardSpec(
            algorithm=ALGORITHM,
            temperature=1.0,
            data_parallel_size=data_parallel_size,
            micro_batch_size=8,
            global_batch_size=len(batch.samples),
            keep_groups_together=True,
        ),
    )


def _difference(batch: RolloutBatch, trainer: ranks.Ranks) -> tuple[float, int]:
    """Largest difference between the engine's and the trainer's log-probs, and the number of tokens compared."""
    shards = _shards(batch)
    engine = {sample.index: sample.rollout_log_probs for sample in batch.samples}
    largest, count = 0.0, 0
    for sample, row in zip(shards[0].samples, trainer.call(ranks.log_probs, shards)[0], strict=True):
        largest = max(largest, *(abs(a - b) for a, b in zip(row, engine[sample.index] or [], strict=True)))
        count += len(row)
    return largest, count


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("weights", ["all train", pytest.param("adapters", marks=pytest.mark.full)])
def test_trainer_and_engine_agree_before_training_and_after_every_update(
    qwen3: Assets, external_fleet: EngineFleet, weights: str
) -> None:
    config = _rollouts(qwen3)
    shape = ModelShape.from_hf_config(qwen3.hf)
    of_lora = {"lora_rank": 8, "lora_alpha": 64.0} if weights == "adapters" else {}
    with ranks.Ranks(1, _config(qwen3, share_prompts="on", **of_lora), ALGORITHM, shape) as trainer:
        manager = RolloutManager(config, router_url=external_fleet.router_url, run_seed=7)
        channel = TensorWeightChannel(ChannelSpec(tuple(external_fleet.engine_urls)))
        for version in range(3):
            assert trainer.call(ranks.push, channel, version) == [version]
            batch = manager.generate(version)
            assert {v for sample in batch.samples for v in sample.weight_versions} == {version}
            largest, count = _difference(batch, trainer)
            print(f"weight version {version}: max |log-prob difference| {largest:.2e} over {count} tokens")
            assert count >= MIN_TOKENS
            assert largest < TOLERANCE
            trainer.call(ranks.train, _shards(batch))
            # The trainer is at version + 1 now, the engine is not: the same check must fail.
            behind, _ = _difference(batch, trainer)
            print(f"engine one version behind: max |log-prob difference| {behind:.2e}")
            assert behind > TOLERANCE


@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rollouts", [6, pytest.param(50, marks=pytest.mark.full)])
def test_at_a_rate_of_0_their_difference_stays_as_it_is(
    qwen3: Assets, external_fleet: EngineFleet, rollouts: int
) -> None:
    """Steps that change nothing, and updates that bring nothing new: nothing adds up."""
    config, shape = _rollouts(qwen3).changed(rollout_batch_size=2), ModelShape.from_hf_config(qwen3.hf)
    found = []
    with ranks.Ranks(1, dataclasses.replace(_config(qwen3), lr=0.0, weight_decay=0.0), ALGORITHM, shape) as trainer:
        manager = RolloutManager(config, router_url=external_fleet.router_url, run_seed=7)
        channel = TensorWeightChannel(ChannelSpec(tuple(external_fleet.engine_urls)))
        for version in range(rollouts):
            trainer.call(ranks.push, channel, version)
            batch = manager.generate(version)
            found.append(_difference(batch, trainer)[0])
            [report] = trainer.call(ranks.train, _shards(batch))
            assert report["grad_norm"] > 0
    half = rollouts // 2
    print(f"{rollouts} rollouts: max |log-prob difference| {max(found[:half]):.2e}, then {max(found[half:]):.2e}")
    assert max(found) < TOLERANCE
    assert statistics.median(found[half:]) < 2 * statistics.median(found[:half])


NARROWED = {
    "top-p 0.8": {"rollout_top_p": 0.8},
    "top-k 20": {"rollout_top_k": 20},
    "min-p 0.05": {"rollout_min_p": 0.05},
}


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "top-p" in name else [pytest.mark.full]) for name in NARROWED]
)
def test_trainer_and_engine_agree_over_the_tokens_kept(
    qwen3: Assets, name: str, request: pytest.FixtureRequest
) -> None:
    """Two ranks, each with half of the vocabulary. Without the kept tokens, the ratio would be the kept mass."""
    fleet: EngineFleet = request.getfixturevalue("unseeded_fleet" if "min-p" in name else "external_fleet")
    shape = ModelShape.from_hf_config(qwen3.hf)
    with ranks.Ranks(2, _config(qwen3, share_prompts="on", tensor_model_parallel_size=2), ALGORITHM, shape) as trainer:
        trainer.call(ranks.push, TensorWeightChannel(ChannelSpec(tuple(fleet.engine_urls))), 0)
        rollout = _rollouts(qwen3, **NARROWED[name])
        batch = RolloutManager(rollout, router_url=fleet.router_url, run_seed=7).generate(0)
        largest, count = _difference(batch, trainer)
        masses = [mass for sample in batch.samples for mass in _kept_masses(sample, qwen3)]
        for sample in batch.samples:
            sample.kept_tokens = None
        over_all, ratios = _shards(batch), []
        engine = {sample.index: sample.rollout_log_probs for sample in batch.samples}
        for sample, row in zip(over_all[0].samples, trainer.call(ranks.log_probs, over_all)[0], strict=True):
            ratios += [math.exp(a - b) for a, b in zip(row, engine[sample.index] or [], strict=True)]
    ratio, mass = statistics.fmean(ratios), statistics.fmean(masses)
    print(
        f"{name}: max |log-prob difference| {largest:.2e} over {count} tokens; else ratio {ratio:.4f}, mass {mass:.4f}"
    )
    assert count >= MIN_TOKENS
    assert largest < TOLERANCE
    assert ratio == pytest.approx(mass, abs=1e-4)
    assert ratio < 0.99


@pytest.fixture
def unseeded_fleet(qwen3: Assets, tmp_path: Path) -> Iterator[EngineFleet]:
    """An engine for min-p, at which one with seeds ends."""
    config = EngineConfig(sglang_python=qwen3.engine_python, engine_threads=1)
    spec = EngineSpec(model_path=str(qwen3.hf), dtype="float32", context_length=256, seeded=False)
    with EngineFleet.launch(config, [spec], log_dir=tmp_path / "unseeded") as fleet:
        yield fleet


@torch.no_grad()
def _kept_masses(sample: Sample, assets: Assets) -> list[float]:
    """The probability of the tokens kept at each place, by transformers."""
    logits = _network(assets.hf)(torch.tensor([sample.tokens])).logits[0, :-1]
    p_RV = logits.double().softmax(-1)[-sample.response_length :]
    kept = str(sample.kept_tokens).split(";")[:-1]
    return [p_V[[int(one) for one in ids.split()]].sum().item() for p_V, ids in zip(p_RV, kept, strict=True)]


@functools.cache
def _network(directory: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.timeout(900)
def test_logits_equal_transformers_before_and_after_training(assets: Assets, tmp_path: Path) -> None:
    shape = ModelShape.from_hf_config(assets.hf)
    text = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(64)]
    config = _config(assets, save=str(tmp_path / "save"))
    with ranks.Ranks(1, config, ALGORITHM, shape) as trainer:
        before = torch.tensor(trainer.call(ranks.logits, text)[0])
        trainer.call(ranks.train, _shards(_random_batch()))
        after = torch.tensor(trainer.call(ranks.logits, text)[0])
        checkpoint = trainer.call(ranks.save, 1)[0]
    exported = tmp_path / "hf"
    converter = Path(sys.executable).with_name("slime-convert")
    places = ["--input-dir", checkpoint, "--output-dir", exported, "--origin-hf-dir", assets.hf]
    subprocess.run([converter, "torch-dist-to-hf", *places], check=True, timeout=120)
    for name, directory, ours in (("converted", assets.hf, before), ("exported", exported, after)):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            theirs = model(torch.tensor([text])).logits[0, :-1]
        difference = (ours - theirs).abs().max().item()
        print(f"{name} {shape.family}: max |logit difference| {difference:.2e} of {theirs.abs().max():.1f}")
        assert difference < TOLERANCE
    assert (before - after).abs().max() > 0.01


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_ranks_give_the_loss_and_grad_norm_of_one(llama: Assets) -> None:
    shape = ModelShape.from_hf_config(llama.hf)
    results = {}
    for name, world, values in (
        ("one rank", 1, {}),
        ("data parallel 2", 2, {}),
        ("data parallel 2, distributed optimizer", 2, {"use_distributed_optimizer": True}),
        ("tensor parallel 2", 2, {"tensor_model_parallel_size": 2}),
    ):
        with ranks.Ranks(world, _config(llama, **values), ALGORITHM, shape) as trainer:
            data_parallel = world // values.get("tensor_model_parallel_size", 1)
            rows = [trainer.call(ranks.train, _shards(_random_batch(seed), data_parallel)) for seed in range(3)]
        assert all(row == step[0] for step in rows for row in step), "ranks report different metrics"
        results[name] = [(step[0]["loss"], step[0]["grad_norm"]) for step in rows]
        print(f"{name}: " + "  ".join(f"loss {loss:.7f} grad norm {norm:.7f}" for loss, norm in results[name]))
    one = torch.tensor(results["one rank"])
    for name, values in results.items():
        assert (torch.tensor(values) - one).abs().max() < 1e-5, name


def _random_batch(seed: int = 0) -> RolloutBatch:
    """A rollout that no engine made: four groups with ragged lengths and random rewards."""
    rng = random.Random(seed)
    groups = []
    for group in range(4):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(5 + group)]
        groups.append([_random_sample(rng, group, group * 4 + member, prompt) for member in range(4)])
    return RolloutBatch(rollout_id=seed, groups=groups)


def _random_sample(rng: random.Random, group: int, index: int, prompt: list[int]) -> Sample:
    length = rng.randrange(1, 9)
    return Sample(
        index=index,
        group_index=group,
        prompt="",
        tokens=prompt + [rng.randrange(VOCAB_SIZE) for _ in range(length)],
        response_length=length,
        reward=float(rng.random() < 0.5),
        status=Status.COMPLETED,
    )
