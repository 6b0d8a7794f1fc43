"""Architecture of meta-llama/Llama-3.2-3B, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 28,
    "hidden-size": 3072,
    "ffn-hidden-size": 8192,
    "num-attention-heads": 24,
    "group-query-attention": True,
    "num-query-groups": 8,
    "kv-channels": 128,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-05,
    "position-embedding-type": "rope",
    "rotary-base": 500000,
    "use-rope-scaling": True,
    "rope-scaling-factor": 32.0,
    "vocab-size": 128256,
}
