"""One conversion, for `_conversions.measure`: `_convert.py WAY DIR DIR …`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from _conversions import serve

from slime_convert import hf_to_torch_dist, torch_dist_to_hf


def there_and_back(hf: str, torch_dist: str, back: str) -> None:
    """Hugging Face → torch_dist → Hugging Face."""
    hf_to_torch_dist(hf, torch_dist)
    torch_dist_to_hf(torch_dist, back, hf)


WAYS: dict[str, Callable[..., object]] = {
    "hf-to-torch-dist": hf_to_torch_dist,
    "torch-dist-to-hf": torch_dist_to_hf,
    "there-and-back": there_and_back,
}

if __name__ == "__main__":
    way, *places = sys.argv[1:]
    serve(lambda: WAYS[way](*places))
