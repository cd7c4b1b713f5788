"""Two agents that are one model: solvers answer a question, a critic reads their solutions and gives the final answer.

The agents are plain calls of the model with other prompts. Each call is a training sample of its own; together they are
one trajectory with one reward, that of the final answer.
"""

from __future__ import annotations

import asyncio
import copy
import re
from typing import Any

from slime_rollout import Trajectory, current

SOLVERS = 2
SOLVE = "Solve the problem step by step. End with a line such as: Answer: 42\n\n{question}"
CRITICIZE = (
    "Several people tried to solve the problem below. Say what is wrong with each solution, then give the right "
    "answer. End with a line such as: Answer: 42\n\n{question}\n\n{solutions}"
)
ANSWER = re.compile(r"Answer:\s*\$?(-?[\d,]*\.?\d+)")


async def custom_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """A sample for each solver, and one for the critic."""
    question, seed = sample.prompt, sampling_params["sampling_seed"]
    ask_solver = SOLVE.format(question=question)
    solvers = await asyncio.gather(*(act(sample, "solver", ask_solver, seed ^ n) for n in range(SOLVERS)))
    solutions = "\n\n".join(f"Solution {n}:\n{one.response.strip()}" for n, one in enumerate(solvers, 1))
    critic = await act(sample, "critic", CRITICIZE.format(question=question, solutions=solutions), seed ^ SOLVERS)
    parts = [*solvers, critic]
    for part in parts:
        part.metadata["final"] = critic.response
    return parts


async def act(sample: Any, agent: str, request: str, seed: int) -> Any:
    """One agent's turn, as a sample of its own. Each has a seed of its own, or equal prompts had equal responses."""
    part = copy.deepcopy(sample)
    part.prompt = [{"role": "user", "content": request}]
    part.tokens = prompt_tokens(current().context.tokenizer, part.prompt)
    part.metadata["agent"] = agent
    await Trajectory.start(part).generate(sampling_seed=seed)
    return part


def custom_rm(args: Any, sample: Any) -> float:
    """1 for all agents if the final answer is right; parts of one trajectory share a reward."""
    answers = ANSWER.findall(sample.metadata["final"])
    return float(bool(answers) and float(answers[-1].replace(",", "")) == float(sample.label))


def prompt_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The messages as the model's chat template writes them; without one, their text."""
    if not tokenizer.chat_template:
        return list(tokenizer(messages[0]["content"])["input_ids"])
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(rendered["input_ids"])
