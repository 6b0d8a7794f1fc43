from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from miles.backends.megatron_utils.attention import CoreAttention, SelfAttention
from miles.backends.megatron_utils.layers import RMSNorm
from miles.backends.megatron_utils.specs import block_spec, layer_spec
from miles.config.errors import ConfigError
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils import spec_jobs
from tests.unit.backends.megatron_utils.layer_jobs import make_config

HERE = "tests.unit.backends.megatron_utils.spec_jobs"


@pytest.fixture(scope="module", autouse=True)
def this_process() -> Iterator[None]:
    """A spec holds the layers of this process's pipeline stage, so there must be one."""
    store: Any = dist.HashStore()  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_a_dense_model_on_one_rank_has_our_norms_and_attention(megatron_ranks: Ranks) -> None:
    (found,) = megatron_ranks.run_well(spec_jobs.module_types, {}, num_ranks=1)
    layer = "decoder.layers.1."
    norms = {f"{layer}input_layernorm", f"{layer}pre_mlp_layernorm", "decoder.final_layernorm"}
    norms |= {f"{layer}self_attention.{name}_layernorm" for name in "qk"}
    assert {found[name] for name in norms} == {"RMSNorm"}
    assert found[f"{layer}self_attention.core_attention"] == "CoreAttention"
    assert found[f"{layer}mlp"] == "MLP"


def test_a_sparse_model_has_experts_where_its_layer_frequency_says(megatron_ranks: Ranks) -> None:
    changes = {
        "num_layers": 3,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_layer_freq": [0, 1, 1],
        "moe_shared_expert_intermediate_size": 24,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    (found,) = megatron_ranks.run_well(spec_jobs.module_types, changes, num_ranks=1)
    assert found["decoder.layers.0.mlp"] == "MLP"
    for layer in (1, 2):
        assert found[f"decoder.layers.{layer}.mlp"] == "MoELayer"
        assert found[f"decoder.layers.{layer}.mlp.experts"] == "SequentialMLP"
        assert found[f"decoder.layers.{layer}.mlp.shared_experts"] == "SharedExpertMLP"
    assert found["logits"] == [2, 6, 64]


def test_one_line_says_that_experts_are_not_grouped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="miles")
    config = make_config(num_moe_experts=4, moe_grouped_gemm=True)
    for vp_stage in (None, 1):
        block_spec(config, vp_stage)
    assert [r.message for r in caplog.records] == [
        "experts run one after the other: grouped GEMM needs Transformer Engine"
    ]


def test_without_the_flag_queries_and_keys_have_no_norm() -> None:
    (layer, _) = block_spec(make_config(qk_layernorm=False)).layer_specs or []
    attention = get_submodules(get_submodules(layer).self_attention)
    assert attention.q_layernorm is attention.k_layernorm is IdentityOp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl"),
        ({"normalization": "LayerNorm"}, "--normalization = 'LayerNorm'"),
    ],
)
def test_a_model_that_needs_transformer_engine_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        block_spec(make_config(**changes))


def test_a_named_function_gets_arguments_config_and_stage() -> None:
    args, config = Namespace(spec=[HERE, "make_spec"], seen=[]), make_config()
    spec = layer_spec(args, config, 3)
    assert isinstance(spec, TransformerBlockSubmodules)
    assert args.seen == [(config, 3)]


def test_a_named_layer_gets_our_final_norm() -> None:
    spec = layer_spec(Namespace(spec=[HERE, "LAYER"]), make_config())
    assert isinstance(spec, TransformerBlockSubmodules)
    assert spec.layer_specs == [spec_jobs.LAYER] * 2
    assert spec.layer_norm is RMSNorm


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["no.such.module", "name"], "cannot import"),
        ([HERE, "missing"], "has no 'missing'"),
        ([HERE], "takes a module and a name"),
        ([HERE, "make_nothing"], "gives a NoneType"),
        ([HERE, "HERE"], "names a str"),
        (["os", "path"], "names a module"),
    ],
)
def test_a_name_that_is_no_spec_is_refused(spec: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_spec(Namespace(spec=spec), make_config())


def test_the_spec_names_our_modules() -> None:
    block = block_spec(make_config())
    assert block.layer_norm is RMSNorm
    assert all(isinstance(layer, ModuleSpec) for layer in block.layer_specs or [])
    attention = get_submodules((block.layer_specs or [])[0]).self_attention
    assert attention.module is SelfAttention
    assert get_submodules(attention).core_attention is CoreAttention
