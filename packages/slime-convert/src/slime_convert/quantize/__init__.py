"""FP8 and INT4 checkpoints, made and read on a CPU.

``quantize.convert`` converts whole directories, ``quantize.fp8`` and ``quantize.int4`` single weights,
``quantize.reader`` reads a quantized directory as if it were none, ``quantize.formats`` is its ``quantization_config``
and ``quantize.choice`` says which weights are quantized.
"""
