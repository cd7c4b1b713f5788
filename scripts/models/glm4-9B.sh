# Shape flags of GLM-4-9B-0414 and GLM-Z1-9B-0414. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 40
    --hidden-size 4096
    --ffn-hidden-size 13696
    --num-attention-heads 32
    --num-query-groups 2
    --kv-channels 128
    --vocab-size 151552
    --max-position-embeddings 32768
    --rotary-base 10000
    --rotary-percent 0.5
    --rotary-interleaved
    --norm-epsilon 1e-05
    --add-qkv-bias
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --untie-embeddings-and-output-weights
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
