from pathlib import Path

from transformers import AutoConfig

from miles.plan.model import read_model
from tests.unit.plan.made_jobs import config_dir, moe_config_dir

MATRICES = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
NORMS = 2 * 64 + 2 * 8


def test_a_dense_model_is_counted_layer_by_layer(tmp_path: Path) -> None:
    model = read_model(str(config_dir(tmp_path / "model")))
    assert [(layer.matrices, layer.replicated, layer.experts) for layer in model.layers] == [
        (MATRICES, NORMS, 0)
    ] * 4
    assert (model.embedding, model.head, model.others) == (256 * 64, 256 * 64, 64)
    assert model.num_parameters == 4 * (MATRICES + NORMS) + 2 * 256 * 64 + 64 == 180_864
    assert model.largest_tensor == 256 * 64
    assert (model.query_size, model.kv_size, model.qk_norm) == (64, 32, True)


def test_a_tied_head_has_no_parameters_of_its_own(tmp_path: Path) -> None:
    model = read_model(str(config_dir(tmp_path / "model", tie_word_embeddings=True)))
    assert (model.embedding, model.head) == (256 * 64, 0)
    assert model.num_parameters == 180_864 - 256 * 64


def test_experts_and_routers_are_counted_apart(tmp_path: Path) -> None:
    folder = moe_config_dir(tmp_path / "model", mlp_only_layers=[1])
    model = read_model(str(folder))
    attention = 64 * (64 + 32 + 32 + 64)
    sparse, dense = model.layers[0], model.layers[1]
    assert (sparse.matrices, sparse.replicated) == (attention, NORMS + 8 * 64)
    assert sparse.experts == 8 * 3 * 64 * 32
    assert (dense.matrices, dense.experts) == (MATRICES, 0)
    assert (model.num_experts, model.experts_per_token, model.expert_size) == (8, 2, 32)


def test_the_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    assert read_model(str(config_dir(tmp_path / "bf16"))).dtype_bytes == 2
    assert read_model(str(config_dir(tmp_path / "fp32", dtype="float32"))).dtype_bytes == 4


def test_a_config_that_says_no_dtype_is_of_bf16(tmp_path: Path) -> None:
    folder = config_dir(tmp_path / "model", dtype=None)
    assert AutoConfig.from_pretrained(folder).dtype is None
    assert read_model(str(folder)).dtype_bytes == 2
