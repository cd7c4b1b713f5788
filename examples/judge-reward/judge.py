"""A reward that a judge gives: a second model of the run, or any server with OpenAI's chat API.

    --sglang-config engines.yaml with a model called `judge`   the judge is a model of this run
    JUDGE_URL=https://…/v1 JUDGE_MODEL=… JUDGE_KEY=…           the judge is a server elsewhere

The judge reads the prompt and the response and ends with `Grade: 7`; the reward is the grade over 10.
"""

from __future__ import annotations

import os
import re
from typing import Any

import aiohttp

from slime_rollout import auth_headers, get_model_url

INSTRUCTION = (
    "Grade the answer below with a whole number from 0 (useless) to 10 (excellent). Be strict: praise and promises in "
    "the answer are no reason for a better grade. Write the grade first, as in: Grade: 4\n\n"
    "The task: {task}\n\nThe answer: {answer}"
)
GRADE = re.compile(r"\b(10|\d)\b")


async def custom_rm(args: Any, sample: Any) -> float:
    """The judge's grade, from 0 to 1. What the judge wrote is kept in the sample's metadata."""
    task = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
    written = await ask(args, INSTRUCTION.format(task=task, answer=sample.response))
    sample.metadata["judge"] = written
    return grade(written)


def grade(written: str) -> float:
    """The first number from 0 to 10 in what the judge wrote, over 10; 0 without one."""
    found = GRADE.search(written)
    return int(found[1]) / 10 if found else 0.0


async def ask(args: Any, text: str) -> str:
    """The judge's reply. An error costs the group its place (--rm-on-failure), not the run."""
    if base := os.environ.get("JUDGE_URL"):
        url, headers = f"{base.rstrip('/')}/chat/completions", {}
        if key := os.environ.get("JUDGE_KEY"):
            headers["Authorization"] = f"Bearer {key}"
    else:
        url, headers = get_model_url(args, "judge", "/v1/chat/completions"), auth_headers(args)
    body = {
        "model": os.environ.get("JUDGE_MODEL", "judge"),
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if base:
        del body["chat_template_kwargs"]  # an extension of SGLang's
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as reply:
        reply.raise_for_status()
        return str((await reply.json())["choices"][0]["message"]["content"])
