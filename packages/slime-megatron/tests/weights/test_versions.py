"""--keep-old-actor: each token is compared with the weights that generated it, also after a restart."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from slime_core.config import AlgorithmConfig
from slime_megatron.weights.versions import KeptVersions

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": "on", "overlap_param_gather": "on"}
LAYOUTS = {
    "one": (1, {}, 1),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 1),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, 1),
    "dp2+do+overlap": (2, OVERLAP, 2),
}
SHOWN = ("one", "dp2+do+overlap")
OLD = AlgorithmConfig(keep_old_actor=True, eps_clip=0.01)
GIVEN = AlgorithmConfig(use_rollout_logprobs=True, eps_clip=0.01)
COMPARED = ("loss", "pg_loss", "ppo_kl", "pg_clipfrac", "grad_norm")


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout in SHOWN else pytest.mark.full) for layout in LAYOUTS]
)
def test_tokens_are_compared_with_the_weights_that_generated_them(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, layout
):
    (world, settings, data_parallel), model = LAYOUTS[layout], tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), **settings)
    samples, rng = make_samples(masks=True), random.Random(5)

    def shards(samples, number):
        return make_shards(samples, data_parallel=data_parallel, micro_batch_size=3, rollout_id=number)

    def generated_by(*versions):
        rows = [np.array([rng.choice(versions) for _ in sample.loss_mask], np.int32) for sample in samples]
        pairs = zip(samples, rows, strict=True)
        return [dataclasses.replace(sample, extras={"weight_versions": row}) for sample, row in pairs]

    def log_probs():
        found = ranks.call("forward", shards(samples, 0), "actor")
        parts = [found[rank] if data_parallel > 1 else found[0] for rank in range(data_parallel)]
        rows = {}
        for rank, part in enumerate(parts):
            rows |= {s.index: row for s, row in zip(samples[rank::data_parallel], part, strict=True)}
        return rows

    ranks.start(world, config, model.shape, OLD, most_behind=2)
    of_version = {}
    for version in (0, 1):
        of_version[version] = log_probs()
        ranks.call("push", version)
        ranks.call("train", shards(generated_by(version), version))  # old tokens come after new ones
    of_version[2] = of_version[-1] = log_probs()
    ranks.call("push", 2)
    ranks.call("save", 2)
    assert sorted(path.parent.name for path in tmp_path.glob("old_actor/*/iter_0000002")) == ["1", "2"]
    mixed = generated_by(-1, 0, 1, 2)
    step = ranks.first("train", shards(mixed, 2)).steps[0]
    assert step["ppo_kl"] != 0 and step["pg_clipfrac"] > 0
    ranks.call("push", 3)
    newer = generated_by(1, 2, 3)
    next_step = ranks.first("train", shards(newer, 3)).steps[0]

    for first in (False, True):  # a run sends the weights before the rest of its checkpoint is read
        ranks.start(world, config, model.shape, OLD, resume_from=str(tmp_path), most_behind=2, weights_first=first)
        ranks.call("push", 2)
        assert ranks.first("train", shards(mixed, 2)).steps[0] == step
        ranks.call("push", 3)
        assert ranks.first("train", shards(newer, 3)).steps[0] == next_step

    given = [
        dataclasses.replace(
            sample,
            rollout_log_probs=[
                float(of_version[version][sample.index][place])
                for place, version in enumerate(sample.extras["weight_versions"].tolist())
            ],
        )
        for sample in mixed
    ]
    ranks.start(world, config, model.shape, GIVEN, resume_from=str(tmp_path))
    expected = ranks.first("train", shards(given, 2)).steps[0]
    assert {name: step[name] for name in COMPARED} == {name: expected[name] for name in COMPARED}


def test_what_stands_for_a_version():
    model = [torch.nn.Linear(2, 2)]
    versions = KeptVersions(model, most_behind=4)
    for version in (3, 4, 6):
        versions.pushed(version)
        model[0].weight.data.fill_(version)
        versions.before_training()
        versions.before_training()  # nothing has been sent since: these weights have no version
    versions.pushed(7)
    assert list(versions.copies) == [3, 4, 6]
    assert versions.by_source({-1, 2, 3, 4, 5, 6, 7}) == {None: [-1, 7], 3: [2, 3], 4: [4], 6: [5, 6]}
    versions.pushed(8)
    assert list(versions.copies) == [4, 6] and versions.by_source({3}) == {4: [3]}
    with versions.copies[4].in_place(model):
        assert model[0].weight.unique().tolist() == [4]
    assert model[0].weight.unique().tolist() == [6]
    versions.clear()
    assert versions.by_source({7}) == {None: [7]} and list(versions.copies) == []
