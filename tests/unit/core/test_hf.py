import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from miles.core import hf, hf_weights, transformers_source
from miles.core.hf import (
    CheckpointDirError,
    check_causal,
    check_config,
    check_directory,
    dtype_name,
    stated_model,
    text_config,
)


@pytest.fixture
def model(tiny_qwen3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))


def test_a_whole_directory_is_fine(model: Path) -> None:
    check_directory(str(model))


def test_a_config_alone_is_a_model_without_weights(model: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    with pytest.raises(CheckpointDirError, match=r"no config\.json"):
        check_config(str(alone))
    shutil.copy(model / "config.json", alone)
    check_config(str(alone))
    with pytest.raises(CheckpointDirError, match="no weights"):
        check_directory(str(alone))


def test_a_config_that_is_not_json_is_named(model: Path) -> None:
    (model / "config.json").write_text("{broken")
    with pytest.raises(CheckpointDirError, match=r"config\.json is not JSON"):
        check_directory(str(model))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("iter_0000002/__0_0.distcp", r"torch_dist.*tools/convert_torch_dist_to_hf\.py"),
        ("release/__0_0.distcp", r"torch_dist.*tools/convert_torch_dist_to_hf\.py"),
        ("__0_0.distcp", r"torch_dist.*tools/convert_torch_dist_to_hf\.py"),
        ("iter_0000002/model/__0_0.distcp", r"FSDP.*tools/convert_fsdp_to_hf\.py"),
        ("model/__0_0.distcp", r"FSDP.*tools/convert_fsdp_to_hf\.py"),
    ],
)
def test_a_training_checkpoint_is_told_with_the_tool_that_converts_it(
    tmp_path: Path, file: str, says: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(CheckpointDirError, match=rf"no config\.json; .*{says}"):
        check_directory(str(tmp_path))


def test_a_directory_of_nothing_known_has_no_hint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDirError, match=r"has no config\.json$"):
        check_directory(str(tmp_path))


def test_weights_that_are_cut_short_are_named(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointDirError, match=r"model\.safetensors is damaged or cut short"):
        check_directory(str(model))


def write_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("qwen33", "'qwen33', which the installed transformers does not know"),
        (None, "no model_type"),
        (3, "no model_type"),
    ],
)
def test_a_model_type_that_nothing_can_load_is_refused(
    model: Path, model_type: Any, says: str
) -> None:
    write_config(model, model_type=model_type)
    with pytest.raises(CheckpointDirError, match=says):
        check_directory(str(model))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "big"),
        ("num_hidden_layers", 2.5),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("vocab_size", None),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_key(model: Path, key: str, value: Any) -> None:
    write_config(model, **{key: value})
    with pytest.raises(CheckpointDirError, match=rf"config\.json .*'{key}'") as error:
        check_config(str(model))
    assert str(value) in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointDirError, match=f"'{key}'"):
        hf.load_config(str(model))


def test_the_text_config_of_a_model_that_also_sees_is_checked_too(model: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_5").to_dict()
    config["text_config"]["hidden_size"] = "big"
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointDirError, match=r"'hidden_size'.*'big'"):
        check_config(str(model))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5"])
def test_what_transformers_writes_itself_leaves_no_doubt(family: str) -> None:
    from transformers import AutoConfig

    written = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    assert transformers_source.doubtful_keys(written) == []


def test_a_model_that_brings_its_own_code_may_be_of_any_type(model: Path) -> None:
    write_config(model, model_type="mine", auto_map={"AutoConfig": "configuration_mine.Config"})
    check_directory(str(model))


@pytest.mark.parametrize("model_type", ["t5", "clip", "wav2vec2"])
def test_a_type_without_a_causal_language_model_is_told(model: Path, model_type: str) -> None:
    write_config(model, model_type=model_type)
    says = rf"config\.json .*model_type '{model_type}'.*no causal language model.*give one"
    with pytest.raises(CheckpointDirError, match=says) as error:
        check_causal(str(model))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen3_5"},
        {"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Model"}},
        {"model_type": "t5", "auto_map": {"AutoConfig": "configuration_mine.Config"}},
        {"model_type": "mine"},
        {"model_type": None},
    ],
)
def test_what_may_be_a_causal_language_model_is_left_alone(
    model: Path, changes: dict[str, Any]
) -> None:
    write_config(model, **changes)
    check_causal(str(model))


