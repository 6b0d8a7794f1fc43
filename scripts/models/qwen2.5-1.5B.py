"""Architecture of Qwen/Qwen2.5-1.5B-Instruct, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 28,
    "hidden-size": 1536,
    "ffn-hidden-size": 8960,
    "num-attention-heads": 12,
    "group-query-attention": True,
    "num-query-groups": 2,
    "kv-channels": 128,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-06,
    "position-embedding-type": "rope",
    "rotary-base": 1000000,
    "vocab-size": 151936,
    "add-qkv-bias": True,
}
