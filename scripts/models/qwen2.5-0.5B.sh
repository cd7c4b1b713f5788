# Shape flags of Qwen2.5-0.5B and Qwen2.5-0.5B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --num-query-groups 2
    --kv-channels 64
    --vocab-size 151936
    --max-position-embeddings 32768
    --rotary-base 1000000
    --norm-epsilon 1e-06
    --add-qkv-bias
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