def test_code_of_its_own_for_something_else_makes_no_causal_language_model(model: Path) -> None:
    write_config(model, model_type="t5", auto_map={"AutoModel": "modeling_mine.Model"})
    with pytest.raises(CheckpointDirError, match="no causal language model"):
        check_causal(str(model))


def test_a_tokenizer_that_is_no_json_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("garbage")
    with pytest.raises(CheckpointDirError, match=r"tokenizer\.json is not JSON"):
        check_directory(str(model))


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": null}', '{"version": "1.0"}'])
def test_a_tokenizer_without_a_model_is_named(model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointDirError, match=r"tokenizer\.json (has no 'model'|holds no JSON)"):
        check_directory(str(model))


INDEX = "model.safetensors.index.json"


def test_a_shard_that_only_the_index_has_is_named(model: Path) -> None:
    table = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    (model / INDEX).write_text(json.dumps({"weight_map": table}))
    with pytest.raises(CheckpointDirError, match=r"model-2\.safetensors is missing.*1 more of 3"):
        check_directory(str(model))
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    check_directory(str(model))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_named(model: Path, content: str) -> None:
    (model / INDEX).write_text(content)
    with pytest.raises(CheckpointDirError, match=r"model\.safetensors\.index\.json"):
        check_directory(str(model))


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("vocab_size", "embed_tokens"),
        ("intermediate_size", "gate_proj"),
        ("hidden_size", "embed_tokens"),
    ],
)
def test_weights_of_other_sizes_than_the_config_are_named(
    model: Path, key: str, tensor: str
) -> None:
    size = json.loads((model / "config.json").read_text())[key]
    write_config(model, **{key: 2 * size})
    says = rf"{tensor}\.weight is \(.*\b{size}\b.*\) in the files and \(.*\b{2 * size}\b"
    with pytest.raises(CheckpointDirError, match=says):
        check_directory(str(model))


def test_weights_of_fewer_layers_than_the_config_are_told(model: Path) -> None:
    write_config(model, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(CheckpointDirError, match=r"weights have 2 layers, but config\.json says 3"):
        check_directory(str(model))


def test_weights_of_more_layers_than_the_config_are_told(model: Path) -> None:
    write_config(model, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(CheckpointDirError, match=r"weights have 2 layers, but config\.json says 1"):
        check_directory(str(model))
    one_more = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    write_config(model, **one_more, layer_types=["full_attention"])
    check_directory(str(model))


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "vocab_size"])
def test_a_model_of_no_size_is_refused(model: Path, key: str) -> None:
    write_config(model, **{key: 0})
    with pytest.raises(CheckpointDirError, match=rf"config\.json says {key} 0: each must be at"):
        check_config(str(model))


def test_sizes_that_raise_doubt_pass_where_the_model_has_them(model: Path) -> None:
    """A key may mean something else to a family: what transformers builds decides."""
    shapes = {"model.embed_tokens.weight": (16, 8)}
    assert hf_weights.raises_doubt(shapes, {"vocab_size": 16, "hidden_size": 4})
    config = hf.load_config(str(model))
    fitting = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    assert hf_weights.misfits(fitting, config) == []


def test_a_config_that_is_no_object_is_named(model: Path) -> None:
    (model / "config.json").write_text("[]")
    with pytest.raises(CheckpointDirError, match="holds no JSON object"):
        check_directory(str(model))


def test_nearly_every_model_type_is_known_without_importing_transformers() -> None:
    listed = transformers_source.listed_model_types()
    # Not those that a package which another test imports has registered.
    known = set(CONFIG_MAPPING_NAMES)
    assert listed <= known
    assert len(known - listed) < 10


