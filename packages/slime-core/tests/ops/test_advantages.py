import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import distilled_advantages, outcome_advantages


def test_what_outcome_advantages_refuse():
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(DataError, match=r"mask_T has shape \[2, 1\], must be \[2\]"):
        outcome_advantages(rewards_N=one, mask_T=torch.ones(2, 1), lengths=[2])
    with pytest.raises(DataError, match=r"rewards have shape \[2\] but there are 1 responses"):
        outcome_advantages(rewards_N=two, mask_T=two, lengths=[2])
    with pytest.raises(ConfigError, match=r"kl_coef 0.1 needs the divergence"):
        outcome_advantages(rewards_N=one, mask_T=two, lengths=[2], kl_coef=0.1)
    with pytest.raises(ConfigError, match="kl_coef nan must be a finite number"):
        outcome_advantages(rewards_N=one, mask_T=two, lengths=[2], kl_coef=torch.nan)
    with pytest.raises(DataError, match=r"kl_T must be finite .* at token 1"):
        outcome_advantages(rewards_N=one, mask_T=two, lengths=[2], kl_T=torch.tensor([0.0, torch.inf]), kl_coef=0.1)


LENGTHS = st.lists(st.integers(0, 5), max_size=5)


def batch(lengths, seed):
    """Rewards [N], two columns of token numbers [T] that are NaN where masked, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    mask = (torch.rand(sum(lengths), generator=generator) < 0.7).long()
    columns = torch.randn(3, sum(lengths), dtype=torch.float64, generator=generator)
    return rewards, columns.masked_fill(mask == 0, torch.nan), mask


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.2]))
def test_outcome_advantages_are_those_of_a_loop(lengths, seed, kl_coef):
    rewards, (kl, _, _), mask = batch(lengths, seed)
    ours = outcome_advantages(rewards_N=rewards, mask_T=mask, lengths=lengths, kl_T=kl, kl_coef=kl_coef)
    expected, tokens = [], iter(range(sum(lengths)))
    for number, length in enumerate(lengths):
        for _ in range(length):
            t = next(tokens)
            penalty = kl_coef * kl[t].item() if kl_coef else 0.0
            expected.append(rewards[number].item() - penalty if mask[t] else 0.0)
    assert ours.tolist() == pytest.approx(expected, abs=1e-14)


@given(st.integers(0, 9), st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0]))
def test_distillation_adds_the_reverse_kl(length, seed, coef):
    _, (advantages, student, teacher), mask = batch([length], seed)
    ours = distilled_advantages(
        advantages_T=advantages, student_log_probs_T=student, teacher_log_probs_T=teacher, mask_T=mask, coef=coef
    )
    expected = [
        a - coef * (s - t) if m else 0.0
        for a, s, t, m in zip(advantages.tolist(), student.tolist(), teacher.tolist(), mask.tolist(), strict=True)
    ]
    assert ours.tolist() == pytest.approx(expected, abs=1e-14)


def test_advantages_are_constants():
    student = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    ours = distilled_advantages(
        advantages_T=torch.zeros(1, dtype=torch.bfloat16),
        student_log_probs_T=student,
        teacher_log_probs_T=torch.tensor([-0.5]),
        mask_T=torch.ones(1),
        coef=2.0,
    )
    assert not ours.requires_grad
    assert ours.dtype == torch.float32
    assert ours.tolist() == [1.0]


def test_what_distillation_refuses():
    given_ = {name: torch.zeros(2) for name in ("advantages_T", "student_log_probs_T", "teacher_log_probs_T")}
    with pytest.raises(ConfigError, match="distillation, inf, must be a finite number"):
        distilled_advantages(**given_, mask_T=torch.ones(2), coef=torch.inf)
    with pytest.raises(DataError, match=r"has shape \[2\], must be \[3\]"):
        distilled_advantages(**given_, mask_T=torch.ones(3), coef=1.0)
    with pytest.raises(DataError, match=r"mask_T has shape \[2, 1\], must be \[2\]"):
        distilled_advantages(**given_, mask_T=torch.ones(2, 1), coef=1.0)
    with pytest.raises(DataError, match=r"advantages_T must be finite .* got inf at token 1"):
        distilled_advantages(
            **{**given_, "advantages_T": torch.tensor([0.0, torch.inf])}, mask_T=torch.ones(2), coef=1.0
        )
    given_["teacher_log_probs_T"] = torch.tensor([0.0, -torch.inf])
    with pytest.raises(DataError, match=r"student_log_probs_T - teacher_log_probs_T must be finite .* at token 1"):
        distilled_advantages(**given_, mask_T=torch.ones(2), coef=1.0)
