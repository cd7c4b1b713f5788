"""A checkpoint saved in any parallel layout continues in any other: the next step is what one process would do."""

import itertools

import numpy as np
import pytest

from slime_core.config import AlgorithmConfig
from support import layouts
from support.layouts import Layout, suits

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
FAMILIES = ["llama-tied/4", "glm4-moe-mtp/4", "deepseek-mtp/4"]
ALONE = {"one": Layout(1, {})}
# Those that only divide a step otherwise hold no other state.
LAYOUTS = {name: one for name, one in layouts.LAYOUTS.items() if one.max_tokens is None and not one.uneven}
FULL = pytest.mark.full
# Adam's. Four steps follow each other, and each makes a rounding error of a vanishing gradient lr / eps times as
# large: ten times, with this. A gradient that is wrong by 2e-6 still shows in the weights.
EPS = 1e-3
SHOWN = [
    ("llama-tied/4", True, "one", "pp2+vpp2"),
    ("deepseek-mtp/4", True, "tp2+sp", "ep2"),
]


def pairs():
    """Family, distributed optimizer, layout that saves, layout that loads.

    All pairs would be 3,600. The full run saves and loads each layout twice in every family with each optimizer, at
    distances in the list of layouts that no other family or optimizer has.
    """
    shown = set(SHOWN)
    for number, (name, distributed) in enumerate(itertools.product(FAMILIES, (False, True))):
        fitting = [
            layout
            for layout, one in (ALONE | LAYOUTS).items()
            if (layout in ALONE or suits(name.replace("-mtp", ""), layout))
            and (distributed or "use_distributed_optimizer" not in one.settings)
        ]
        cases = [
            (name, distributed, saves, fitting[(at + distance) % len(fitting)])
            for distance in (1 + number, 8 + number)
            for at, saves in enumerate(fitting)
        ]
        for case in dict.fromkeys([*cases, *(case for case in SHOWN if case[:2] == (name, distributed))]):
            yield pytest.param(*case, marks=[] if case in shown else [FULL])


class Run:
    """Starts a layout and trains one rollout after the other."""

    def __init__(self, ranks, model, tiny_config, make_samples, make_shards):
        self.ranks, self.model = ranks, model
        self._config, self._samples, self._shards = tiny_config, make_samples, make_shards

    def start(self, layout, distributed, save, resume_from=None):
        world, settings, self._micro, *_ = (ALONE | LAYOUTS)[layout]
        values = settings | {"use_distributed_optimizer": distributed}
        self._settings = self._config(load=self.model.checkpoint, save=str(save), adam_eps=EPS, **values)
        self._world = world
        self.ranks.start(world, self._settings, self.model.shape, GRPO, resume_from=resume_from)

    def train(self, rollout_id):
        samples = self._samples(groups=4, per_group=4, masks=True, seed=rollout_id)
        shards = self._shards(
            samples,
            data_parallel=self._settings.data_parallel_size(self._world),
            steps=2,
            micro_batch_size=self._micro,
            rollout_id=rollout_id,
        )
        return self.ranks.call("train", shards)[0].steps


@pytest.fixture(scope="module")
def saved(rank_group, rank_pool, tiny_model, tiny_config, make_samples, make_shards, tmp_path_factory):
    """A checkpoint of a family and layout after one rollout; for one process also the next steps and weights."""
    made = {}

    def run(name, distributed, layout):
        key = (name, distributed, layout)
        if key not in made:
            path = tmp_path_factory.mktemp("run")
            job = Run(rank_group(rank_pool), tiny_model(name), tiny_config, make_samples, make_shards)
            job.start(layout, distributed, path)
            job.train(0)
            job.ranks.call("save", 1)
            made[key] = path, *((job.train(1), job.ranks.first("weights")) if layout == "one" else ())
            job.ranks.close()
        return made[key]

    return run


@pytest.mark.parametrize(("name", "distributed", "saves", "loads"), pairs())
def test_any_layout_continues_any_other(
    ranks, saved, tiny_model, tiny_config, make_samples, make_shards, tmp_path, name, distributed, saves, loads
):
    _, expected_steps, expected = saved(name, False, "one")
    job = Run(ranks, tiny_model(name), tiny_config, make_samples, make_shards)
    job.start(loads, distributed, tmp_path, resume_from=str(saved(name, distributed, saves)[0]))
    for step, wanted in zip(job.train(1), expected_steps, strict=True):
        for metric in ("loss", "grad_norm", "kl_loss"):
            assert step[metric] == pytest.approx(wanted[metric], rel=2e-5, abs=2e-6), metric
    weights = ranks.first("weights")
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key], value, atol=2e-5, rtol=0, err_msg=key)
