import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import kept_log_probs, kept_log_probs_and_entropy, linear_log_probs_and_entropy
from support import kept_cases


def by_the_definition(hidden, weight, targets, ids, counts, temperature):
    """Number by number in float64."""
    log_probs, entropies, start = [], [], 0
    table = weight.tolist()
    for token, target, count in zip(hidden.tolist(), targets.tolist(), counts.tolist(), strict=True):
        kept = ids[start : start + count].tolist()
        start += count
        logits = [math.fsum(h * w for h, w in zip(token, table[one], strict=True)) / temperature for one in kept]
        top = max(logits)
        total = math.fsum(math.exp(value - top) for value in logits)
        log_p = [value - top - math.log(total) for value in logits]
        log_probs.append(log_p[kept.index(target)])
        entropies.append(-math.fsum(math.exp(lp) * lp for lp in log_p))
    return log_probs, entropies


@given(
    seed=st.integers(0, 2**16), temperature=st.sampled_from([1.0, 0.3, 2.5]), scale=st.sampled_from([0.1, 3.0, 300.0])
)
def test_equals_the_definition(seed, temperature, scale):
    hidden, weight, targets, ids, counts = kept_cases.inputs("even", seed)
    hidden = hidden * scale
    log_probs, entropy = kept_log_probs_and_entropy(
        hidden, weight, targets, ids, counts, temperature=temperature, with_entropy=True
    )
    expected = by_the_definition(hidden, weight, targets, ids, counts, temperature)
    assert log_probs.tolist() == pytest.approx(expected[0], rel=1e-10, abs=1e-10)
    assert entropy.tolist() == pytest.approx(expected[1], rel=1e-8, abs=1e-8)


def test_gradcheck():
    hidden, weight, *rest = kept_cases.inputs("even")

    def both(hidden, weight):
        return kept_log_probs_and_entropy(hidden, weight, *rest, temperature=0.7, with_entropy=True)

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tokens_kept_is_the_whole_vocabulary(dtype):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (5, 70))
    targets = torch.randint(0, 70, (5,), generator=generator)
    ids, counts = torch.arange(70).repeat(5), torch.full((5,), 70)
    found = kept_log_probs_and_entropy(hidden, weight, targets, ids, counts, with_entropy=True)
    expected = linear_log_probs_and_entropy(hidden, weight, targets, with_entropy=True)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_parts_change_nothing(monkeypatch):
    whole = kept_cases.run(*kept_cases.inputs("bf16"))
    monkeypatch.setitem(kept_log_probs._CHUNK_ELEMENTS, "cpu", 64 * 7)
    parts = kept_cases.run(*kept_cases.inputs("bf16"))
    for name in ("log_probs", "entropy"):
        assert parts[name].equal(whole[name])
    for name in ("hidden", "weight"):
        torch.testing.assert_close(parts[name], whole[name], rtol=2**-6, atol=2**-6)


def test_kept_rows_are_gathered_a_part_at_a_time(peak_bytes):
    """Forward and backward; the rows of hidden states and weight that are kept would take 32 MiB each."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(rows, 1024, generator=generator).requires_grad_() for rows in (64, 128))
    ids, counts = torch.arange(128).repeat(64), torch.full((64,), 128)

    def run():
        log_probs, _ = kept_log_probs_and_entropy(hidden, weight, torch.zeros(64, dtype=torch.long), ids, counts)
        log_probs.sum().backward()

    part = kept_log_probs._CHUNK_ELEMENTS["cpu"] * 4
    assert part < peak_bytes(run) < 4 * part < 32 * 2**20


@pytest.mark.parametrize("name", kept_cases.CASES)
def test_split_by_vocabulary_equals_whole(vocab_parallel_ranks, name):
    expected = kept_cases.run(*kept_cases.inputs(name))
    first, second = (results["kept"][name] for results in vocab_parallel_ranks)
    tolerance = 2**-7 if kept_cases.CASES[name][3] == torch.bfloat16 else 1e-11
    for key in ("log_probs", "entropy", "hidden"):
        assert first[key].equal(second[key])
        torch.testing.assert_close(first[key], expected[key], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        torch.cat([first["weight"], second["weight"]]), expected["weight"], rtol=tolerance, atol=tolerance
    )


def test_what_is_refused():
    hidden, weight, targets, ids, counts = kept_cases.inputs("even")
    with pytest.raises(ConfigError, match="temperature 0 must be above 0"):
        kept_log_probs_and_entropy(hidden, weight, targets, ids, counts, temperature=0)
    with pytest.raises(DataError, match=r"\[tokens, hidden\].*; got \[6, 4\], \[10, 4\], \[5\], \[6\] and \[35\]$"):
        kept_log_probs_and_entropy(hidden, weight, targets[1:], ids, counts)
    with pytest.raises(DataError, match="cast one of them"):
        kept_log_probs_and_entropy(hidden.float(), weight, targets, ids, counts)
    with pytest.raises(DataError, match="kept_counts add up to 35, and there are 34 kept_ids"):
        kept_log_probs_and_entropy(hidden, weight, targets, ids[1:], counts)
    alone, one = torch.tensor([3]), torch.tensor([1])
    with pytest.raises(DataError, match=r"target 4 \(place 0\) is 0 times among its 1 kept tokens"):
        kept_log_probs_and_entropy(hidden[:1], weight, torch.tensor([4]), alone, one)
    with pytest.raises(DataError, match=r"target 3 \(place 0\) is 2 times among its 2 kept tokens"):
        kept_log_probs_and_entropy(hidden[:1], weight, alone, torch.tensor([3, 3]), 2 * one)
