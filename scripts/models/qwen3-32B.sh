# Shape flags of Qwen3-32B. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 25600
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151936
    --max-position-embeddings 40960
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --disable-bias-linear
    --qk-layernorm
    --untie-embeddings-and-output-weights
)
