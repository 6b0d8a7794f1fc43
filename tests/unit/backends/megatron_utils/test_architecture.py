"""config.json of small models against architecture flags written by hand."""

from typing import Any

import pytest
from transformers import AutoConfig

from miles.backends.megatron_utils.architecture import (
    Namespaces,
    UnknownArchitecture,
    compare,
    flags_of,
    to_argv,
)
from miles.config.errors import Problem

pytestmark = pytest.mark.megatron

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
COMMON = (
    "--num-layers 3 --hidden-size 32 --ffn-hidden-size 96 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 2 --kv-channels {} --swiglu --disable-bias-linear "
    "--normalization RMSNorm --norm-epsilon 1e-05 --position-embedding-type rope "
    "--rotary-base 500000{} --vocab-size 128 --untie-embeddings-and-output-weights"
)


def made(kind: str, **fields: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SIZES, "rope_theta": 500000.0, **fields})


def line(config: Any) -> str:
    return " ".join(to_argv(flags_of(config)))


def scaling(**fields: float | str) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        **fields,
    }


def test_llama_has_head_sizes_from_the_hidden_size_and_scaled_rope() -> None:
    assert line(made("llama")) == COMMON.format(4, "")
    scaled = made("llama", rope_scaling=scaling(), max_position_embeddings=131072)
    assert line(scaled) == COMMON.format(4, " --use-rope-scaling --rope-scaling-factor 32.0")


def test_qwen2_has_biases_on_queries_keys_and_values() -> None:
    assert line(made("qwen2")) == COMMON.format(4, "") + " --add-qkv-bias"


def test_qwen3_has_its_own_head_size_and_norms_of_queries_and_keys() -> None:
    assert line(made("qwen3", head_dim=16)) == COMMON.format(16, "") + " --qk-layernorm"


def test_tied_embeddings_and_a_group_for_each_head_have_no_flag() -> None:
    flags = flags_of(made("qwen3", tie_word_embeddings=True, num_key_value_heads=8))
    assert not {"untie-embeddings-and-output-weights", "group-query-attention"} & flags.keys()


def test_qwen3_moe_normalises_the_chosen_experts_or_all_of_them() -> None:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    experts = " --qk-layernorm --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2"
    chosen = made("qwen3_moe", head_dim=16, norm_topk_prob=True, **fields)
    assert line(chosen) == COMMON.format(16, "") + experts
    of_all = made("qwen3_moe", head_dim=16, norm_topk_prob=False, **fields)
    assert line(of_all) == line(chosen) + " --moe-router-pre-softmax"


def test_layers_without_experts_are_a_pattern() -> None:
    """Of three layers, every second is sparse: the one in the middle; then it is dense too."""
    flags = flags_of(made("qwen3_moe", decoder_sparse_step=2, num_experts=4))
    assert flags["moe-layer-freq"] == "[0,1,0]"
    flags = flags_of(made("qwen3_moe", mlp_only_layers=[1], num_experts=4))
    assert flags["moe-layer-freq"] == "[1,0,1]"


def test_qwen3_5_needs_its_spec() -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.25}
    text = {"model_type": "qwen3_5_text", **SIZES, "head_dim": 16, "rope_parameters": rope}
    config = AutoConfig.for_model("qwen3_5", text_config=text)
    assert line(config) == (
        "--spec miles_plugins.models.qwen3_5 get_qwen3_5_spec "
        + COMMON.format(16, "")
        + " --qk-layernorm --rotary-percent 0.25 --apply-layernorm-1p --attention-output-gate"
    )


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("gpt2", {}, "model_type 'gpt2' .* llama, qwen2, qwen3"),
        ("llama", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window True"),
        ("llama", {"rope_theta": 0.5}, "rope_theta 0.5"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        ("llama", {"rope_scaling": scaling(low_freq_factor=2.0)}, "low_freq_factor"),
    ],
)
def test_what_these_flags_cannot_say_is_refused(
    kind: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnknownArchitecture, match=reason):
        flags_of(made(kind, **fields))


