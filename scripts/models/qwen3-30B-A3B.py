"""Architecture of Qwen/Qwen3-30B-A3B, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 48,
    "hidden-size": 2048,
    "ffn-hidden-size": 6144,
    "num-attention-heads": 32,
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
    "moe-ffn-hidden-size": 768,
    "moe-router-topk": 8,
}
