"""What lets SGLang 0.5 run on a CPU without CUDA's packages: nothing of SGLang is edited or copied.

- ``stand_ins``: modules that SGLang imports but never calls on this path (Triton, sgl_kernel, parts of torchvision).
- ``plugin``: hooks registered through SGLang's own plugin mechanism, found by the entry point in the directory beside
  this one: reproducible sampling, attention of many short sequences at once, children that fork from the server.
- ``sampling``, ``attention``: the functions that the plugin puts in.
- ``models``: the model families that need no import of all the others, through SGLANG_EXTERNAL_MODEL_PACKAGE.
"""
