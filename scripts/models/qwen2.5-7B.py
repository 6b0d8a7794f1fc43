"""Architecture of Qwen/Qwen2.5-7B-Instruct, as Megatron flags."""

MODEL_ARGS = {
    "num-layers": 28,
    "hidden-size": 3584,
    "ffn-hidden-size": 18944,
    "num-attention-heads": 28,
    "group-query-attention": True,
    "num-query-groups": 4,
    "kv-channels": 128,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-06,
    "position-embedding-type": "rope",
    "rotary-base": 1000000,
    "vocab-size": 152064,
    "untie-embeddings-and-output-weights": True,
    "add-qkv-bias": True,
}
