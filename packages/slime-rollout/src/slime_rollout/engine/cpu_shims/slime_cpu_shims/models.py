"""Model families that start without importing all of SGLang's others. Any other family still loads: the slow way."""

from sglang.srt.models import llama, qwen2, qwen3


def _classes(module):
    return module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]


EntryClass = [entry for module in (llama, qwen2, qwen3) for entry in _classes(module)]
"""SGLang looks for this name in all modules of SGLANG_EXTERNAL_MODEL_PACKAGE."""
