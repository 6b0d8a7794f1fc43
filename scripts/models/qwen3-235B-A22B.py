"""Architecture of Qwen/Qwen3-235B-A22B, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 94,
    "hidden-size": 4096,
    "ffn-hidden-size": 12288,
    "num-attention-heads": 64,
    "group-query-attention": True,
    "num-query-groups": 4,
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
    "num-experts": 128,
    "moe-ffn-hidden-size": 1536,
    "moe-router-topk": 8,
}
