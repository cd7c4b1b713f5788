# Shape flags of Qwen2.5-32B-Instruct (norm epsilon 1e-6; the base model's is 1e-5). Source it, then pass "${MODEL_ARGS[@]}".
MODEL_ARGS=(
    --swiglu
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 152064
    --max-position-embeddings 32768
    --rotary-base 1000000
    --norm-epsilon 1e-06
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --group-query-attention
    --use-rotary-position-embeddings
    --normalization RMSNorm
    --disable-bias-linear
)
