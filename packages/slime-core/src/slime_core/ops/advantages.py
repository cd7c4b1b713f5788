"""From rewards to one advantage per response token. R is the number of response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_core.errors import DataError


def grpo_advantages(
    reward: float,
    response_length: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Every token of a response has the response's group-relative reward (GRPO; Shao et al. 2024, section 4.1.2).

    Args:
        reward: The reward after :func:`slime_core.rewards.normalize_group_rewards`.
        response_length: R, 0 or more.
        dtype: Type of the result.
        device: Device of the result.

    Returns:
        Advantages [R].

    Raises:
        DataError: ``response_length`` is negative.
    """
    if response_length < 0:
        raise DataError(f"response_length {response_length} is negative; give the number of response tokens")
    return torch.full((response_length,), reward, dtype=dtype, device=device)
