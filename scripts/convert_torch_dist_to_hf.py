"""Megatron `torch_dist` → Hugging Face directory (`--input-dir --output-dir --origin-hf-dir`)."""

from slime_convert.cli import run_script

run_script("torch-dist-to-hf")
