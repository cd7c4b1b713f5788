"""``slime-convert list-models``: the published shapes as a table."""

from __future__ import annotations

from collections.abc import Sequence

from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape

_HEADER = ("script", "family", "layers", "hidden", "ffn", "heads", "groups", "experts", "vocab", "rope base", "models")


def model_table() -> str:
    """One line per published shape under a header, in columns; numbers are set to the right."""
    rows = [_HEADER, *(_row(name, entry.shape, entry.models) for name, entry in PUBLISHED.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _row(name: str, shape: ModelShape, models: str) -> tuple[str, ...]:
    numbers = (
        shape.num_layers,
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_attention_heads,
        "MLA" if shape.multi_latent_attention else shape.num_query_groups,
        "-" if shape.num_experts is None else f"{shape.moe_router_topk}/{shape.num_experts}",
        shape.vocab_size,
        int(shape.rotary_base),
    )
    return (name, shape.family, *map(str, numbers), models)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, family, *numbers, models = row
    cells = [first.ljust(widths[0]), family.ljust(widths[1])]
    cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=False)]
    return "  ".join([*cells, models])
