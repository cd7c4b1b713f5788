import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import linear_log_probs_and_entropy, log_probs_and_entropy
from slime_core.ops.log_probs import RowStatistics, SoftmaxRows, VocabShard, check_temperature


def by_the_definition(logits, targets, temperature, vocab_size):
    """Softmax, log-prob and entropy of each row, number by number in float64."""
    log_probs, entropies = [], []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        scaled = [value / temperature for value in row[:vocab_size]]
        top = max(scaled)
        total = math.fsum(math.exp(value - top) for value in scaled)
        log_p = [value - top - math.log(total) for value in scaled]
        log_probs.append(log_p[target])
        entropies.append(-math.fsum(math.exp(lp) * lp for lp in log_p))
    return log_probs, entropies


@given(
    tokens=st.integers(0, 7),
    vocab=st.integers(1, 9),
    padding=st.integers(0, 3),
    chunk=st.none() | st.integers(1, 8),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    scale=st.sampled_from([0.1, 3.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_definition(tokens, vocab, padding, chunk, temperature, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab + padding, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    log_probs, entropy = log_probs_and_entropy(
        logits, targets, temperature=temperature, vocab_size=vocab, with_entropy=True, chunk_size=chunk
    )
    expected = by_the_definition(logits, targets, temperature, vocab)
    assert log_probs.tolist() == pytest.approx(expected[0], rel=1e-12, abs=1e-12)
    assert entropy.tolist() == pytest.approx(expected[1], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("chunk", [1, 2, None])
@pytest.mark.parametrize("output", ["log_probs", "entropy", "both"])
def test_gradcheck(chunk, output):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2])

    def function(values):
        outputs = log_probs_and_entropy(
            values, targets, temperature=0.7, vocab_size=5, with_entropy=True, chunk_size=chunk
        )
        return {"log_probs": outputs[0], "entropy": outputs[1], "both": outputs}[output]

    assert torch.autograd.gradcheck(function, (logits,))


def test_padding_has_no_probability_and_no_gradient():
    logits = torch.zeros(2, 6, requires_grad=True)
    with torch.no_grad():
        logits[:, 4:] = 1e4
    log_probs, _ = log_probs_and_entropy(logits, torch.tensor([0, 3]), vocab_size=4)
    assert log_probs.tolist() == pytest.approx([-math.log(4)] * 2)
    log_probs.sum().backward()
    assert logits.grad[:, 4:].abs().max() == 0
    assert logits.grad[0].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 0])


def test_bf16_logits_are_summed_in_fp32():
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(5, 4000, generator=generator)
    targets = torch.randint(0, 4000, (5,), generator=generator)
    rounded = exact.bfloat16().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(rounded, targets, with_entropy=True, chunk_size=2)
    reference = rounded.detach().double().requires_grad_()
    expected = torch.log_softmax(reference, -1)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected[range(5), targets].float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).float(), rtol=0, atol=5e-6)
    log_probs.sum().backward()
    expected[range(5), targets].sum().backward()
    assert rounded.grad.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.grad.double(), reference.grad, rtol=2**-8, atol=1e-9)


def test_extreme_and_forbidden_tokens_bring_no_nan():
    logits = torch.tensor([[3e4, -3e4, 0.0], [0.0, -torch.inf, 1.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1, 2]), with_entropy=True)
    assert log_probs.tolist() == pytest.approx([-6e4, -math.log(1 + math.exp(-1))])
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()


def test_only_the_logits_themselves_are_kept_for_backward():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        logits = torch.randn(64, 100, dtype=torch.bfloat16).requires_grad_()
        log_probs_and_entropy(logits, torch.zeros(64, dtype=torch.long), with_entropy=True)
    large = [tensor for tensor in kept if tensor.numel() > 64]
    assert {tensor.data_ptr() for tensor in large} == {logits.data_ptr()}


def test_fp32_copies_are_of_a_chunk_at_a_time(peak_bytes):
    """Forward, and backward over the logits: nothing of the whole, which would take 32 MiB in fp32."""
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(1024, 8192, generator=generator).bfloat16().requires_grad_()
    logits, targets = states * 1.0, torch.zeros(1024, dtype=torch.long)

    def run():
        log_probs, entropy = log_probs_and_entropy(logits, targets, with_entropy=True, overwrite_logits=True)
        torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)

    assert peak_bytes(run) < 8 * 2**20


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_token_ids_of_any_integer_type(dtype):
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 6, 3])
    expected, _ = log_probs_and_entropy(logits, targets)
    assert log_probs_and_entropy(logits, targets.to(dtype))[0].equal(expected)


