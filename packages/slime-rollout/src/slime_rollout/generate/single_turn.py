"""One prompt, one response."""

from __future__ import annotations

from slime_core.types import Sample
from slime_rollout.generate.client import EngineClient
from slime_rollout.generate.sampling import SamplingParams


async def generate_sample(client: EngineClient, sample: Sample, params: SamplingParams, seed: int) -> None:
    """Sample the response of a fresh sample and fill it in.

    Sets ``tokens``, ``response``, ``response_length``, ``rollout_log_probs``, ``weight_versions`` and ``status``.

    Args:
        client: Where to send the request.
        sample: A sample whose ``tokens`` are its prompt; a response it has already is thrown away.
        params: How to draw.
        seed: Seed of the request.

    Raises:
        GenerationError: See :meth:`EngineClient.generate`.
    """
    prompt = sample.prompt_tokens
    done = await client.generate(prompt, params.to_request(seed))
    sample.tokens = prompt + done.tokens
    sample.response = done.text
    sample.response_length = len(done.tokens)
    sample.loss_mask = None
    sample.rollout_log_probs = done.log_probs
    sample.weight_versions = done.weight_versions
    sample.status = done.status
    sample.reward = None
    sample.validate()
