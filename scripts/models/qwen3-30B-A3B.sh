# Shape flags of Qwen3-30B-A3B and Qwen3-30B-A3B-Base. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --num-query-groups 4
    --kv-channels 128
    --vocab-size 151936
    --max-position-embeddings 40960
    --rotary-base 1000000
    --norm-epsilon 1e-06
    --qk-layernorm
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-router-score-function softmax
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
