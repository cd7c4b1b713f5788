# Shape flags of Meta-Llama-3-70B and Meta-Llama-3-70B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 128256
    --max-position-embeddings 8192
    --rotary-base 500000
    --norm-epsilon 1e-05
    --untie-embeddings-and-output-weights
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
