"""Architecture of Qwen/Qwen3-32B, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 64,
    "hidden-size": 5120,
    "ffn-hidden-size": 25600,
    "num-attention-heads": 64,
    "group-query-attention": True,
    "num-query-groups": 8,
    "kv-channels": 128,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-06,
    "position-embedding-type": "rope",
    "rotary-base": 1000000,
    "vocab-size": 151936,
    "untie-embeddings-and-output-weights": True,
    "qk-layernorm": True,
}
