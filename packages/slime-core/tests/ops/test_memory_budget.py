import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError
from slime_core.ops.linear_log_probs import ChunkPlan

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
