"""Bodies that are refused, and what the refusal says."""

import json
from typing import Any

import pytest

from miles.backends.embedded.protocol import (
    AbortBody,
    GenerateBody,
    GroupBody,
    PauseBody,
    Refused,
    Sampling,
    TensorUpdateBody,
    VersionBody,
    decode,
)

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": -5}, "max_new_tokens"),
    ({"max_new_tokens": 1.5}, "max_new_tokens"),
    ({"max_new_tokens": True}, "max_new_tokens"),
    ({"n": 0}, r"\.n`"),
    ({"n": 10**9}, r"\.n`"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"sampling_seeds": [1, 2, 3], "n": 2}, "3 sampling_seeds for n = 2"),
    ({"sampling_seeds": [1], "sampling_seed": 1}, "not both"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
]


@pytest.mark.parametrize(("params", "names"), BAD_SAMPLING)
def test_bad_sampling_params_are_refused_by_name(params: dict[str, Any], names: str) -> None:
    body = json.dumps({"input_ids": [1], "sampling_params": params}).encode()
    with pytest.raises(Refused, match=names):
        decode(body, GenerateBody)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', GenerateBody),
        (b'{"input_ids": [1], "sampling_params": {"temperature": Infinity}}', GenerateBody),
        (b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}', GenerateBody),
        (b'{"input_ids": [1.5]}', GenerateBody),
        (b'{"input_ids": [true]}', GenerateBody),
        (b'{"input_ids": [[1]]}', GenerateBody),
        (b'{"input_ids": "1"}', GenerateBody),
        (b'{"input_ids": [1], "text": "a"}', GenerateBody),
        (b'{"input_ids": [1], "stream": true}', GenerateBody),
        (b'{"input_ids": [1], "image_data": "x"}', GenerateBody),
        (b'{"input_ids": [1], "admission": ["k", 3, 3]}', GenerateBody),
        (b"{}", GenerateBody),
        (b"[]", GenerateBody),
        (b"{", GenerateBody),
        (b"\xff\xfe", GenerateBody),
        (b'{"text": "\xff"}', GenerateBody),
        (b'{"mode": "gently"}', PauseBody),
        (b"{}", AbortBody),
        (b'{"rid": "a", "abort_all": true}', AbortBody),
        (b'{"new_version": "latest"}', VersionBody),
        (b'{"serialized_named_tensors": ["x"], "load_format": "pickle"}', TensorUpdateBody),
        (b'{"serialized_named_tensors": ["x"]}', TensorUpdateBody),
        (b'{"serialized_named_tensors": ["x", "y"], "load_format": "shm_bucket"}',
         TensorUpdateBody),
        (b'{"master_address": "a", "master_port": 0, "rank_offset": 1, "world_size": 2,'
         b' "group_name": "g", "backend": "gloo"}', GroupBody),
    ],
)  # fmt: skip
def test_a_malformed_body_is_refused(body: bytes, kind: type[Any]) -> None:
    with pytest.raises(Refused):
        decode(body, kind)


def test_defaults_are_those_of_the_protocol() -> None:
    body = decode(b'{"input_ids": [1]}', GenerateBody)
    params = body.sampling_params
    assert params == Sampling(temperature=1, top_p=1, top_k=-1, max_new_tokens=128)
    assert params.skip_special_tokens
    assert params.stop_strings == ()
    assert decode(b"", PauseBody).mode == "abort"


def test_one_stop_string_or_a_list_of_them() -> None:
    assert Sampling(stop="a").stop_strings == ("a",)
    assert Sampling(stop=["a", "b"]).stop_strings == ("a", "b")
