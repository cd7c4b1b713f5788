# Shape flags of Qwen3-4B and Qwen3-4B-Base. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 36
    --hidden-size 2560
    --ffn-hidden-size 9728
    --num-attention-heads 32
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
