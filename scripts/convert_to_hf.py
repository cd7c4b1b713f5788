"""Any Megatron checkpoint → Hugging Face directory (`--load --output-dir --hf-checkpoint`)."""

from slime_convert.cli import run_script

run_script("megatron-to-hf")
