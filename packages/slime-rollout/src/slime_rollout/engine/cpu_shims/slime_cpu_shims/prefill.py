"""Prompts that begin alike are not prefilled side by side: one of them goes first, the others take it from the cache.

SGLang looks a request up in its prefix cache when it puts it into a batch, so the samples of one prompt, and prompts
with one beginning, are each computed whole if they are in the first batch together. On a CPU those tokens are what
prefilling costs. A request that waits does so for one batch, in which another computes its beginning.
"""

# Tokens of a request that are not cached: of fewer, no other request's batch is worth waiting for.
FEWEST = 4


def add(original, adder, req, *args, **kwargs):
    """Around SGLang's ``PrefillAdder.add_one_req``: leaves a request that had better wait in the queue."""
    if not getattr(adder.tree_cache, "disable", True) and _gains_by_waiting(req, adder.can_run_list):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return original(adder, req, *args, **kwargs)


def _gains_by_waiting(req, batch):
    """Whether a request of the batch begins with what is cached of ``req`` and half of what is not, or more."""
    tokens, cached = req.full_untruncated_fill_ids, req.prefix_len
    new = len(tokens) - cached
    common = cached + (new + 1) // 2
    if new < FEWEST or common > _reusable(req) or req.positional_embed_overrides is not None:
        return False
    kind = req.extra_key, req.lora_id
    return any(
        (other.extra_key, other.lora_id) == kind and other.full_untruncated_fill_ids[:common] == tokens[:common]
        for other in batch
    )


def _reusable(req):
    """As many of a request's tokens as SGLang takes from its cache: none whose log-probs are asked for."""
    most = len(req.full_untruncated_fill_ids) - 1
    asked = req.return_logprob and req.logprob_start_len >= 0
    return min(most, req.logprob_start_len) if asked else most
