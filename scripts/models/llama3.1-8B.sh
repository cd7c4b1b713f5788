# Shape flags of Llama-3.1-8B and Llama-3.1-8B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
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
    --max-position-embeddings 131072
    --use-rotary-position-embeddings
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