def test_the_types_of_causal_language_models_are_those_of_transformers() -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    listed = sorted(transformers_source.listed_model_types())
    lacking = {name for name in listed if transformers_source.lacks_causal_class(name)}
    assert lacking
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(listed)
    assert len(causal) > 100
    assert not lacking & causal
    # A class of configs that several types share is looked up once for all of them.
    for name in [*listed[::20], "t5", "gpt2", "llama"]:
        config = type(AutoConfig.for_model(name))
        assert (name in lacking) == (config not in MODEL_FOR_CAUSAL_LM_MAPPING), name


@pytest.mark.parametrize(
    ("values", "length"),
    [
        ({"max_position_embeddings": 8}, 8),
        ({"n_positions": 4}, 4),
        ({"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 16}}, 16),
        ({}, None),
    ],
)
def test_the_stated_context_length_is_that_of_the_text_model(
    tmp_path: Path, values: dict[str, Any], length: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert hf.stated_context_length(str(tmp_path)) == length


def test_the_stated_context_length_is_the_one_of_transformers(model: Path) -> None:
    wanted = hf.context_length(hf.load_config(str(model)))
    assert wanted is not None
    assert hf.stated_context_length(str(model)) == wanted


def test_what_tells_a_model_has_one_name_whatever_its_family_calls_it(tmp_path: Path) -> None:
    from transformers import AutoConfig

    def stated(model_type: str, **values: Any) -> dict[str, str | int]:
        config = AutoConfig.for_model(model_type, **values)
        (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
        return stated_model(str(tmp_path))

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 9}
    assert stated("gpt2", n_embd=32, n_layer=3, n_head=4, vocab_size=9) == {
        "model_type": "gpt2",
        "tie_word_embeddings": True,
        **sizes,
    }
    mixture = {"num_experts": 6, "moe_intermediate_size": 5, "tie_word_embeddings": False}
    assert stated("qwen3_moe", **sizes, **mixture).items() >= {**sizes, **mixture}.items()
    seeing = stated("qwen3_5", text_config=sizes, tie_word_embeddings=True)
    assert seeing.items() >= {"model_type": "qwen3_5", "tie_word_embeddings": True, **sizes}.items()


def test_a_value_that_is_no_size_tells_nothing(model: Path) -> None:
    write_config(model, hidden_size="big", vocab_size=None, tie_word_embeddings="yes")
    stated = stated_model(str(model))
    assert not {"hidden_size", "vocab_size", "tie_word_embeddings"} & stated.keys()
    assert stated["model_type"] == "qwen3"


def test_whether_embeddings_are_tied_is_what_the_whole_model_says() -> None:
    """Released Qwen3.5 checkpoints say it beside their text config, not in it."""
    from transformers import AutoConfig

    for tied in (False, True):
        config = AutoConfig.for_model("qwen3_5", tie_word_embeddings=tied)
        assert config.get_text_config().tie_word_embeddings is False
        assert text_config(config).tie_word_embeddings is tied
    alone = AutoConfig.for_model("qwen3", tie_word_embeddings=True)
    assert text_config(alone) is alone


def test_the_dtype_is_the_configs_or_where_it_says_none_that_of_the_weights(
    tiny_qwen3_untied: Path, tmp_path: Path
) -> None:
    assert dtype_name(str(tiny_qwen3_untied)) == "bfloat16"
    silent = Path(shutil.copytree(tiny_qwen3_untied, tmp_path / "silent"))
    config = json.loads((silent / "config.json").read_text())
    del config["dtype"]
    (silent / "config.json").write_text(json.dumps(config))
    assert dtype_name(str(silent)) == "bfloat16"


@pytest.mark.parametrize("token", [None, 0, 3, -1])
def test_the_padding_token_is_that_of_transformers_embedding(
    model: Path, token: int | None
) -> None:
    config = hf.load_config(str(model))
    config.pad_token_id = token
    with torch.device("meta"):
        embedding: Any = AutoModelForCausalLM.from_config(config).get_input_embeddings()
    assert hf.padding_id(config) == embedding.padding_idx
