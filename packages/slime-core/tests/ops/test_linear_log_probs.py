import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import linear_log_probs_and_entropy, log_probs_and_entropy
from slime_core.ops.linear_log_probs import ChunkPlan
from support import linear_cases


def smallest_budget(*args, **kwargs):
    """The least bytes that a call accepts, which the error message gives: chunks of 64 ids."""
    with pytest.raises(ConfigError, match=r"memory_budget 1 bytes is below the \d+ that") as caught:
        linear_log_probs_and_entropy(*args, **kwargs, memory_budget=1)
    return int(str(caught.value).split()[6])


def by_the_definition(hidden, weight, bias, targets, temperature, vocab_size):
    """Logits, softmax, log-prob and entropy of each token, number by number in float64."""
    log_probs, entropies = [], []
    rows = list(zip(weight.tolist(), bias.tolist(), strict=True))[:vocab_size]
    for token, target in zip(hidden.tolist(), targets.tolist(), strict=True):
        logits = [
            (math.fsum(h * w for h, w in zip(token, row, strict=True)) + offset) / temperature for row, offset in rows
        ]
        top = max(logits)
        total = math.fsum(math.exp(value - top) for value in logits)
        log_p = [value - top - math.log(total) for value in logits]
        log_probs.append(log_p[target])
        entropies.append(-math.fsum(math.exp(lp) * lp for lp in log_p))
    return log_probs, entropies


def random_inputs(tokens, size, rows, *, vocab=None, dtype=torch.float64, seed=0, scale=1.0):
    """Hidden states, weight, targets and bias."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(tokens, size, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(rows, size, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(0, vocab or rows, (tokens,), generator=generator), bias


@given(
    tokens=st.integers(0, 5),
    size=st.integers(1, 3),
    vocab=st.sampled_from([1, 64, 65, 150]),
    padding=st.integers(0, 3),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    scale=st.sampled_from([0.1, 3.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_definition(tokens, size, vocab, padding, temperature, scale, seed):
    hidden, weight, targets, bias = random_inputs(tokens, size, vocab + padding, vocab=vocab, seed=seed, scale=scale)
    weight[vocab:] = torch.nan  # padding may hold anything
    kwargs = {"bias_V": bias, "temperature": temperature, "vocab_size": vocab, "with_entropy": True}
    budget = smallest_budget(hidden, weight, targets, **kwargs)
    log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, targets, **kwargs, memory_budget=budget)
    expected = by_the_definition(hidden, weight, bias, targets, temperature, vocab)
    assert log_probs.tolist() == pytest.approx(expected[0], rel=1e-10, abs=1e-10)
    assert entropy.tolist() == pytest.approx(expected[1], rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("output", ["log_probs", "entropy", "both"])
def test_gradcheck(output):
    """Three chunks of ids, the last one thin, and padding."""
    hidden, weight, targets, bias = random_inputs(2, 2, 132, vocab=130)
    targets[0] = 129
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    kwargs = {"temperature": 0.7, "vocab_size": 130, "with_entropy": True}
    budget = smallest_budget(hidden, weight, targets, **kwargs)

    def function(hidden, weight, bias):
        outputs = linear_log_probs_and_entropy(hidden, weight, targets, bias_V=bias, **kwargs, memory_budget=budget)
        return {"log_probs": outputs[0], "entropy": outputs[1], "both": outputs}[output]

    assert torch.autograd.gradcheck(function, inputs)
    _, grad_weight, grad_bias = torch.autograd.grad(function(*inputs)[0].sum(), inputs)
    assert grad_weight[130:].abs().max() == grad_bias[130:].abs().max() == 0


def whole(hidden, weight, targets, upstream, *, dtype):
    """Log-probs, entropies and gradients by way of the logits, everything in one type."""
    hidden, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight))
    log_probs, entropy = log_probs_and_entropy(hidden @ weight.T, targets, with_entropy=True)
    (log_probs @ upstream[0].to(log_probs) + entropy @ upstream[1].to(log_probs)).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def test_bf16_in_many_chunks_is_as_exact_as_in_one_piece():
    """The distance to float64 on the same inputs, against that of torch's bf16 products with the whole logits."""
    hidden, weight, targets, _ = random_inputs(64, 48, 6000, dtype=torch.bfloat16, seed=1)
    hidden *= 0.5
    upstream = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    hidden.requires_grad_()
    weight.requires_grad_()
    budget = smallest_budget(hidden, weight, targets)
    log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, targets, with_entropy=True, memory_budget=budget)
    (log_probs @ upstream[0] + entropy @ upstream[1]).backward()
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact = whole(hidden, weight, targets, upstream, dtype=torch.float64)
    plain = whole(hidden, weight, targets, upstream, dtype=torch.bfloat16)
    ours = log_probs.detach(), entropy.detach(), hidden.grad, weight.grad
    for own, other, reference in zip(ours, plain, exact, strict=True):
        error, plain_error = ((value.double() - reference).square().mean().sqrt() for value in (own, other))
        assert 0 < error <= 1.5 * plain_error + 1e-6


