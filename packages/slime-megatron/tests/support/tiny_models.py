"""The names of the tiny models, by how their layers are built."""

DENSE = ["llama-tied", "llama3-rope", "qwen2-tied", "qwen3", "glm", "glm4"]
EXPERTS = ["qwen3-moe", "glm4-moe", "glm4-moe-mtp", "glm4-air", "glm4-flash"]
LATENT = ["deepseek", "deepseek-mtp", "moonlight", "kimi-k2"]
