"""The losses in one call against each paper's formula, token by token in float64."""

import inspect
import math
import pydoc
import re

import numpy as np
import pytest
import torch

from slime_core import ops
from slime_core.config import GROUP_RELATIVE, AlgorithmConfig
from slime_core.errors import ConfigError, DataError

GROUPS = [0, 1, 0, 1, 1]
REWARDS = [1.0, 0.0, 0.0, 2.0, 0.5]
LENGTHS = [4, 2, 3, 1, 4]


class Rows:
    """Padded rows [B, L] with NaN in the padding, and one masked token inside."""

    def __init__(self, seed=0, spread=0.3):
        generator = torch.Generator().manual_seed(seed)
        self.mask = (torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)).long()
        self.mask[0, 1] = 0
        hole = torch.where(self.mask == 0, torch.nan, 0.0).double()
        noise = torch.randn(5, 5, 4, generator=generator, dtype=torch.float64)
        self.old = -1 - noise[0].abs() + hole
        self.new = (self.old + spread * noise[1]).requires_grad_()
        self.ref = self.old + 0.3 * noise[2]
        self.values, self.new_values = noise[3] + hole, (noise[3] + 0.5 * noise[4] + hole).requires_grad_()
        self.given = {"rewards": REWARDS, "group_ids": GROUPS, "old_log_probs": self.old}

    def trained(self, row):
        return [t for t in range(4) if self.mask[row, t]]


def normalized(divide=True):
    result = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        peers = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        result.append((reward - mean) / (std + 1e-6 if divide else 1))
    return result


def clipped(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def by_the_paper(rows, name):
    """The loss of each algorithm as its paper writes it, with the paper's constants."""
    new, old, ref = rows.new.tolist(), rows.old.tolist(), rows.ref.tolist()
    advantages = normalized(divide=name != "dr_grpo_loss")
    count = int(rows.mask.sum())
    total = 0.0
    for row, advantage in enumerate(advantages):
        tokens = rows.trained(row)
        ratio = {t: math.exp(new[row][t] - old[row][t]) for t in tokens}
        match name:
            case "grpo_loss":
                k3 = {t: math.exp(ref[row][t] - new[row][t]) - (ref[row][t] - new[row][t]) - 1 for t in tokens}
                inner = sum(clipped(ratio[t], advantage, 0.2, 0.2) + 0.04 * k3[t] for t in tokens)
                total += inner / len(tokens) / 5
            case "dr_grpo_loss":
                total += sum(clipped(ratio[t], advantage, 0.2, 0.2) for t in tokens) / 4 / 5
            case "dapo_loss":
                total += sum(clipped(ratio[t], advantage, 0.2, 0.28) for t in tokens) / count
            case "gspo_loss":
                s = math.exp(sum(new[row][t] - old[row][t] for t in tokens) / len(tokens))
                total += clipped(s, advantage, 3e-4, 4e-4) / 5
            case "cispo_loss":
                total -= sum(min(ratio[t], 5.0) * advantage * new[row][t] for t in tokens) / count
    return total


LOSSES = {
    "grpo_loss": {"ref": True},
    "dr_grpo_loss": {"loss_divisor": 4.0},
    "dapo_loss": {},
    "gspo_loss": {},
    "cispo_loss": {},
}


def call(name, rows, **change):
    options = dict(LOSSES[name])
    if options.pop("ref", False):
        options["ref_log_probs"] = rows.ref
    return getattr(ops, name)(rows.new, rows.mask, **{**rows.given, **options, **change})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_the_papers(name, seed):
    rows = Rows(seed, spread=1.0 if name != "gspo_loss" else 1e-3)
    loss, metrics = call(name, rows)
    expected = by_the_paper(rows, name)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert metrics["loss"] == loss
    (grad,) = torch.autograd.grad(loss, rows.new)
    assert not grad[rows.mask == 0].any()
    if name == "cispo_loss":  # no gradient flows through its weight
        return
    for row, t in ((0, 2), (3, 0), (4, 1)):
        moved, shift = Rows(seed, spread=1.0 if name != "gspo_loss" else 1e-3), 1e-7
        with torch.no_grad():
            moved.new[row, t] += shift
        slope = (by_the_paper(moved, name) - expected) / shift
        assert grad[row, t].item() == pytest.approx(slope, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_ragged_shapes_give_the_same(name):
    rows = Rows()
    loss, metrics = call(name, rows)
    (grad,) = torch.autograd.grad(loss, rows.new)
    inside = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)

    def parts(values):
        return [row[:length] for row, length in zip(values, LENGTHS, strict=True)]

    options = {key: value for key, value in LOSSES[name].items() if key != "ref"}
    for form in (parts, lambda values: torch.cat(parts(values))):
        given = {
            "rewards": torch.tensor(REWARDS).double(),
            "group_ids": torch.tensor(GROUPS),
            "old_log_probs": form(rows.old),
        }
        if name == "grpo_loss":
            given["ref_log_probs"] = form(rows.ref)
        if form is not parts:
            given["lengths"] = LENGTHS
        other, found = getattr(ops, name)(form(rows.new), form(rows.mask), **given, **options)
        torch.testing.assert_close(other, loss, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(other, rows.new)[0][inside], grad[inside], rtol=1e-9, atol=1e-12)
        assert {key: value.item() for key, value in found.items()} == pytest.approx(
            {key: value.item() for key, value in metrics.items()}, rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name):
    """With advantages, of sequences or tokens, and the whole step's counts."""
    rows = Rows()
    whole, _ = call(name, rows)
    advantages = torch.tensor(normalized(divide=name != "dr_grpo_loss"), dtype=torch.float64)
    counts = {"num_sequences": 5, "num_tokens": int(rows.mask.sum()), "rewards": None, "group_ids": None}
    for given in (advantages, advantages.unsqueeze(1).expand(5, 4)):
        total = 0.0
        for part in ([0, 3], [1, 2, 4]):
            piece = Rows()
            for field in ("new", "old", "ref", "mask"):
                setattr(piece, field, getattr(rows, field)[part])
            piece.given = {"old_log_probs": piece.old}
            total += call(name, piece, advantages=given[part], **counts)[0]
        torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-12)


