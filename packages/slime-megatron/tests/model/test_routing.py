"""Experts that were chosen before are chosen again: log-probs as transformers computes them with the same experts, and
in every layout what one process computes."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

from slime_core.config import AlgorithmConfig
from slime_core.errors import DataError
from slime_megatron.model.packing import MicroBatch
from slime_megatron.model.routing import ExpertChoice
from support.layouts import EPS, FULL, LAYOUTS, PP2, SHARED, VPP2, WITH_EXPERTS, Layout, deal
from support.plain import plain_log_probs

TOPK, EXPERTS, LAYERS = 2, 8, 4
GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
# Backward passes of several micro-batches come after forward passes of others.
PIPELINED = {
    "pp2, full recomputation": Layout(2, PP2 | FULL, 2),
    "pp2+vpp2, full recomputation": Layout(2, VPP2 | FULL, 2),
    "shared prompts, pp2+vpp2, full recomputation": Layout(2, VPP2 | FULL | SHARED, 4),
}
SHOWN = (
    *("cp2", "recomputed experts"),
    "shared prompts, pp2+vpp2, full recomputation",
)
SHOWN_OF_R2 = (("q", "one process"), ("d", "one process"))
FURTHER = (
    *("tp2+sp", "pp2+vpp2", "dp2+dist-opt", "full recomputation", "pp2, full recomputation"),
    *("pp2+vpp2, full recomputation", "tp2+sp+etp1+ep2", "tp2+sp, pp2", "tp2+sp, cp2", "cp2, pp2", "tp2+sp, dp2, ep2"),
    *("pp2, dp2, ep2", "shared prompts", "ep2", "shared prompts, tp2+sp"),
)


def dense_layers(name):
    """How many of the first layers have no experts."""
    return 0 if name.startswith("qwen3") else 1


def with_experts(samples, name, known=1.0, seed=5):
    """The samples with experts drawn for all inputs, or a part of them, of the same prompt the same; zeros where a
    layer has none, as SGLang gives them."""
    found = []
    for number, sample in enumerate(samples):
        parts = [
            drawn(np.random.default_rng([seed, *key]), length)
            for key, length in (
                ((0, sample.group_index), sample.prompt_length),
                ((1, number), sample.response_length - 1),
            )
        ]
        rows = np.concatenate(parts)
        rows[:, : dense_layers(name)] = 0
        rows = rows.reshape(len(rows), -1)[: round(known * len(rows))]
        found.append(dataclasses.replace(sample, extras={"routed_experts": rows.astype(np.uint8)}))
    return found


def drawn(rng, tokens):
    return np.argsort(rng.random((tokens, LAYERS, EXPERTS)), axis=-1)[:, :, :TOPK]


class ForcedTopk:
    """Stands in for torch's top-k in a router of transformers: gives the experts of one sample, layer by layer."""

    def __init__(self, rows, layers):
        self.rows, self.layers, self.topk = rows, layers, torch.topk
        self.changed = 0

    def __call__(self, scores, k, *args, **kwargs):
        if scores.shape[-1] != EXPERTS or k != TOPK or scores.dim() != 2:
            return self.topk(scores, k, *args, **kwargs)  # of groups of experts
        given = torch.from_numpy(self.rows[:, self.layers.pop(0)].astype(np.int64))
        own = self.topk(scores, k, *args, **kwargs).indices
        self.changed += sum(len({*one} - {*other}) for one, other in zip(given.tolist(), own.tolist(), strict=False))
        chosen = torch.cat([given, own[len(given) :]])
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


def forced_log_probs(model, sample, name):
    """What transformers computes with a sample's experts, and how many of its own choices that changed."""
    rows = sample.extras["routed_experts"].reshape(-1, LAYERS, TOPK)
    forced = ForcedTopk(rows, list(range(dense_layers(name), LAYERS)))
    with mock.patch("torch.topk", forced), mock.patch.object(torch.Tensor, "topk", lambda *a, **k: forced(*a, **k)):
        found = plain_log_probs(model, sample, 1.0)
    assert not forced.layers
    return found, forced.changed


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize("known", [1.0, 0.6])
def test_log_probs_are_those_with_the_experts_of_the_engine(
    ranks, tiny_model, tiny_config, make_samples, make_shards, name, known
):
    """Of the policy; the reference is another model and chooses for itself. Where they are unknown, routers choose."""
    model = tiny_model(name)
    samples = with_experts(make_samples(groups=2, per_group=2), name, known)
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape, GRPO)
    [shard] = make_shards(samples)
    found, plain = (ranks.first("forward", [shard], role) for role in ("actor", "reference"))
    with torch.no_grad():
        for sample, own, of_reference in zip(samples, found, plain, strict=True):
            wanted, _ = forced_log_probs(model.hf, sample, name)
            np.testing.assert_allclose(own, wanted.numpy(), atol=2e-5)
            unforced = plain_log_probs(model.hf, sample, 1.0)
            np.testing.assert_allclose(of_reference, unforced.numpy(), atol=2e-5)
            assert (wanted - unforced).abs().max() > 0.01, "experts matter"


