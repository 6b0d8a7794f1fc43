"""What the ``config.json`` files of released models say, as far as it concerns the architecture."""

from typing import Any

_QWEN2_5 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def _llama3_scaling(factor: float) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "factor": factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        }
    }


def _sizes(
    layers: int, hidden: int, mlp: int, heads: int, groups: int, tied: bool
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": tied,
    }


PUBLIC: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5B": {**_QWEN2_5, **_sizes(24, 896, 4864, 14, 2, True), "vocab_size": 151936},
    "qwen2.5-1.5B": {**_QWEN2_5, **_sizes(28, 1536, 8960, 12, 2, True), "vocab_size": 151936},
    "qwen2.5-3B": {**_QWEN2_5, **_sizes(36, 2048, 11008, 16, 2, True), "vocab_size": 151936},
    "qwen2.5-7B": {**_QWEN2_5, **_sizes(28, 3584, 18944, 28, 4, False), "vocab_size": 152064},
    "qwen2.5-14B": {**_QWEN2_5, **_sizes(48, 5120, 13824, 40, 8, False), "vocab_size": 152064},
    "qwen2.5-32B": {**_QWEN2_5, **_sizes(64, 5120, 27648, 40, 8, False), "vocab_size": 152064},
    "qwen2.5-72B": {**_QWEN2_5, **_sizes(80, 8192, 29568, 64, 8, False), "vocab_size": 152064},
    "qwen3-0.6B": {**_QWEN3, **_sizes(28, 1024, 3072, 16, 8, True)},
    "qwen3-1.7B": {**_QWEN3, **_sizes(28, 2048, 6144, 16, 8, True)},
    "qwen3-4B": {**_QWEN3, **_sizes(36, 2560, 9728, 32, 8, True)},
    "qwen3-8B": {**_QWEN3, **_sizes(36, 4096, 12288, 32, 8, False)},
    "qwen3-14B": {**_QWEN3, **_sizes(40, 5120, 17408, 40, 8, False)},
    "qwen3-32B": {**_QWEN3, **_sizes(64, 5120, 25600, 64, 8, False)},
    "qwen3-30B-A3B": {
        **_QWEN3_MOE,
        **_sizes(48, 2048, 6144, 32, 4, False),
        "moe_intermediate_size": 768,
    },
    "qwen3-235B-A22B": {
        **_QWEN3_MOE,
        **_sizes(94, 4096, 12288, 64, 4, False),
        "moe_intermediate_size": 1536,
    },
    "llama3.1-8B": {
        **_LLAMA3,
        **_sizes(32, 4096, 14336, 32, 8, False),
        **_llama3_scaling(8.0),
    },
    "llama3.1-70B": {
        **_LLAMA3,
        **_sizes(80, 8192, 28672, 64, 8, False),
        **_llama3_scaling(8.0),
    },
    "llama3.2-1B": {
        **_LLAMA3,
        **_sizes(16, 2048, 8192, 32, 8, True),
        **_llama3_scaling(32.0),
        "head_dim": 64,
    },
    "llama3.2-3B": {
        **_LLAMA3,
        **_sizes(28, 3072, 8192, 24, 8, True),
        **_llama3_scaling(32.0),
        "head_dim": 128,
    },
    # The text model: transformers' defaults for the family are of this size.
    "qwen3.5-9B": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            **_sizes(32, 4096, 12288, 16, 4, False),
            "head_dim": 256,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-06,
            "vocab_size": 248320,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
        },
    },
}
