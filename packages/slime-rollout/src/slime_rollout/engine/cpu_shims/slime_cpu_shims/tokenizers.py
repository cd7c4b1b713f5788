"""One tokenizer for all processes of a server: it is read before they are forked, and not by each of them, twice."""

import copy

_KNOWN = {}


def once(original, name, *args, **kwargs):
    """Around SGLang's ``get_tokenizer``: what was read for the same arguments."""
    key = name, args, tuple(sorted(kwargs.items()))
    try:
        known = _KNOWN.get(key)
    except TypeError:  # an argument that has no hash
        return original(name, *args, **kwargs)
    if known is None:
        known = _KNOWN[key] = original(name, *args, **copy.copy(kwargs))
    return known


def read_ahead(*_args, **_kwargs):
    """Before the scheduler is forked: read the tokenizer that all processes of a text model's server ask for."""
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers import tokenizer

    serving, model = get_serving(), get_model()
    if not serving.skip_tokenizer_init:
        tokenizer.get_tokenizer(
            serving.tokenizer_path,
            tokenizer_mode=serving.tokenizer_mode,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            tokenizer_backend=serving.tokenizer_backend,
        )
