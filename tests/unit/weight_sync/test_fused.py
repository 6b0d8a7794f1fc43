"""Which parameter of SGLang a tensor of the checkpoint becomes, and the digest of the whole."""

import hashlib
from functools import partial

import pytest
import torch

from miles.weight_sync import fused
from miles.weight_sync.fused import FusedDigests, Place

LAYER = "model.layers.3"

dense_place = partial(fused.dense_place, num_kv_heads=2)
moe_place = partial(fused.moe_place, num_kv_heads=2, num_experts=4)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", Place(f"{LAYER}.self_attn.qkv_proj.weight", 0, 3)),
        (f"{LAYER}.self_attn.v_proj.bias", Place(f"{LAYER}.self_attn.qkv_proj.bias", 2, 3)),
        (f"{LAYER}.mlp.gate_proj.weight", Place(f"{LAYER}.mlp.gate_up_proj.weight", 0, 2)),
        (f"{LAYER}.mlp.up_proj.weight", Place(f"{LAYER}.mlp.gate_up_proj.weight", 1, 2)),
        (f"{LAYER}.mlp.down_proj.weight", Place(f"{LAYER}.mlp.down_proj.weight")),
        (f"{LAYER}.self_attn.q_norm.weight", Place(f"{LAYER}.self_attn.q_norm.weight")),
        ("model.embed_tokens.weight", Place("model.embed_tokens.weight")),
    ],
)
def test_attention_and_gate_and_up_are_parts_of_one_parameter(name: str, place: Place) -> None:
    assert dense_place(name) == place
    assert moe_place(name) == place


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("2.gate_proj", Place(f"{LAYER}.mlp.experts.w13_weight", 4, 8)),
        ("2.up_proj", Place(f"{LAYER}.mlp.experts.w13_weight", 5, 8)),
        ("3.down_proj", Place(f"{LAYER}.mlp.experts.w2_weight", 3, 4)),
    ],
)
def test_the_experts_of_a_layer_are_parts_of_two_parameters(name: str, place: Place) -> None:
    assert moe_place(f"{LAYER}.mlp.experts.{name}.weight") == place


def short(data: bytes) -> str:
    """SGLang's digest of a host tensor: the first 8 bytes of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def test_parts_are_hashed_in_their_order_whatever_order_they_come_in() -> None:
    digests = FusedDigests(dense_place, torch.float32)
    parts = {"v": [5.0], "q": [1.0, 2.0], "k": [3.0]}
    for letter, values in parts.items():
        tensor = torch.tensor(values)
        digests.add(f"{LAYER}.self_attn.{letter}_proj.bias", tensor)
        # What is handed out may be used for something else afterwards.
        tensor.zero_()
    whole = torch.tensor([1.0, 2.0, 3.0, 5.0]).numpy().tobytes()
    assert digests.result() == {f"{LAYER}.self_attn.qkv_proj.bias": short(whole)}


def test_the_vocabulary_ends_in_rows_of_zeros_up_to_a_multiple_of_64() -> None:
    digests = FusedDigests(dense_place, torch.float32)
    digests.add("lm_head.weight", torch.ones(70, 2))
    digests.add("model.embed_tokens.weight", torch.ones(64, 2))
    one, zero = torch.ones(1).numpy().tobytes(), bytes(4)
    assert digests.result() == {
        "lm_head.weight": short(140 * one + 116 * zero),
        "model.embed_tokens.weight": short(128 * one),
    }


def test_what_the_engine_casts_is_hashed_as_cast() -> None:
    digests = FusedDigests(dense_place, torch.bfloat16)
    digests.add("model.norm.weight", torch.tensor([1.0, 3.0]))
    # bf16: 1.0 is 0x3f80, 3.0 is 0x4040.
    assert digests.result() == {"model.norm.weight": short(b"\x80\x3f\x40\x40")}


def test_a_parameter_that_is_not_whole_says_what_was_sent() -> None:
    digests = FusedDigests(dense_place, torch.float32)
    digests.add(f"{LAYER}.mlp.up_proj.weight", torch.ones(2, 2))
    assert digests.result() == {f"{LAYER}.mlp.gate_up_proj.weight": "sent 1 of 2 parts"}


def raw(*values: float) -> bytes:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes()


def test_each_rank_of_an_engine_holds_its_rows_of_what_is_divided_by_rows() -> None:
    digests = FusedDigests(dense_place, torch.float32, num_ranks=2)
    digests.add(f"{LAYER}.mlp.gate_proj.weight", torch.tensor([[1.0], [2.0]]))
    digests.add(f"{LAYER}.mlp.up_proj.weight", torch.tensor([[3.0], [4.0]]))
    digests.add("model.norm.weight", torch.tensor([9.0]))
    assert digests.result() == {
        f"{LAYER}.mlp.gate_up_proj.weight of rank 0": short(raw(1, 3)),
        f"{LAYER}.mlp.gate_up_proj.weight of rank 1": short(raw(2, 4)),
        "model.norm.weight of rank 0": short(raw(9)),
        "model.norm.weight of rank 1": short(raw(9)),
    }


@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.o_proj"])
def test_what_takes_divided_input_is_divided_by_columns(name: str) -> None:
    digests = FusedDigests(dense_place, torch.float32, num_ranks=2)
    digests.add(f"{LAYER}.{name}.weight", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert list(digests.result().values()) == [short(raw(1, 3)), short(raw(2, 4))]


def test_fewer_heads_of_keys_and_values_than_ranks_are_held_by_neighbours() -> None:
    digests = FusedDigests(dense_place, torch.float32, num_ranks=4)
    # Four query heads and two of keys and values, each of one row.
    digests.add(f"{LAYER}.self_attn.q_proj.weight", torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
    digests.add(f"{LAYER}.self_attn.k_proj.weight", torch.tensor([[4.0], [5.0]]))
    digests.add(f"{LAYER}.self_attn.v_proj.weight", torch.tensor([[6.0], [7.0]]))
    held = [raw(0, 4, 6), raw(1, 4, 6), raw(2, 5, 7), raw(3, 5, 7)]
    assert list(digests.result().values()) == [short(each) for each in held]


def test_each_rank_holds_its_part_of_the_padded_vocabulary() -> None:
    digests = FusedDigests(dense_place, torch.float32, num_ranks=2)
    digests.add("lm_head.weight", torch.ones(40, 1))
    one, zero = raw(1), raw(0)
    assert list(digests.result().values()) == [short(32 * one), short(8 * one + 24 * zero)]


def test_a_rank_holds_its_part_of_every_expert() -> None:
    digests = FusedDigests(
        partial(fused.moe_place, num_kv_heads=2, num_experts=1), torch.float32, num_ranks=2
    )
    expert = f"{LAYER}.mlp.experts.0"
    digests.add(f"{expert}.gate_proj.weight", torch.tensor([[1.0], [2.0]]))
    digests.add(f"{expert}.up_proj.weight", torch.tensor([[3.0], [4.0]]))
    digests.add(f"{expert}.down_proj.weight", torch.tensor([[5.0, 6.0]]))
    assert digests.result() == {
        f"{LAYER}.mlp.experts.w13_weight of rank 0": short(raw(1, 3)),
        f"{LAYER}.mlp.experts.w13_weight of rank 1": short(raw(2, 4)),
        f"{LAYER}.mlp.experts.w2_weight of rank 0": short(raw(5)),
        f"{LAYER}.mlp.experts.w2_weight of rank 1": short(raw(6)),
    }
