"""Hugging Face directory → Megatron `torch_dist` (`--hf-checkpoint --save`)."""

from slime_convert.cli import run_script

run_script("hf-to-torch-dist")