@pytest.fixture(scope="module")
def parser() -> Any:
    from miles.backends.megatron_utils.namespace import make_parser

    return make_parser()


def compared(parser: Any, given: str, config: Any) -> list[Problem]:
    words, flags = given.split(), to_argv(flags_of(config))
    namespaces = Namespaces(
        own=parser.parse_args(words),
        filled=parser.parse_args([*flags, *words]),
        checkpoint=parser.parse_args(flags),
    )
    return compare(namespaces, {w.removeprefix("--") for w in words if w.startswith("--")})


def differences(parser: Any, given: str, config: Any) -> list[str]:
    problems = compared(parser, given, config)
    return [flag for problem in problems for flag in problem.flag.split(", ")]


def test_the_flags_of_a_checkpoint_are_its_own(parser: Any) -> None:
    for kind in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        config = made(kind)
        assert differences(parser, line(config), config) == []


def test_other_ways_to_say_the_same_are_no_difference(parser: Any) -> None:
    config = made("llama", num_key_value_heads=8)
    same = line(config).replace("--kv-channels 4 ", "")
    same = same.replace("--position-embedding-type rope", "--use-rotary-position-embeddings")
    assert differences(parser, same, config) == []


def test_the_flags_of_another_family_are_one_problem_with_every_difference(parser: Any) -> None:
    qwen2 = line(made("qwen2", num_hidden_layers=5))
    qwen3 = made("qwen3", head_dim=16)
    assert differences(parser, qwen2, qwen3) == [
        "--add-qkv-bias",
        "--kv-channels",
        "--num-layers",
        "--qk-layernorm",
    ]
    (problem,) = compared(parser, qwen2, qwen3)
    assert problem.value == (True, 4, 5, False)
    assert "--kv-channels: 4, must be 16" in problem.remedy
    assert "--qk-layernorm: not given, must be given" in problem.remedy
    assert "--add-qkv-bias: given, must be not given" in problem.remedy


def test_flags_of_a_dense_model_lack_the_experts_of_a_mixture(parser: Any) -> None:
    mixture = made("qwen3_moe", head_dim=16, num_experts=4, norm_topk_prob=True)
    found = differences(parser, line(made("qwen3", head_dim=16)), mixture)
    assert "--num-experts" in found
    assert "--moe-router-topk" in found


def test_strays_are_named_alone(parser: Any) -> None:
    """Who gives nothing that fits does not describe the model: nothing else is missing."""
    dense = made("qwen3", head_dim=16)
    assert differences(parser, "--num-experts 8", dense) == ["--num-experts"]
    assert differences(parser, f"{line(dense)} --num-experts 8", dense) == ["--num-experts"]
    (problem,) = compared(parser, "--num-experts 8 --num-layers 9", dense)
    assert problem.flag == "--num-experts, --num-layers"
    assert problem.value == (8, 9)
    assert "--num-experts: 8, must be not given; --num-layers: 9, must be 3" in problem.remedy


def test_a_part_of_the_description_lacks_the_rest(parser: Any) -> None:
    mixture = made("qwen3_moe", head_dim=16, num_experts=4, norm_topk_prob=True)
    topk = mixture.num_experts_per_tok
    found = differences(parser, f"--moe-router-topk {topk}", mixture)
    assert "--moe-router-topk" not in found
    assert {"--num-experts", "--num-layers", "--qk-layernorm"} <= set(found)
    # Megatron takes no experts for a value like any other.
    assert "--num-layers" in differences(parser, "--num-experts 0", made("qwen3", head_dim=16))


def test_a_forgotten_switch_of_the_family_is_a_difference(parser: Any) -> None:
    config = made("qwen3", head_dim=16)
    for switch in ("--swiglu", "--disable-bias-linear", "--qk-layernorm"):
        assert switch in differences(parser, line(config).replace(switch, ""), config)
