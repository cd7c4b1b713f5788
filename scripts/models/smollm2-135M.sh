# Shape flags of SmolLM2-135M and SmolLM2-135M-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 30
    --hidden-size 576
    --ffn-hidden-size 1536
    --num-attention-heads 9
    --num-query-groups 3
    --kv-channels 64
    --vocab-size 49152
    --max-position-embeddings 8192
    --rotary-base 100000
    --norm-epsilon 1e-05
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
