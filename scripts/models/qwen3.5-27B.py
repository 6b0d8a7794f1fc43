"""Architecture of Qwen/Qwen3.5-27B, as Megatron flags."""

MODEL_ARGS = {
    "spec": "miles_plugins.models.qwen3_5 get_qwen3_5_spec",
    "num-layers": 64,
    "hidden-size": 5120,
    "ffn-hidden-size": 17408,
    "num-attention-heads": 24,
    "group-query-attention": True,
    "num-query-groups": 4,
    "kv-channels": 256,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-06,
    "position-embedding-type": "rope",
    "rotary-base": 10000000,
    "vocab-size": 248320,
    "untie-embeddings-and-output-weights": True,
    "qk-layernorm": True,
    "rotary-percent": 0.25,
    "apply-layernorm-1p": True,
    "attention-output-gate": True,
}
