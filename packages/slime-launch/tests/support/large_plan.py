"""A run of a large model, whose plan several files of tests look at."""

RUN = """
hf-checkpoint = "Qwen/Qwen3-30B-A3B"
num-rollout = 300
rollout-batch-size = 32
n-samples-per-prompt = 8
rollout-max-response-len = 8192
rollout-max-prompt-len = 2048
rm-type = "math"
save = "save"
save-interval = 100
actor-num-nodes = 2
actor-num-gpus-per-node = 8
colocate = true
tensor-model-parallel-size = 4
sequence-parallel = true
expert-model-parallel-size = 8
expert-tensor-parallel-size = 1
recompute-granularity = "full"
recompute-method = "uniform"
recompute-num-layers = 1
use-dynamic-batch-size = true
max-tokens-per-gpu = 20480
optimizer-cpu-offload = true
rollout-num-gpus-per-engine = 8
sglang-mem-fraction-static = 0.7
"""


LAYERS, HIDDEN, WIDTH, CHOSEN = 48, 2048, 768, 8