def test_ppo_has_advantages_from_the_critic_and_its_loss():
    rows = Rows()
    flat = {"mask_T": rows.mask.flatten(), "lengths": [4] * 5}
    earned = ops.token_rewards(rewards_N=torch.tensor(REWARDS, dtype=torch.float64), **flat)
    advantages, returns = ops.gae_advantages(rewards_T=earned, values_T=rows.values.flatten(), lambd=0.95, **flat)
    weights = rows.mask.flatten() / rows.mask.sum()
    expected, _ = ops.policy_token_loss(
        rows.new.flatten(), rows.old.flatten(), advantages, 0.2, 0.2, mask_T=flat["mask_T"]
    )
    given = {"rewards": REWARDS, "old_log_probs": rows.old, "values": rows.values}
    policy, _ = ops.ppo_loss(rows.new, rows.mask, **given)
    torch.testing.assert_close(policy, (expected * weights).sum())
    squared, _ = ops.value_loss(rows.new_values.flatten(), rows.values.flatten(), returns, 0.2, mask_T=flat["mask_T"])
    both, metrics = ops.ppo_loss(rows.new, rows.mask, **given, new_values=rows.new_values, value_coef=0.5)
    torch.testing.assert_close(both, policy + 0.5 * (squared * weights).sum())
    assert metrics["loss"] == both
    assert {"pg_loss", "value_loss", "value_clipfrac"} <= metrics.keys()


def test_dpo_on_summed_log_probs():
    chosen, rejected, ref_chosen, ref_rejected = torch.tensor(
        [[-10.0, -12.0], [-11.0, -9.0], [-10.5, -11.0], [-10.0, -10.0]], dtype=torch.float64
    )
    loss, metrics = ops.dpo_loss(chosen.requires_grad_(), rejected, ref_chosen, ref_rejected)
    margins = [0.1 * (0.5 + 1.0), 0.1 * (-1.0 - 1.0)]
    assert loss.item() == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins) / 2)
    assert metrics["accuracy"] == 0.5
    (grad,) = torch.autograd.grad(loss, chosen)
    assert grad.tolist() == pytest.approx([-0.05 / (1 + math.exp(margin)) for margin in margins])
    free, _ = ops.dpo_loss(chosen, rejected)
    assert free.item() == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in (0.1, -0.3)) / 2)
    with pytest.raises(ConfigError, match="or of neither"):
        ops.dpo_loss(chosen, rejected, ref_chosen)
    with pytest.raises(DataError, match=r"one length; got the shapes \[\[2\], \[1, 2\]\]"):
        ops.dpo_loss(chosen, rejected.unsqueeze(0))


