"""Architecture of Qwen/Qwen2.5-14B-Instruct, as Megatron flags.

The base model of this size has an epsilon of 1e-05.
"""

MODEL_ARGS = {
    "num-layers": 48,
    "hidden-size": 5120,
    "ffn-hidden-size": 13824,
    "num-attention-heads": 40,
    "group-query-attention": True,
    "num-query-groups": 8,
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
