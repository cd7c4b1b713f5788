"""How large chunks may be for log-probs from hidden states to stay within so many bytes."""

from __future__ import annotations

import dataclasses

import torch

from slime_core.errors import ConfigError
from slime_core.ops.softmax_rows import accumulation_dtype, block_elements

# Elements of a chunk beyond which matrix products gain nothing.
_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
# Columns of a chunk: below the first the products are too thin to be asked for, from the second on they run well.
_MIN_COLUMNS, _GOOD_COLUMNS = 64, 1024
_DEFAULT_FLOOR = 16 << 20
# fp32 and int64 numbers per token in use at a time: targets, masks, gradients, statistics of two chunks.
_BYTES_PER_TOKEN = 256


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Vocabulary ids per chunk, and rows of a chunk that the softmax handles at a time."""

    chunk_columns: int
    block_rows: int

    @classmethod
    def within(
        cls,
        budget: int | None,
        *,
        tokens: int,
        hidden: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        hidden_gradient: bool,
    ) -> ChunkPlan:
        """The largest useful chunks within a budget.

        What counts: a chunk of logits [tokens, chunk_columns] and a copy of the chunk's weight [chunk_columns, hidden]
        in ``dtype`` (libraries of matrix products pack such a copy for themselves); two buffers of the softmax in fp32
        (a quarter of what is left for both); and, where a gradient reaches 16-bit hidden states, its sum in fp32.

        Args:
            budget: Bytes. ``None`` means a tenth of the logits, which leaves libraries something of their own below an
                eighth; at least 16 MiB and what 1,024 columns need.
            tokens: Rows of the hidden states.
            hidden: Hidden size.
            columns: Vocabulary ids of this rank.
            dtype: Type of hidden states and weight.
            device: Where they are.
            hidden_gradient: Whether the hidden states need a gradient.

        Raises:
            ConfigError: Not even 64 columns fit.
        """
        wide = accumulation_dtype(dtype).itemsize
        fixed = tokens * _BYTES_PER_TOKEN
        if hidden_gradient and wide != dtype.itemsize:
            fixed += tokens * hidden * wide
        column_bytes = (max(tokens, 1) + hidden) * dtype.itemsize

        def needed(at_least: int) -> int:
            width = min(at_least, columns)
            return fixed + width * max(column_bytes * 4 // 3 + 1, 4 * 2 * wide)

        if budget is None:
            budget = max(columns * tokens * dtype.itemsize // 10, needed(_GOOD_COLUMNS), _DEFAULT_FLOOR)
        if budget < needed(_MIN_COLUMNS):
            raise ConfigError(
                f"memory_budget {budget} bytes is below the {needed(_MIN_COLUMNS)} that {tokens} tokens of hidden size "
                f"{hidden} need; raise it, or give fewer tokens at a time"
            )
        free = budget - fixed
        elements = min(block_elements(device), free // 4 // (2 * wide))
        cap = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"]) // max(tokens, 1)
        chunk_columns = min(columns, elements, max(cap, _GOOD_COLUMNS), (free - elements * 2 * wide) // column_bytes)
        return cls(chunk_columns, max(1, elements // max(chunk_columns, 1)))