def accepted(config, name):
    """Whether a loss of this configuration takes an argument."""
    relative = config.advantage_estimator in GROUP_RELATIVE and not config.disable_rewards_normalization
    return {
        "group_ids": relative,
        "old_log_probs": not config.use_rollout_logprobs,
        "ref_log_probs": config.needs_reference,
        "rollout_log_probs": config.needs_rollout_log_probs or config.use_opsm,
        "teacher_log_probs": config.use_opd,
        "values": config.needs_critic,
    }.get(name, True)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_divisor": 7.0},
        {"calculate_per_token_loss": True},
        {"disable_grpo_std_normalization": True},
        {"disable_rewards_normalization": True},
        {"use_rollout_logprobs": True},
        {"eps_clip": 0.01},
        {"eps_clip_c": 1.1},
        {"entropy_coef": 0.1},
        {"kl_coef": 0.1},
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
        {"use_opd": True},
        {"normalize_advantages": True},
        {"use_tis": True, "tis_clip": 1.1},
        {"use_mis": True, "mis_level": "sequence", "mis_batch_normalize": True},
        {"use_opsm": True, "opsm_delta": 0.0},
        {"advantage_estimator": "rloo"},
        {"advantage_estimator": "ppo", "gamma": 0.9},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.9},
    ],
    ids=str,
)
def test_every_setting_is_honoured(settings):
    """Whatever is set changes the loss; a setting that a loop forgets would leave it as it was, to the last digit."""
    rows = Rows(seed=1, spread=1.0)
    given = {**rows.given, "ref_log_probs": rows.ref, "rollout_log_probs": rows.ref, "teacher_log_probs": rows.ref,
             "values": rows.values, "entropy": rows.values.abs()}  # fmt: skip
    losses = []
    for config in (AlgorithmConfig(), AlgorithmConfig(**settings)):
        used = {name: value for name, value in given.items() if accepted(config, name)}
        losses.append(ops.algorithm_loss(config, rows.new, rows.mask, **used)[0])
    plain, loss = losses
    assert loss.isfinite()
    assert abs(loss.item() - plain.item()) > 1e-6


REDUCERS = """
import torch

def over_seven(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(losses):
        parts = losses.split(response_lengths)
        divisor = 1 if calculate_per_token_loss else 7
        return sum((part * mask).sum() for part, mask in zip(parts, loss_masks)) / divisor
    return reduce

def careless(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda losses: losses.sum() / 7

def squared(*_):
    return lambda losses: (losses**2).sum()

def rows(*_):
    return lambda losses: losses

def constant(*_):
    return lambda losses: torch.tensor(1.0)

def number(*_):
    return 3
"""


@pytest.fixture
def reducer(tmp_path):
    path = tmp_path / "reducers.py"
    path.write_text(REDUCERS)
    return lambda name: {"custom_pg_loss_reducer_function_path": f"{path}:{name}"}


