import pytest
import torch

from slime_core.errors import ConfigError, DataError
from slime_core.ops.log_probs import VocabShard, check_temperature


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
