"""A model that searches, after Search-R1 (Jin et al. 2025): the generate function and the reward.

    python examples/search-r1/search_server.py --port 8000 &
    slime-launch train … --custom-generate-function-path examples/search-r1/search_r1.py \
        --custom-rm-path examples/search-r1/search_r1.py

The model writes ``<search>deepest lake</search>``, is shown what the search server finds between ``<information>`` and
``</information>``, and goes on, until it has written ``<answer>Lake Baikal</answer>`` or --max-turns is reached. Only
what it wrote itself is trained on. The server is at http://127.0.0.1:8000, or where SEARCH_R1_URL says.
"""

from __future__ import annotations

import asyncio
import os
import re
import string
from typing import Any

from slime_rollout import Trajectory, call_tool, current, post
from slime_rollout.errors import GenerationError

INSTRUCTION = (
    "Answer the question. Think between <think> and </think> first. If you lack knowledge, search for it with "
    "<search>words</search>; you are then shown what was found between <information> and </information>. Search as "
    "often as you like. Once you know, give the answer alone, as in <answer>Beijing</answer>. Question: "
)
SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TOP_K = 3
ATTEMPTS = 3


async def custom_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Turns of the model, with what was found between them."""
    sample.tokens = prompt_tokens(current().context.tokenizer, sample.prompt)
    sample.metadata["queries"] = []
    trajectory, said = Trajectory.start(sample), ""
    while not trajectory.done:
        turn = await trajectory.generate(stop=["</search>", "</answer>"])
        said += turn
        query = SEARCH.search(turn)
        if query is None:
            break
        sample.metadata["queries"].append(query[1].strip())
        found = await call_tool(search, query[1].strip())
        trajectory.observe(f"\n\n<information>{found}</information>\n\n")
    answers = ANSWER.findall(said)  # what documents say between these tags is not an answer
    sample.metadata["answer"] = answers[-1].strip() if answers else None
    return sample


async def custom_rm(args: Any, sample: Any) -> float:
    """1 if the answer is the label, apart from case, punctuation and articles."""
    answer = sample.metadata.get("answer")
    return float(answer is not None and normalized(answer) == normalized(sample.label))


async def search(query: str) -> str:
    """What the server finds, as the model is shown it. A server that is restarted is asked again."""
    url = os.environ.get("SEARCH_R1_URL", "http://127.0.0.1:8000").rstrip("/") + "/retrieve"
    for attempt in range(ATTEMPTS):
        try:
            found = await post(url, {"queries": [query[:1000]], "topk": TOP_K}, timeout=20)
            return documents_text([hit["document"] for hit in found["result"][0]])
        except GenerationError:
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep(2**attempt)
    raise AssertionError("unreachable")


def documents_text(documents: list[dict[str, str]]) -> str:
    """Documents, numbered, each with its title."""
    texts = []
    for number, document in enumerate(documents, 1):
        title, _, text = document["contents"].partition("\n")
        texts.append(f"Doc {number} (Title: {title}) {text}")
    return "\n".join(texts) or "Nothing was found."


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """The question with the instruction before it, as a user's message where the model has a chat template."""
    text = INSTRUCTION + question
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    message = {"role": "user", "content": text}
    return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"])


def normalized(text: str) -> str:
    """An answer for comparison, as SQuAD's evaluation does it."""
    plain = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))
