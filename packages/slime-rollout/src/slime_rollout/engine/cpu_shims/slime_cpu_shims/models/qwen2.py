"""Only this family."""

from sglang.srt.models.qwen2 import EntryClass

__all__ = ["EntryClass"]
