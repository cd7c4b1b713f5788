# Shape flags of Llama-3.1-8B and Llama-3.1-8B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 128256
    --max-position-embeddings 131072
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8
    --norm-epsilon 1e-05
    --untie-embeddings-and-output-weights
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
