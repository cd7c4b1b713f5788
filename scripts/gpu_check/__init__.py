"""What the trainer computes on this machine's GPUs, checked against transformers and against itself, and its speed.

    scripts/gpu-check                       every check, on all GPUs
    scripts/gpu-check --only logits speed   some
    scripts/gpu-check --device cpu          what a CPU can show, on gloo: the program itself is tested so

Needs torch, numpy, Megatron-core, transformers, slime-core, slime-convert and slime-megatron in the `python3` on PATH
(or `$PYTHON`). Transformer Engine and slime-rollout are used if they are there, and what is missing is printed. Local
layers and shared prompts use PyTorch's own FlashAttention; the package flash-attn is used by Transformer Engine's
attention, if it is installed and Transformer Engine chooses it, and by nothing else.
Prints a table. Exits with 1 if anything differs, with 2 if there is no GPU.
"""