def test_without_entropy_there_is_none():
    assert log_probs_and_entropy(torch.zeros(1, 2), torch.tensor([1]))[1] is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be above 0"),
        ({"temperature": math.nan}, "temperature nan must be above 0"),
        ({"chunk_size": 0}, "chunk_size 0 must be 1 or more"),
        ({"vocab_size": 9}, "vocab_size 9 must be between 1 and the 4 columns"),
    ],
)
def test_bad_settings(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        log_probs_and_entropy(torch.zeros(2, 4), torch.tensor([0, 1]), **kwargs)


def test_bad_data():
    with pytest.raises(DataError, match=r"got \[2, 4\] and \[3\]"):
        log_probs_and_entropy(torch.zeros(2, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(DataError, match="token id 3 is outside the vocabulary of 3"):
        log_probs_and_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), vocab_size=3)


@pytest.mark.parametrize("name", ["even", "padded", "empty second shard", "bf16", "masked shard"])
def test_split_by_vocabulary_equals_whole(vocab_parallel_ranks, name):
    """Two ranks give the log-probs, entropies and, side by side, the gradients of one."""
    first, second = (results["logits"][name] for results in vocab_parallel_ranks)
    whole = first["logits"].detach().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        whole, first["targets"], temperature=first["temperature"], vocab_size=first["vocab_size"], with_entropy=True
    )
    (log_probs @ first["upstream"] + entropy @ first["upstream"].flip(0)).backward()
    tolerance = 1e-12 if whole.dtype == torch.float64 else 2e-6
    for rank in (first, second):
        torch.testing.assert_close(rank["log_probs"], log_probs.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rank["entropy"], entropy.detach(), rtol=tolerance, atol=tolerance)
    joined = torch.cat([first["grad"], second["grad"]], dim=1)
    one_ulp = 2**-8 if whole.dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(joined, whole.grad, rtol=one_ulp, atol=tolerance)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_may_take_the_place_of_the_logits(dtype, with_entropy):
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(6, 4, generator=generator), torch.randn(4, 30, generator=generator)
    targets = torch.randint(0, 28, (6,), generator=generator)
    outcomes = []
    for overwrite in (False, True):
        leaf = weight.to(dtype).requires_grad_()
        logits = hidden.to(dtype) @ leaf
        log_probs, entropy = log_probs_and_entropy(
            logits, targets, temperature=0.7, vocab_size=28, with_entropy=with_entropy, chunk_size=4,
            overwrite_logits=overwrite,
        )  # fmt: skip
        total = log_probs.sum() + (entropy.square().sum() if with_entropy else 0)
        (grad_logits,) = torch.autograd.grad(total, logits, retain_graph=True)
        assert (grad_logits.data_ptr() == logits.data_ptr()) is overwrite
        if overwrite:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()
            logits = hidden.to(dtype) @ leaf
            log_probs, entropy = log_probs_and_entropy(
                logits, targets, temperature=0.7, vocab_size=28, with_entropy=with_entropy, chunk_size=4,
                overwrite_logits=True,
            )  # fmt: skip
            total = log_probs.sum() + (entropy.square().sum() if with_entropy else 0)
        total.backward()
        outcomes.append((total, grad_logits.clone(), leaf.grad))
    for ours, expected in zip(*outcomes, strict=True):
        assert torch.equal(ours, expected)


def test_a_leafs_values_are_not_overwritten():
    leaf, targets = torch.randn(2, 5).requires_grad_(), torch.tensor([0, 1])
    with pytest.raises(DataError, match="overwrite_logits would write the gradient of a leaf tensor over its values"):
        log_probs_and_entropy(leaf, targets, overwrite_logits=True)
    log_probs_and_entropy(leaf.detach(), targets, overwrite_logits=True)  # no backward pass, nothing to overwrite


