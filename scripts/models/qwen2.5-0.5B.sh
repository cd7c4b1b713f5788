# Shape flags of Qwen2.5-0.5B and Qwen2.5-0.5B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --group-query-attention
    --num-query-groups 2
    --kv-channels 64
    --vocab-size 151936
    --max-position-embeddings 32768
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --disable-bias-linear
    --add-qkv-bias
)
