"""A reward that asks a second model, and notes which weights it and the response came from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout import get_model_url
from slime_rollout.http import call

ASK = {"max_new_tokens": 1, "temperature": 0.0}


async def judged(args: HookArgs, sample: Sample) -> float:
    """What the judge writes next decides; every third token is good."""
    tokens = [*sample.prompt_tokens, *sample.response_tokens]
    body = {"input_ids": tokens, "sampling_params": ASK}
    reply = await asyncio.to_thread(
        call, "POST", get_model_url(args, "judge", "/generate"), body, key=args.sglang_api_key
    )
    seen = {
        "judge": reply["meta_info"]["weight_version"],
        "response": sorted(set(sample.weight_versions)),
        "model": args.sglang_router_port != args.sglang_model_routers["judge"][1],
    }
    with (Path(args.output_dir) / "judged.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    return float(reply["output_ids"][0] % 3 == 0)
