"""Sampling from engines: token ids in, token ids with log-probs and weight versions out."""

from slime_rollout.data.ledger import by_trajectory
from slime_rollout.generate.client import EngineClient
from slime_rollout.generate.completion import Completion
from slime_rollout.generate.context import (
    GenerateGroup,
    GenerationContext,
    SamplingParams,
    generate_sample,
    sampling_seed,
    single_turn,
)
from slime_rollout.generate.custom import current, make_generate, number_parts
from slime_rollout.generate.trajectory import Trajectory, call_tool, generate_single
from slime_rollout.generate.turn_log import TurnLog

__all__ = [
    "Completion",
    "EngineClient",
    "GenerateGroup",
    "GenerationContext",
    "SamplingParams",
    "Trajectory",
    "TurnLog",
    "by_trajectory",
    "call_tool",
    "current",
    "generate_sample",
    "generate_single",
    "make_generate",
    "number_parts",
    "sampling_seed",
    "single_turn",
]
