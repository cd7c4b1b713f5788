# Shape flags of Qwen3-0.6B and Qwen3-0.6B-Base. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 1024
    --ffn-hidden-size 3072
    --num-attention-heads 16
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151936
    --max-position-embeddings 40960
    --rotary-base 1000000
    --norm-epsilon 1e-06
    --qk-layernorm
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
