"""Architecture of Qwen/Qwen2.5-0.5B-Instruct, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 24,
    "hidden-size": 896,
    "ffn-hidden-size": 4864,
    "num-attention-heads": 14,
    "group-query-attention": True,
    "num-query-groups": 2,
    "kv-channels": 64,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-06,
    "position-embedding-type": "rope",
    "rotary-base": 1000000,
    "vocab-size": 151936,
    "add-qkv-bias": True,
}