@pytest.mark.parametrize("budget", [800_000, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stays_within_its_budget(peak_bytes, budget, dtype):
    """Forward and backward, with the entropy's gradient; the logits would take 10 or 20 MB."""
    hidden, weight, targets, _ = random_inputs(256, 32, 20_000, dtype=dtype)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]

    def run():
        log_probs, entropy = linear_log_probs_and_entropy(*inputs, targets, with_entropy=True, memory_budget=budget)
        (log_probs.sum() + entropy.sum()).backward()

    gradients = sum(tensor.nbytes for tensor in inputs)
    peak = peak_bytes(run)
    assert gradients + budget / 2 < peak <= gradients + budget


def test_only_inputs_and_numbers_per_token_are_kept_for_backward():
    kept = []
    hidden, weight, targets, bias = random_inputs(64, 100, 300, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        linear_log_probs_and_entropy(hidden.requires_grad_(), weight, targets, bias_V=bias, with_entropy=True)
    large = {tensor.data_ptr() for tensor in kept if tensor.numel() > 64}
    assert large == {tensor.data_ptr() for tensor in (hidden, weight, bias)}


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_gradients_that_nobody_asked_for_are_left_out(frozen):
    hidden, weight, targets, _ = random_inputs(4, 3, 200)
    both = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    linear_log_probs_and_entropy(*both, targets)[0].sum().backward()
    one = [hidden.requires_grad_(frozen != "hidden"), weight.requires_grad_(frozen != "weight")]
    linear_log_probs_and_entropy(*one, targets)[0].sum().backward()
    for alone, together in zip(one, both, strict=True):
        assert alone.grad is None if not alone.requires_grad else alone.grad.equal(together.grad)


def test_an_unused_entropy_changes_no_gradient():
    gradients = []
    for with_entropy in (False, True):
        hidden, weight, targets, _ = random_inputs(4, 3, 200, dtype=torch.float32)
        log_probs, entropy = linear_log_probs_and_entropy(
            hidden.requires_grad_(), weight, targets, with_entropy=with_entropy
        )
        assert (entropy is not None) == with_entropy
        log_probs.sum().backward()
        gradients.append(hidden.grad)
    assert gradients[0].equal(gradients[1])


def test_splitting_the_tokens_changes_nothing():
    hidden, weight, targets, bias = random_inputs(9, 4, 150, dtype=torch.float32)
    results = []
    for cuts in ([0, 9], [0, 1, 1, 6, 9]):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        loss = 0.0
        for start, stop in itertools.pairwise(cuts):
            log_probs, entropy = linear_log_probs_and_entropy(
                inputs[0][start:stop], inputs[1], targets[start:stop], bias_V=inputs[2], with_entropy=True
            )
            part = (log_probs + 0.1 * entropy).sum()
            part.backward()
            loss += part.item()
        results.append([torch.tensor(loss), *(tensor.grad for tensor in inputs)])
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-6, atol=1e-6)


def test_forbidden_and_extreme_tokens_bring_no_nan():
    hidden, weight, targets, bias = random_inputs(3, 2, 150, dtype=torch.float32)
    hidden[0] *= 1e4
    bias[70:] = -torch.inf
    targets[:] = torch.tensor([3, 69, 0])
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    budget = smallest_budget(hidden, weight, targets)
    log_probs, entropy = linear_log_probs_and_entropy(
        hidden, weight, targets, bias_V=bias, with_entropy=True, memory_budget=budget
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.isfinite().all()
    assert entropy.isfinite().all()
    for tensor in inputs:
        assert tensor.grad.isfinite().all()
    assert weight.grad[70:].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_token_ids_of_any_integer_type(dtype):
    hidden, weight, targets, _ = random_inputs(3, 2, 150)
    expected, _ = linear_log_probs_and_entropy(hidden, weight, targets)
    assert linear_log_probs_and_entropy(hidden, weight, targets.to(dtype))[0].equal(expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be above 0"),
        ({"vocab_size": 9}, "vocab_size 9 must be between 1 and the 4 columns"),
        ({"memory_budget": 10}, "memory_budget 10 bytes is below the 640 that 2 tokens of hidden size 3 need"),
    ],
)
def test_bad_settings(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        linear_log_probs_and_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 1]), **kwargs)


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "bias", "message"),
    [
        ((2, 3), (4, 5), (2,), None, r"got \[2, 3\], \[4, 5\] and \[2\]"),
        ((2, 3), (4, 3), (3,), None, r"got \[2, 3\], \[4, 3\] and \[3\]"),
        ((2, 1, 3), (4, 3), (2,), None, r"got \[2, 1, 3\], \[4, 3\] and \[2\]"),
        ((2, 3), (4, 3), (2,), (3,), r"the bias must be \[4\], as the weight's rows; got \[3\]"),
    ],
)
def test_bad_shapes(hidden, weight, targets, bias, message):
    bias_V = None if bias is None else torch.zeros(bias)
    with pytest.raises(DataError, match=message):
        linear_log_probs_and_entropy(
            torch.zeros(hidden), torch.zeros(weight), torch.zeros(targets, dtype=torch.long), bias_V=bias_V
        )