@pytest.mark.parametrize("linear", [False, True])
def test_ignored_targets_have_no_log_prob_and_no_gradient(linear):
    """Labels of −100, as for cross-entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 3, generator=generator), torch.randn(9, 3, generator=generator)
    targets = torch.tensor([2, -100, 8, -100])
    hidden.requires_grad_()

    def log_probs(rows, ids):
        if linear:
            return linear_log_probs_and_entropy(rows, weight, ids, with_entropy=True)
        return log_probs_and_entropy(rows @ weight.T, ids, with_entropy=True)

    found, entropy = log_probs(hidden, targets)
    expected, expected_entropy = log_probs(hidden, targets.clamp(min=0))
    assert found[[1, 3]].tolist() == [0, 0]
    assert found[[0, 2]].equal(expected[[0, 2]])
    assert entropy.equal(expected_entropy)
    (grad,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
    assert not grad[[1, 3]].any()
    assert grad[[0, 2]].equal(torch.autograd.grad(expected[[0, 2]].sum(), hidden)[0][[0, 2]])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.timeout(300)
def test_compiles_as_one_graph(linear, backend):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 3, generator=generator), torch.randn(9, 3, generator=generator)
    targets = torch.randint(0, 9, (6,), generator=generator)
    hidden.requires_grad_()

    def loss_of(rows):
        if linear:
            log_probs, entropy = linear_log_probs_and_entropy(rows, weight, targets, with_entropy=True)
        else:
            log_probs, entropy = log_probs_and_entropy(rows @ weight.T, targets, with_entropy=True)
        return log_probs.sum() + 0.1 * entropy.sum()

    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    loss, expected = compiled(hidden), loss_of(hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(expected, hidden)[0])


def rows_of(logits, targets, first=0, *, block_rows=2):
    return SoftmaxRows(logits, targets - first, logits.shape[1], 1.0, block_rows)


@given(
    cuts=st.lists(st.integers(0, 12), max_size=4),
    scale=st.sampled_from([0.1, 30.0, 1e4]),
    seed=st.integers(0, 2**16),
    with_entropy=st.booleans(),
)
def test_parts_merge_into_the_whole_in_any_order(cuts, scale, seed, with_entropy):
    """RowStatistics of any pieces of the columns, some of them empty or all −inf, are those of one row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 12, generator=generator, dtype=torch.float64) * scale
    logits[0, :6] = -torch.inf
    targets = torch.tensor([7, 0, 11, 5, 6])
    edges = [0, *sorted(cuts), 12]
    pieces = [
        rows_of(logits[:, start:stop], targets, start).statistics(with_entropy=with_entropy)
        for start, stop in itertools.pairwise(edges)
    ]
    order = torch.randperm(len(pieces), generator=generator).tolist()
    merged = RowStatistics.of_nothing(torch.zeros(5, dtype=torch.bool), torch.float64, with_entropy=with_entropy)
    for index in order:
        merged = merged.merge(pieces[index])
    log_p = torch.log_softmax(logits, -1)
    log_probs, entropy, lse = merged.results()
    assert merged.seen.all()
    torch.testing.assert_close(log_probs, log_p[range(5), targets], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-12, atol=1e-12)
    if with_entropy:
        expected = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
        torch.testing.assert_close(entropy, expected, rtol=1e-9, atol=1e-9)
    else:
        assert entropy is None


def test_gradient_may_be_written_over_the_logits():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 6, 3, 3, 1])
    _, entropy, lse = rows_of(logits, targets).statistics(with_entropy=True).results()
    grad, grad_entropy = torch.linspace(-1, 1, 5), torch.linspace(2, 3, 5)
    apart = torch.empty_like(logits)
    rows_of(logits, targets).write_gradient(apart, grad, grad_entropy, lse, entropy)
    rows_of(logits, targets).write_gradient(logits, grad, grad_entropy, lse, entropy)
    assert apart.equal(logits)


@pytest.mark.parametrize("block_rows", [1, 3, 100])
def test_bias_and_temperature(block_rows):
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    rows = SoftmaxRows(logits, torch.tensor([0, 0, 1]), 2, 0.5, block_rows, bias=torch.tensor([1.0, 0.0]))
    log_probs, _, _ = rows.statistics(with_entropy=False).results()
    expected = [-math.log(2), -math.log1p(math.exp(-6)), -2 - math.log1p(math.exp(-2))]
    assert log_probs.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("columns", "vocab_size", "expected"), [(8, None, (8, 8)), (8, 5, (5, 5)), (8, 8, (8, 8))])
def test_without_a_group(columns, vocab_size, expected):
    shard = VocabShard.of(columns, None, vocab_size)
    assert (shard.first, shard.columns, shard.vocab_size) == (0, *expected)


@pytest.mark.parametrize("vocab_size", [0, 9])
def test_vocabulary_that_does_not_fit(vocab_size):
    with pytest.raises(ConfigError, match=rf"vocab_size {vocab_size} must be between 1 and the 8 columns"):
        VocabShard.of(8, None, vocab_size)


def test_targets():
    shard = VocabShard.of(8, None, 5)
    shard.check(torch.tensor([0, 4, -100]))
    for outside in (-1, 5, 7):
        with pytest.raises(DataError, match=f"token id {outside} is outside the vocabulary of 5"):
            shard.check(torch.tensor([0, outside]))
    completed = shard.complete(torch.ones(4), torch.tensor([4, 5, -1, -100]))
    torch.testing.assert_close(completed, torch.tensor([1, torch.nan, torch.nan, 0]), equal_nan=True)


def test_temperature():
    check_temperature(1e-3)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="must be above 0"):
            check_temperature(temperature)
