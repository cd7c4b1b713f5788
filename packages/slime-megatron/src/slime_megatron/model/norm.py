"""RMSNorm that Megatron's specs can build."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """x / √(mean(x²) + eps) · weight (Zhang and Sennrich, 2019, equation 4).

    Megatron-core's own wrapper refuses sequence parallelism; all that is missing there is the tag by which the
    weight's gradient is summed over the tensor-parallel ranks.

    Args:
        config: Megatron's transformer configuration.
        hidden_size: Channels that are normalised.
        eps: Term added under the root.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _device(config: Any) -> torch.device | None:
    return None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
