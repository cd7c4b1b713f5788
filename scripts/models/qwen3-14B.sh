# Shape flags of Qwen3-14B and Qwen3-14B-Base. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 40
    --hidden-size 5120
    --ffn-hidden-size 17408
    --num-attention-heads 40
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151936
    --max-position-embeddings 40960
    --rotary-base 1000000
    --norm-epsilon 1e-06
    --qk-layernorm
    --untie-embeddings-and-output-weights
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
