"""``slime-launch eval --help`` and ``sft --help``: the few flags of ``train`` that matter there."""

from __future__ import annotations

from slime_launch.flags import own_flags
from slime_launch.parser import FlagGroup, build_parser

_ALL = "Every other flag of `slime-launch train` may be given, too: `slime-launch train --help` lists them."
_PLACE = ("--config", "--output-dir", "--save", "--actor-num-nodes", "--actor-num-gpus-per-node")
_ENGINES = ("--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--sglang-python")
_DESCRIPTIONS = {
    "eval": """\
Score held-out prompts, and train nothing: as `slime-launch train --num-rollout 0`.

The model is --hf-checkpoint, in engines alone. With --load, trainers read that checkpoint and send its weights to the
engines first. The scores are printed, and written to --output-dir.""",
    "sft": """\
Train on conversations as they are: as `slime-launch train --loss-type sft_loss`. No engine is started.

Each row of --prompt-data is a list of messages under --input-key (`messages` unless given); what the assistant says is
trained on.""",
}
_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "eval": {
        "model": ("--hf-checkpoint", "--load"),
        "held-out sets": (
            *("--eval-prompt-data", "--eval-config", "--input-key", "--label-key", "--eval-input-key"),
            *("--eval-label-key", "--apply-chat-template", "--n-samples-per-eval-prompt", "--eval-temperature"),
            *("--eval-top-p", "--eval-top-k", "--eval-max-response-len", "--eval-max-prompt-len"),
        ),
        "scores": ("--rm-type", "--custom-rm-path", "--eval-reward-key", "--custom-generate-function-path"),
        "where": (*_ENGINES, *(name for name in _PLACE if name != "--save")),
    },
    "sft": {
        "model": ("--hf-checkpoint", "--load", "--lora-rank", "--lora-alpha"),
        "conversations": (
            *("--prompt-data", "--input-key", "--tool-key", "--loss-mask-type", "--rollout-shuffle", "--rollout-seed"),
            *("--on-bad-data",),
        ),
        "steps": (
            *("--num-rollout", "--num-epoch", "--rollout-batch-size", "--num-steps-per-rollout"),
            *("--global-batch-size", "--micro-batch-size", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "--lr"),
            *("--lr-decay-style", "--lr-warmup-iters", "--weight-decay", "--clip-grad", "--seed"),
        ),
        "where": (*_PLACE, "--save-interval", "--save-hf", "--tensor-model-parallel-size"),
    },
}


def print_help(name: str) -> None:
    """Print what ``slime-launch NAME --help`` says, of ``eval`` or ``sft``."""
    specs = own_flags()
    groups = [FlagGroup(title, tuple(specs[flag] for flag in flags)) for title, flags in _FLAGS[name].items()]
    build_parser(groups, prog=f"slime-launch {name}", description=_DESCRIPTIONS[name], epilog=_ALL).print_help()
