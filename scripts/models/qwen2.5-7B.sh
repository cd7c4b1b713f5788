# Shape flags of Qwen2.5-7B and Qwen2.5-7B-Instruct. Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --num-query-groups 4
    --kv-channels 128
    --vocab-size 152064
    --max-position-embeddings 131072
    --rotary-base 1000000
    --norm-epsilon 1e-06
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
