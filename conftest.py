"""Fewer random examples where `scripts/test` asks for them; `--full`, and pytest alone, take hypothesis' own number."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("few", settings.get_profile("ci"), max_examples=10)
