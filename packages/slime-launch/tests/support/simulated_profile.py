"""Speeds of a run that is simulated."""

from slime_launch.plan.profile import EngineSpeed, Profile, TrainerSpeed

PROFILE = Profile(
    lengths=((0.0, 5), (0.9, 30), (1.0, 100)),
    engine=EngineSpeed(decode=((1, 30.0), (8, 100.0))),
    trainer=TrainerSpeed(gpus=1, token_seconds=0.05, send_seconds=0.1),
    notes=("engine.decode: a guess",),
)


COMMAND = (
    "--hf-checkpoint hf --load hf --prompt-data p --num-rollout 20 --rollout-batch-size 8 --n-samples-per-prompt 2 "
    "--actor-num-gpus-per-node 2 --rollout-num-gpus 2"
)


WORDS = COMMAND.split()
