"""The train step on one rank. `slime_megatron.trainer.worker` is its entrance."""