def test_the_share_of_choices_that_replay_changed(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """Recomputation in the backward pass, and the pass of the old log-probs, count nothing twice."""
    name = "deepseek/4"
    model = tiny_model(name)
    samples = with_experts(make_samples(groups=2, per_group=2), name, known=0.6)
    config = tiny_config(load=model.checkpoint, **FULL)
    ranks.start(1, config, model.shape, GRPO)
    answers = ranks.call("train_and_watch_gradients", make_shards(samples), None)
    with torch.no_grad():
        changed = sum(forced_log_probs(model.hf, sample, name)[1] for sample in samples)
    given = sum(len(sample.extras["routed_experts"]) for sample in samples) * (LAYERS - dense_layers(name)) * TOPK
    assert answers[0][0].steps[0]["routing_replay_changed"] == pytest.approx(changed / given, abs=0.01)
    assert 0.5 < changed / given < 1


@pytest.fixture
def train(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """Three steps: metrics, gradients and weights."""

    def run(name, layout, change=with_experts, **settings):
        model, samples = tiny_model(name), make_samples(groups=6, per_group=4, masks=True)
        config = tiny_config(load=model.checkpoint, adam_eps=EPS, **layout.settings, **settings)
        shards = deal(make_shards, change(samples, name), layout, config)
        ranks.start(layout.world, config, model.shape, GRPO)
        answers = ranks.call("train_and_watch_gradients", shards, None)
        return answers[0][0].steps, answers[0][1], ranks.first("weights")

    return run


@pytest.fixture(scope="session")
def known():
    return {}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if layout in SHOWN and name == "deepseek/4" else [pytest.mark.full])
        for name in WITH_EXPERTS
        for layout in SHOWN + FURTHER
    ],
)
def test_a_layout_replays_as_one_process_does(train, known, name, layout):
    how = shared_as(layout)
    key = (name, *how.values())
    if key not in known:
        known[key] = train(name, Layout(1, {}), **how)
    # A prompt that is shared counts once.
    check_same(train(name, (LAYOUTS | PIPELINED)[layout]), known[key], changed=0.06 if "shared" in layout else 0.03)


def shared_as(layout):
    """Settings with which one process counts a prompt as often as a layout: context-parallel ranks share none."""
    return {"share_prompts": "off"} if "cp" in layout else {}


def check_same(found, expected, changed=0.03):
    for step, wanted in zip(found[0], expected[0], strict=True):
        assert step["routing_replay_changed"] == pytest.approx(wanted["routing_replay_changed"], abs=changed)
        for metric in ("loss", "grad_norm", "kl_loss"):
            assert abs(step[metric] - wanted[metric]) <= 1e-5 * max(0.1, abs(wanted[metric])), metric
    for key, wanted in expected[1][0].items():
        assert np.abs(found[1][0][key] - wanted).max() <= 1e-5 * max(np.abs(wanted).max(), 1e-4), key
    for key, wanted in expected[2].items():
        assert np.abs(found[2][key] - wanted).max() <= 1e-5, key


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name[0], layout) in SHOWN_OF_R2 else [pytest.mark.full])
        for name in WITH_EXPERTS
        for layout in ("one process", "tp2+sp", "pp2+vpp2, full recomputation", "cp2")
    ],
)
def test_steps_choose_the_experts_of_the_old_log_probs(train, tiny_model, name, layout):
    """R2 is training with the experts that transformers chooses with the weights from before the first step."""
    hf = tiny_model(name).hf

    def chosen_by_transformers(samples, name):
        return [dataclasses.replace(one, extras={"routed_experts": chosen(hf, one, name)}) for one in samples]

    layouts = LAYOUTS | PIPELINED | {"one process": Layout(1, {})}
    expected = train(name, layouts["one process"], chosen_by_transformers, **shared_as(layout))
    recorded = train(name, layouts[layout], lambda samples, name: samples, use_routing_replay=True)
    check_same(recorded, expected)
    assert recorded[0][0]["routing_replay_changed"] < 0.01 < recorded[0][-1]["routing_replay_changed"]
    own = train(name, layouts["one process"], lambda samples, name: samples)
    assert "routing_replay_changed" not in own[0][0]
    assert own[0][0]["loss"] == pytest.approx(expected[0][0]["loss"], abs=1e-6)
    assert any(np.abs(own[2][key] - value).max() > 1e-4 for key, value in expected[2].items()), "experts change"


