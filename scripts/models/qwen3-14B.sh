# Shape flags of Qwen3-14B and Qwen3-14B-Base. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 40
    --hidden-size 5120
    --ffn-hidden-size 17408
    --num-attention-heads 40
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
