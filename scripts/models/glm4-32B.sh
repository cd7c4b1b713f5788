# Shape flags of GLM-4-32B-0414, GLM-4-32B-Base-0414 and GLM-Z1-32B-0414. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 61
    --hidden-size 6144
    --ffn-hidden-size 23040
    --num-attention-heads 48
    --num-query-groups 2
    --kv-channels 128
    --vocab-size 151552
    --max-position-embeddings 32768
    --rotary-base 10000
    --rotary-percent 0.5
    --rotary-interleaved
    --norm-epsilon 1e-05
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --untie-embeddings-and-output-weights
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