@pytest.mark.parametrize("name", ["over_seven", "careless"])
@pytest.mark.parametrize("others", [{}, {"advantage_estimator": "gspo"}, {"use_tis": True, "tis_clip": 1.1}], ids=str)
def test_a_reducer_of_the_users_sums_the_policy_loss(reducer, name, others):
    """One that divides by a constant is the divisor of Dr.GRPO; it leaves the KL loss and the entropy alone."""
    rows = Rows(seed=1, spread=1.0)
    others = {**others, "use_kl_loss": True, "kl_loss_coef": 0.1}
    given = {**rows.given, "ref_log_probs": rows.ref, "entropy": rows.values.abs()}
    given |= {"rollout_log_probs": rows.ref} if "use_tis" in others else {}
    _, plain = ops.algorithm_loss(AlgorithmConfig(**others), rows.new, rows.mask, **given)
    _, divided = ops.algorithm_loss(AlgorithmConfig(**others, loss_divisor=7.0), rows.new, rows.mask, **given)
    loss, own = ops.algorithm_loss(AlgorithmConfig(**others, **reducer(name)), rows.new, rows.mask, **given)
    torch.testing.assert_close(own["pg_loss"], divided["pg_loss"])
    assert abs(own["pg_loss"] - plain["pg_loss"]) > 1e-6
    for metric in ("kl_loss", "entropy_loss"):
        torch.testing.assert_close(own[metric], plain[metric], rtol=0, atol=0)
    torch.testing.assert_close(loss.detach(), own["pg_loss"] + 0.1 * own["kl_loss"])


def test_a_reducer_may_sum_per_token(reducer):
    rows, per_token = Rows(seed=1, spread=1.0), {"calculate_per_token_loss": True}
    expected, _ = ops.algorithm_loss(AlgorithmConfig(**per_token), rows.new, rows.mask, **rows.given)
    own = AlgorithmConfig(**per_token, **reducer("over_seven"))
    torch.testing.assert_close(ops.algorithm_loss(own, rows.new, rows.mask, **rows.given)[0], expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squared", "is not a weighted sum of the losses; return one"),
        ("rows", "must return one number, computed from the losses"),
        ("constant", "must return one number, computed from the losses"),
        ("number", "returned int; return a function from losses"),
    ],
)
def test_what_a_reducer_may_not_be(reducer, name, message):
    rows = Rows(seed=1)
    with pytest.raises(DataError, match=message):
        ops.algorithm_loss(AlgorithmConfig(**reducer(name)), rows.new, rows.mask, **rows.given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": None}, "grpo needs advantages, or rewards and group_ids"),
        ({"group_ids": None}, "grpo needs advantages, or rewards and group_ids"),
        ({"eps_clip": -1.0}, r"^eps_clip -1.0 must be 0 or more"),
        ({"eps_clip_high": math.inf}, r"^eps_clip_high inf must be"),
    ],
)
def test_errors_name_the_argument_and_no_flag(change, message):
    rows = Rows()
    with pytest.raises(ConfigError, match=message) as caught:
        ops.grpo_loss(rows.new, rows.mask, **{**rows.given, **change})
    assert "--" not in str(caught.value)


def test_inputs_that_cannot_be():
    rows = Rows()
    with pytest.raises(DataError, match="every group has one sequence"):
        ops.grpo_loss(rows.new, rows.mask, rewards=REWARDS, group_ids=range(5))
    with pytest.raises(DataError, match=r"mask must come as log_probs do, in the shape \[5, 4\]; got \[4, 5\]"):
        ops.grpo_loss(rows.new, rows.mask.T, **rows.given)
    with pytest.raises(DataError, match=r"log_probs have shape \[20\]; give \[sequences, tokens\]"):
        ops.grpo_loss(rows.new.flatten(), **rows.given)
    with pytest.raises(TypeError, match="unknown arguments old_logps; known: rewards"):
        ops.grpo_loss(rows.new, rows.mask, old_logps=rows.old)
    with pytest.raises(ConfigError, match="advantages were given, which kl_coef, use_opd"):
        ops.algorithm_loss(AlgorithmConfig(kl_coef=0.1), rows.new, rows.mask, advantages=torch.ones(5))
    with pytest.raises(ConfigError, match="use_kl_loss needs the reference's log-probs"):
        ops.algorithm_loss(AlgorithmConfig(use_kl_loss=True), rows.new, rows.mask, **rows.given)


ALL = {"rewards": REWARDS, "group_ids": GROUPS, "old_log_probs": "rows", "ref_log_probs": "rows",
       "rollout_log_probs": "rows", "teacher_log_probs": "rows", "values": "rows"}  # fmt: skip
