# Shape flags of Qwen2.5-3B and Qwen2.5-3B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
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
