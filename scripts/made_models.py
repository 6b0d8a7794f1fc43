"""Small models made on the spot, with a real tokenizer: for the demo, the tests and benchmarks."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PAD, EOS, IM_START, IM_END = "<pad>", "<eos>", "<|im_start|>", "<|im_end|>"
ALPHABET = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ =+-*/().,:;?!'\"{}[]<>_\n"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_KEPT_IN_FP32 = (".linear_attn.A_log", ".linear_attn.norm.weight")


def make_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One token a character; ``<pad>`` is 0 and ``<eos>`` 1."""
    specials = [PAD, EOS, IM_START, IM_END]
    vocabulary = {token: i for i, token in enumerate([*specials, *dict.fromkeys(alphabet)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
    )


def make_qwen3(  # noqa: PLR0913
    path: str | Path,
    *,
    alphabet: str = ALPHABET,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised Qwen3 and its tokenizer to ``path`` and return it."""
    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )
    return _write(Path(path), Qwen3ForCausalLM, config, alphabet, dtype, seed)


def make_qwen3_moe(  # noqa: PLR0913
    path: str | Path,
    *,
    alphabet: str = ALPHABET,
    hidden_size: int = 64,
    expert_size: int = 32,
    num_layers: int = 2,
    num_experts: int = 8,
    num_chosen: int = 2,
    tied: bool = False,
    dense_layers: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """The same with routed experts in every layer but ``dense_layers``; the files hold the experts
    one by one, as released checkpoints do."""
    settings = dict[str, Any](
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=expert_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        norm_topk_prob=True,
        mlp_only_layers=list(dense_layers),
        tie_word_embeddings=tied,
    )
    config = Qwen3MoeConfig(**settings)
    return _write(Path(path), Qwen3MoeForCausalLM, config, alphabet, dtype, seed)


def make_qwen3_5(
    path: str | Path,
    *,
    alphabet: str = ALPHABET,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """The text model of Qwen3.5: three layers of gated delta net, then one of attention.

    In a narrower ``dtype`` the decay and the norm of the delta nets stay fp32, as in released
    checkpoints.
    """
    config = Qwen3_5TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return _write(Path(path), _qwen3_5, config, alphabet, dtype, seed)


def _qwen3_5(config: Qwen3_5TextConfig) -> Qwen3_5ForCausalLM:
    """With vectors that are not all alike, as training leaves them."""
    model = Qwen3_5ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def _write(
    path: Path,
    make_model: Any,
    config: PreTrainedConfig,
    alphabet: str,
    dtype: torch.dtype,
    seed: int,
) -> Path:
    tokenizer = make_tokenizer(alphabet)
    config.vocab_size = -(-len(tokenizer) // 32) * 32
    config.max_position_embeddings = 2048
    config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.bos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = make_model(config)
    kept = {name: p.data for name, p in model.named_parameters() if name.endswith(_KEPT_IN_FP32)}
    model.to(dtype)
    for name, value in kept.items():
        model.get_parameter(name).data = value
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
