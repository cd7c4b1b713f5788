# Shape flags of Meta-Llama-3-8B and Meta-Llama-3-8B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 128256
    --max-position-embeddings 8192
    --use-rotary-position-embeddings
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
