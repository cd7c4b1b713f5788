"""The checkpoint formats: how each is read and written, and which of them a path holds."""

from slime_convert.formats.known import FORMATS, GGUF, HF, LEGACY, TORCH_DIST, Checkpoint, detect, open_checkpoint

__all__ = ["FORMATS", "GGUF", "HF", "LEGACY", "TORCH_DIST", "Checkpoint", "detect", "open_checkpoint"]