SETTINGS_OF_ALL = [
    {},
    {"use_kl_loss": True},
    {"kl_coef": 0.1},
    {"use_tis": True},
    {"use_mis": True},
    {"use_opsm": True},
    {"use_rollout_logprobs": True},
    {"use_opd": True},
    {"disable_rewards_normalization": True},
    {"advantage_estimator": "ppo"},
    {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
]


@pytest.mark.parametrize("settings", SETTINGS_OF_ALL, ids=str)
def test_an_argument_either_changes_the_result_or_is_refused(settings):
    """Each argument is taken away and moved: one that changes nothing must not have been accepted."""
    rows, config = Rows(seed=1, spread=1.0), AlgorithmConfig(**settings)
    noise = torch.Generator().manual_seed(5)
    every = {
        name: rows.old + 0.5 * torch.randn(5, 4, generator=noise, dtype=torch.float64) if value == "rows" else value
        for name, value in ALL.items()
    }
    moved = {"rewards": [0.0, 3.0, 1.0, 0.0, 1.0], "group_ids": [0, 0, 0, 1, 1]}
    taken = {name: value for name, value in every.items() if accepted(config, name)}
    loss, metrics = ops.algorithm_loss(config, rows.new, rows.mask, **taken)
    for name, value in every.items():
        other = moved[name] if name in moved else value + (3 if name == "rollout_log_probs" else -0.3 * value.abs())
        if name not in taken:
            with pytest.raises(ConfigError, match=f"^{name} has no effect") as refused:
                ops.algorithm_loss(config, rows.new, rows.mask, **taken, **{name: other})
            assert "--" not in str(refused.value)
            continue
        changed, numbers = ops.algorithm_loss(config, rows.new, rows.mask, **{**taken, name: other})
        assert any(numbers[key] != metrics[key] for key in metrics) or changed != loss, name


@pytest.mark.parametrize(
    ("loss", "change", "message"),
    [
        ("grpo_loss", {"rollout_log_probs": 1}, "rollout_log_probs has no effect in this loss; algorithm_loss uses it "
         "with use_tis, use_mis, use_opsm or one of 2 others"),
        ("grpo_loss", {"teacher_log_probs": 1}, "algorithm_loss uses it with use_opd in its AlgorithmConfig: set that"),
        ("gspo_loss", {"values": 1}, "algorithm_loss uses it with advantage_estimator ppo, custom_adv"),
        ("grpo_loss", {"advantages": [1.0] * 5}, "rewards has no effect with advantages, which was given too"),
        ("grpo_loss", {"advantages": [1.0] * 5, "rewards": None}, "group_ids has no effect with advantages"),
        ("ppo_loss", {"values": 1}, "group_ids has no effect in this loss; algorithm_loss uses it with advantage_est"),
        ("ppo_loss", {"value_coef": 0.5}, "value_coef 0.5 has no effect in ppo_loss without new_values; give new_va"),
        ("ppo_loss", {"gamma": 0.9, "rewards": None}, "gamma 0.9 has no effect in ppo_loss without rewards"),
        ("grpo_loss", {"kl_loss_coef": 0.1}, "kl_loss_coef 0.1 has no effect in grpo_loss without ref_log_probs"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused_with_what_uses_it(loss, change, message):
    rows = Rows()
    change = {name: rows.values if value == 1 else value for name, value in change.items()}
    with pytest.raises(ConfigError, match=message):
        getattr(ops, loss)(rows.new, rows.mask, **{**rows.given, **change})


def test_the_critics_rewards_and_values_may_stand_beside_the_policys_advantages():
    rows = Rows()
    given = {"old_log_probs": rows.old, "advantages": torch.ones(5)}
    policy, _ = ops.ppo_loss(rows.new, rows.mask, **given)
    critics = {"rewards": REWARDS, "values": rows.values, "new_values": rows.new_values}
    both, metrics = ops.ppo_loss(rows.new, rows.mask, **given, **critics)
    torch.testing.assert_close(both, policy + metrics["value_loss"])


@pytest.mark.parametrize("form", [list, np.asarray, tuple], ids=["list", "array", "tuple"])
def test_numbers_and_group_ids_of_any_kind(form):
    rows = Rows()
    old, numbers = {"old_log_probs": rows.old}, [0.5, -1.0, 2.0, 0.25, 1.0]
    expected = ops.grpo_loss(rows.new, rows.mask, advantages=torch.tensor(numbers, dtype=torch.float64), **old)[0]
    found = ops.grpo_loss(rows.new, rows.mask, advantages=form(numbers), **old)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    expected = ops.grpo_loss(rows.new, rows.mask, **rows.given)[0]
    for ids in (["b", "a", "b", "a", "a"], [torch.tensor(one) for one in GROUPS] if form is list else GROUPS):
        found = ops.grpo_loss(rows.new, rows.mask, **{**rows.given, "rewards": form(REWARDS), "group_ids": form(ids)})
        torch.testing.assert_close(found[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0, 0.0]}, r"rewards has the shape \[2\]; give one of each of the 5 sequences"),
        ({"rewards": np.zeros((5, 1))}, r"rewards has the shape \[5, 1\]; give one"),
        ({"group_ids": ["a", "b"]}, r"group_ids has the shape \[2\]; give one"),
        ({"advantages": [1.0, 0.0], "rewards": None, "group_ids": None}, "advantages has 2 numbers for 5 sequences"),
        ({"old_log_probs": [-1.0] * 5}, r"old_log_probs is a list of 5 tensors or numbers of the shapes \[\(\)\]"),
    ],
    ids=["rewards", "a column", "group_ids", "advantages", "old_log_probs"],
)
def test_errors_of_shapes_say_what_was_given(change, message):
    rows = Rows()
    with pytest.raises(DataError, match=message):
        ops.grpo_loss(rows.new, rows.mask, **{**rows.given, **change})


def test_lengths_beside_a_list_are_refused():
    with pytest.raises(DataError, match="tensors in a list have theirs"):
        ops.grpo_loss([torch.zeros(2)] * 2, rewards=[0.0, 1.0], group_ids=[0, 0], lengths=[2, 2])


def test_without_old_log_probs_it_is_on_policy():
    rows = Rows()
    given = {"rewards": REWARDS, "group_ids": GROUPS}
    loss, metrics = ops.grpo_loss(rows.new, rows.mask, **given)
    assert metrics["ppo_kl"] == 0
    assert loss.item() == pytest.approx(-sum(normalized()) / 5, abs=1e-12)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.timeout(300)
def test_compiles_as_one_graph(estimator, backend):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 6, generator=generator)
    mask = (torch.rand(4, 6, generator=generator) > 0.3).float()
    new = (old + 0.1 * torch.randn(4, 6, generator=generator)).requires_grad_()
    advantages, config = torch.randn(4, generator=generator), AlgorithmConfig(advantage_estimator=estimator)

    def loss_of(new):
        return ops.algorithm_loss(config, new, mask, advantages=advantages, old_log_probs=old)[0]

    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    loss, expected = compiled(new), loss_of(new)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], torch.autograd.grad(expected, new)[0])


