"""Architecture of Qwen/Qwen3-4B, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 36,
    "hidden-size": 2560,
    "ffn-hidden-size": 9728,
    "num-attention-heads": 32,
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
    "qk-layernorm": True,
}
