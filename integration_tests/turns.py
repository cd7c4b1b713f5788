"""Generate functions: several turns with several samples of some trajectories and text alone; and a whole rollout."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from slime_core.types import Sample
from slime_rollout import Trajectory, get_model_url, post


async def custom_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Three turns; of every fourth trajectory a second sample, and of every fourth a text in place of them."""
    if sample.index % 4 == 1:
        sample.response = "12 + 3"
        return [sample]
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        await trajectory.generate(max_new_tokens=3)
        trajectory.observe(" + 4")
    return [sample, copy.deepcopy(sample)] if sample.index % 4 == 0 else [sample]


async def whole_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A whole rollout by plain requests: twice the prompts, of which every second one is given back."""
    if evaluation:
        return {"own": {"rewards": [float(rollout_id)], "truncated": [False]}}
    groups = data_source.get_samples(2 * args.rollout_batch_size)
    data_source.add_samples(groups[1::2])
    kept = groups[::2]
    await asyncio.gather(*(_answer(args, sample) for group in kept for sample in group))
    return kept


async def _answer(args: Any, sample: Sample) -> None:
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}
    params["sampling_seed"] = sample.index
    body = {"input_ids": sample.prompt_tokens, "sampling_params": params, "return_logprob": True}
    reply = await post(get_model_url(args), body)
    entries = reply["meta_info"]["output_token_logprobs"]
    version = int(reply["meta_info"]["weight_version"])
    tokens, log_probs = [token for _, token, _ in entries], [value for value, _, _ in entries]
    sample.append_response(tokens, log_probs=log_probs, weight_version=version)
    sample.status = Sample.Status.TRUNCATED
    sample.reward = sum(token % 8 == 0 for _, token, _ in entries) / len(entries)