POLICY_LOSSES = [ops.algorithm_loss, ops.grpo_loss, ops.dr_grpo_loss, ops.dapo_loss, ops.gspo_loss, ops.cispo_loss]


@pytest.mark.parametrize("loss", [*POLICY_LOSSES, ops.ppo_loss], ids=lambda loss: loss.__name__)
def test_help_names_every_argument_with_its_shape_and_so_does_an_unknown_one(loss):
    shown = pydoc.render_doc(loss, renderer=pydoc.plaintext)
    own = [name for name, one in inspect.signature(loss).parameters.items() if one.kind is not one.VAR_KEYWORD]
    for name in ops.losses.Batch.__annotations__:
        assert re.search(rf"^ +{name}: .+", shown, re.MULTILINE), name
    assert all(shape in shown for shape in ("[B, L]", "[B]", "[T]"))
    assert all(part in shown for part in ("Returns:", "Raises:", "ConfigError:", "DataError:", "metrics"))
    with pytest.raises(TypeError, match="unknown arguments beta; known: rewards") as refused:
        loss(torch.zeros(1, 1), beta=0.1)
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert set(known) == {*ops.losses.Batch.__annotations__, *own}


def test_dpo_refuses_by_its_own_arguments():
    with pytest.raises(TypeError, match=r"unknown arguments rewards; known: chosen_log_probs, .*, num_pairs$"):
        ops.dpo_loss(torch.zeros(1), torch.zeros(1), rewards=[1.0])