def test_bad_types_and_tokens():
    hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(DataError, match=r"hidden states are torch.bfloat16 and the weight torch.float32; cast"):
        linear_log_probs_and_entropy(hidden.bfloat16(), weight, torch.tensor([0, 1]))
    with pytest.raises(DataError, match="token id 3 is outside the vocabulary of 3"):
        linear_log_probs_and_entropy(hidden, weight, torch.tensor([0, 3]), vocab_size=3)


@pytest.mark.parametrize("name", linear_cases.CASES)
def test_split_by_vocabulary_equals_whole(vocab_parallel_ranks, name):
    """Two ranks give one's results, each the whole gradient of the hidden states and its rows' of weight and bias."""
    expected = linear_cases.run(*linear_cases.inputs(name), vocab_size=linear_cases.CASES[name][1])
    first, second = (results["linear"][name] for results in vocab_parallel_ranks)
    bf16 = linear_cases.CASES[name][2] == torch.bfloat16
    for key in ("log_probs", "entropy"):
        for rank in (first, second):
            tolerance = 2e-6 if bf16 else 1e-12
            torch.testing.assert_close(rank[key], expected[key], rtol=tolerance, atol=tolerance)
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if bf16 else {"rtol": 1e-11, "atol": 1e-11}
    for key in ("weight", "bias"):
        torch.testing.assert_close(torch.cat([first[key], second[key]]), expected[key], **tolerance)
    assert first["hidden"].equal(second["hidden"])
    torch.testing.assert_close(first["hidden"], expected["hidden"], **tolerance)


@pytest.mark.parametrize("name", ["even", "chunks"])
def test_three_collectives_however_many_chunks(vocab_parallel_ranks, name):
    for rank in vocab_parallel_ranks:
        assert (rank["linear"][name]["forward_calls"], rank["linear"][name]["calls"]) == (2, 3)


QWEN_VOCAB = 151_936


def plan(budget=None, *, tokens=2048, hidden=1024, columns=QWEN_VOCAB, dtype=torch.bfloat16, device="cpu"):
    return ChunkPlan.within(
        budget,
        tokens=tokens,
        hidden=hidden,
        columns=columns,
        dtype=dtype,
        device=torch.device(device),
    )


def bytes_of(chosen, *, tokens, hidden, dtype):
    """By the definition: a chunk and its weight's copy, two fp32 buffers, the sum of the hidden gradient."""
    wide = 8 if dtype == torch.float64 else 4
    sums = tokens * hidden * wide if dtype.itemsize < wide else 0
    block = min(chosen.block_rows, tokens) * chosen.chunk_columns * wide
    return (tokens + hidden) * chosen.chunk_columns * dtype.itemsize + 2 * block + sums


@given(
    tokens=st.integers(0, 70_000),
    hidden=st.sampled_from([1, 64, 4096]),
    columns=st.integers(0, 300_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    device=st.sampled_from(["cpu", "cuda"]),
    budget=st.integers(0, 2**33),
)
def test_a_plan_stays_within_the_budget_or_is_refused(tokens, hidden, columns, dtype, device, budget):
    shape = {"tokens": tokens, "hidden": hidden, "dtype": dtype}
    try:
        chosen = plan(budget, columns=columns, device=device, **shape)
    except ConfigError:
        # Never refused where 64 columns, their buffers and small change for each token would fit twice.
        smallest = ChunkPlan(min(64, columns), 1)
        assert budget < 2 * (bytes_of(smallest, **shape) + 256 * tokens + 2048)
        return
    assert bytes_of(chosen, **shape) <= budget
    assert min(64, columns) <= chosen.chunk_columns <= columns
    assert chosen.block_rows >= 1


@pytest.mark.parametrize("hidden", [1024, 4096])
def test_by_default_less_than_an_eighth_of_the_logits(hidden):
    chosen = plan(hidden=hidden)
    taken = bytes_of(chosen, tokens=2048, hidden=hidden, dtype=torch.bfloat16)
    assert taken <= 2048 * QWEN_VOCAB * 2 // 10
    assert chosen.chunk_columns >= 1024


def test_the_error_names_a_budget_that_is_enough():
    with pytest.raises(ConfigError, match=r"memory_budget 1000 bytes is below the (\d+) that 2048 tokens") as caught:
        plan(1000)
    assert plan(int(str(caught.value).split()[6])).chunk_columns >= 64


def test_more_memory_gives_larger_chunks_up_to_what_is_useful():
    widths = [plan(budget << 20).chunk_columns for budget in (18, 24, 4000)]
    assert widths == sorted(set(widths))
    assert widths[-1] == plan(8000 << 20).chunk_columns < QWEN_VOCAB
