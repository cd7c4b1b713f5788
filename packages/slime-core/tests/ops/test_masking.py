import pytest
import torch

from slime_core.errors import DataError
from slime_core.ops.tokens import masked, widen


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_at_least_fp32(given, wide):
    assert widen(torch.ones(2, dtype=given)).dtype == wide


def test_what_is_masked_is_zero_without_gradient():
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    for mask in (torch.tensor([1, 0, 0]), torch.tensor([0.25, 0.0, 0.0]), torch.tensor([True, False, False])):
        (clean,) = masked(mask, values=values)
        assert clean.tolist() == [1.0, 0.0, 0.0]
        assert torch.autograd.grad(clean.exp().sum(), values)[0].tolist() == [pytest.approx(2.718281828), 0.0, 0.0]


def test_shapes_must_agree():
    with pytest.raises(DataError, match=r"one shape.*: a \[3\], b \[3, 1\]$"):
        masked(None, a=torch.zeros(3), b=torch.zeros(3, 1))
    with pytest.raises(DataError, match=r"a \[3\], mask_T \[2\]"):
        masked(torch.ones(2), a=torch.zeros(3))
