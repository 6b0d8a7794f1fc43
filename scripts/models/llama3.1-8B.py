"""Architecture of meta-llama/Llama-3.1-8B, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 32,
    "hidden-size": 4096,
    "ffn-hidden-size": 14336,
    "num-attention-heads": 32,
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
    "rope-scaling-factor": 8.0,
    "vocab-size": 128256,
    "untie-embeddings-and-output-weights": True,
}
