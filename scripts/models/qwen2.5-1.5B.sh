# Shape flags of Qwen2.5-1.5B and Qwen2.5-1.5B-Instruct (rotary base 1000000; Qwen2.5-Math-1.5B's is 10000). Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
    --num-query-groups 2
    --kv-channels 128
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