def chosen(model, sample, name):
    """The experts that transformers chooses for a sample's inputs."""
    found, topk = [], torch.topk

    def noting(scores, k, *args, **kwargs):
        made = topk(scores, k, *args, **kwargs)
        if scores.shape[-1] == EXPERTS and k == TOPK and scores.dim() == 2:
            found.append(made.indices)
        return made

    with (
        torch.no_grad(),
        mock.patch("torch.topk", noting),
        mock.patch.object(torch.Tensor, "topk", lambda *a, **k: noting(*a, **k)),
    ):
        model(torch.tensor([sample.tokens]))
    rows = np.zeros((len(sample.tokens) - 1, LAYERS, TOPK), np.uint8)
    for layer, indices in enumerate(found, dense_layers(name)):
        rows[:, layer] = indices[:-1].numpy()
    return rows.reshape(len(rows), -1)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda rows: rows[:, :-1], "the engine named 7 experts for a token, and the model has 4 layers × 2"),
        (lambda rows: rows * 0, r"named the experts \[0, 0\] in layer 1, which are not 2 different ones of 8"),
        (lambda rows: rows + 7, r"in layer 1, which are not 2 different ones of 8; take an engine that records them"),
    ],
    ids=["other width", "nothing recorded", "no such expert"],
)
def test_experts_of_another_model_are_refused(
    ranks, rank_error, tiny_model, tiny_config, make_samples, make_shards, spoil, problem
):
    model = tiny_model("deepseek/4")
    samples = [
        dataclasses.replace(one, extras={"routed_experts": spoil(one.extras["routed_experts"])})
        for one in with_experts(make_samples(groups=1, per_group=2), "deepseek/4")
    ]
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape)
    with pytest.raises(rank_error, match=problem) as raised:
        ranks.first("forward", make_shards(samples))
    assert raised.value.kind == DataError.__name__


def test_prompts_are_shared_where_their_experts_are_the_same(make_samples, make_shards):
    [shard] = make_shards(with_experts(make_samples(groups=1, per_group=3), "qwen3-moe/4"))
    tokens = sum(len(sample.tokens) - 1 for sample in shard.samples)
    prompt = shard.samples[0].prompt_length
    assert len(MicroBatch(shard.samples, share_prompts="on").pack().tokens_T) == tokens - 2 * prompt
    other = dict(shard.samples[1].extras)
    other["routed_experts"] = other["routed_experts"].copy()
    other["routed_experts"][prompt - 1, :2] = (other["routed_experts"][prompt - 1, :2] + 1) % EXPERTS
    samples = [shard.samples[0], dataclasses.replace(shard.samples[1], extras=other), shard.samples[2]]
    batch = MicroBatch(samples, share_prompts="on")
    packed = batch.pack(replays=True)
    assert len(packed.tokens_T) == tokens - prompt - (prompt - 1), (
        "all but the last token of the prompt is shared by all"
    )
    rows = {
        (int(token), int(position)): tuple(row.tolist())
        for token, position, row in zip(packed.tokens_T, packed.positions_T, packed.routing.engine_TW, strict=True)
    }
    for sample in samples[1:]:
        for position in range(sample.prompt_length, len(sample.tokens) - 1):
            known = rows[int(sample.tokens[position]), position]
            assert known == tuple(sample.extras["routed_experts"][position].tolist())


def test_a_router_alone_chooses_as_megatron_does():
    """Also after a pass that failed before its backward pass."""
    choice, scores = ExpertChoice(), torch.rand(5, EXPERTS)
    given = torch.tensor([[3, 1]] * 5)

    def topk(scores, k, **_):
        return torch.topk(scores, k)

    for forget in (False, True):
        with torch.enable_grad():
            choice.begin(given, records=False)
            with torch.no_grad():  # as in a layer that is to be recomputed
                _, chosen_TK = choice.get_replay_topk(scores, TOPK, default_compute_topk=topk)
        assert (chosen_TK == given).all()
        if forget:
            choice.forget()
        _, again_TK = choice.get_replay_topk(scores, TOPK, default_compute_topk=topk)
        assert (again_TK == (torch.topk(scores, TOPK).indices if forget else given)).all()
