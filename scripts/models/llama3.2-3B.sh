# Shape flags of Llama-3.2-3B and Llama-3.2-3B-Instruct (rotary scaling by 32, not by Llama 3.1's 8). Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 3072
    --ffn-hidden-size 8192
    --num-attention-heads 24
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 128256
    --max-position-embeddings 131072
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 32
    --norm-epsilon 1e-05
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
