"""The model classes that SGLang finds here."""

from sglang.srt.models import llama, qwen2, qwen3


def _classes(module):
    return module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]


EntryClass = [entry for module in (llama, qwen2, qwen3) for entry in _classes(module)]
