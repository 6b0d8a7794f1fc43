"""Adam on state in files, against PyTorch's AdamW on resident state."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from miles.backends.training_utils.streamed_optimizer import (
    MASTER,
    MEAN,
    SQUARE,
    AdamShard,
    StreamedAdam,
    StreamedState,
)
from miles.config.offload import OffloadConfig

SHAPES = [(300, 70), (1,), (17,), (64, 1000), (4097,)]
"""With a chunk of 1 MiB the last bucket of three ends within none of them."""
SETTINGS: dict[str, Any] = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def offload(directory: Path, moments: Literal["fp32", "bf16"] = "fp32") -> OffloadConfig:
    return OffloadConfig(
        offload_train_target="disk",
        offload_train_disk_dir=str(directory),
        offload_train_disk_chunk_mb=1,
        stream_optimizer_state_to_disk=True,
        stream_optimizer_state_moment_dtype=moments,
    )


@dataclass
class Twin:
    """The same parameters twice: AdamW has one set, the streamed optimizer the other."""

    resident: list[nn.Parameter]
    model: list[Tensor]
    settings: dict[str, Any]
    streamed: StreamedAdam
    num_steps: list[int]
    gradients: list[Tensor | None]


def make_twin(
    directory: Path, dtype: torch.dtype, moments: Literal["fp32", "bf16"], where: str = "cpu"
) -> Twin:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(where, dtype) for shape in SHAPES]
    settings, num_steps = dict(SETTINGS), [0]
    gradients: list[Tensor | None] = [None] * len(SHAPES)
    model = [start.clone() for start in starts]
    shards = [
        AdamShard(
            numel=parameter.numel(),
            gradient=lambda n=number: gradients[n],
            settings=settings,
            num_steps=lambda: num_steps[0],
            parameter=parameter,
        )
        for number, parameter in enumerate(model)
    ]
    streamed = StreamedAdam(shards, offload(directory, moments))
    for number, start in enumerate(starts):
        if dtype != torch.float32:
            streamed.tensors(number)[MASTER].copy_(start.flatten())
    resident = [nn.Parameter(start.float()) for start in starts]
    return Twin(resident, model, settings, streamed, num_steps, gradients)


def check_twenty_steps(directory: Path, dtype: torch.dtype, where: str) -> None:
    """With a learning rate that changes."""
    twin = make_twin(directory, dtype, "fp32", where)
    adam = torch.optim.AdamW(twin.resident, fused=True, **SETTINGS)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        rate = 0.03 * (20 - step) / 20
        adam.param_groups[0]["lr"] = twin.settings["lr"] = rate
        twin.num_steps[0] = step + 1
        for number, parameter in enumerate(twin.resident):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(where)
            twin.gradients[number] = parameter.grad.clone()
        adam.step()
        twin.streamed.step()
        for number, (parameter, own) in enumerate(zip(twin.resident, twin.model, strict=True)):
            assert torch.equal(own, parameter.detach().to(dtype)), (step, number)
    for number, parameter in enumerate(twin.resident):
        held = twin.streamed.tensors(number)
        for kind in (MEAN, SQUARE):
            assert torch.equal(held[kind], adam.state[parameter][kind].flatten().cpu())
        if dtype != torch.float32:
            assert torch.equal(held[MASTER], parameter.detach().flatten().cpu())
    twin.streamed.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_steps_are_those_of_adamw_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    check_twenty_steps(tmp_path, dtype, "cpu")


def test_a_shard_without_a_gradient_stays_as_it_is(tmp_path: Path) -> None:
    twin = make_twin(tmp_path, torch.bfloat16, "fp32")
    twin.num_steps[0] = 1
    twin.gradients[0] = torch.ones(SHAPES[0])
    before = [parameter.clone() for parameter in twin.model]
    twin.streamed.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, twin.model, strict=True)]
    assert changed == [True, False, False, False, False]
    assert twin.streamed.tensors(3)[MEAN].abs().sum() == 0
    twin.streamed.close()


def test_bf16_moments_are_rounded_and_nothing_else(tmp_path: Path) -> None:
    """One step by hand: mean 0.1 g, square 0.02 g^2, each rounded after it was used."""
    twin = make_twin(tmp_path, torch.float32, "bf16")
    start = twin.model[1].clone()
    twin.num_steps[0] = 1
    twin.gradients[1] = torch.tensor([0.3])
    twin.streamed.step()
    held = twin.streamed.tensors(1)
    assert held[MEAN].dtype == held[SQUARE].dtype == torch.bfloat16
    assert held[MEAN].item() == torch.tensor(0.03).bfloat16().item()
    assert held[SQUARE].item() == torch.tensor(0.0018).bfloat16().item()
    # Bias corrections cancel the factors: the first step is lr in the gradient's direction.
    expected = start * (1 - 0.03 * 0.1) - 0.03
    torch.testing.assert_close(twin.model[1], expected)
    twin.streamed.close()


def test_what_is_written_into_the_state_is_in_the_next_step(tmp_path: Path) -> None:
    """As when a checkpoint is read, or moments are reset between steps."""
    twin = make_twin(tmp_path, torch.bfloat16, "fp32")
    for step in (1, 2):
        twin.num_steps[0] = step
        twin.gradients[:] = [torch.full(shape, 0.5) for shape in SHAPES]
        twin.streamed.step()
    held = twin.streamed.tensors(0)
    held[MASTER].fill_(8.0)
    held[MEAN].zero_()
    held[SQUARE].zero_()
    twin.num_steps[0] = 1
    twin.gradients[:] = [torch.zeros(shape) for shape in SHAPES]
    twin.streamed.step()
    assert (held[MASTER] == 8.0 * (1 - 0.03 * 0.1)).all()
    assert (twin.model[0] == torch.tensor(8.0 * (1 - 0.03 * 0.1)).bfloat16()).all()
    twin.streamed.close()


def test_one_kind_becomes_zeros_in_every_bucket_and_the_others_stay(tmp_path: Path) -> None:
    dtypes = {"master": torch.float32, "exp_avg": torch.bfloat16}
    state = StreamedState([5000, 9000], dtypes, str(tmp_path), 6 * 4096)
    for kind in dtypes:
        for shard in range(2):
            state.tensor(kind, shard).fill_(3)
    state.zero("exp_avg")
    seen: list[tuple[float, float]] = []

    def look(pieces: Any) -> None:
        for piece in pieces:
            master, mean = (piece.values[kind].float() for kind in dtypes)
            seen.append((float(master.min()), float(mean.max())))

    state.stream(torch.device("cpu"), look)
    assert set(seen) == {(3.0, 0.0)}
    assert not any(state.tensor("exp_avg", shard).any() for shard in range(2))
    state.close()


def test_buckets_are_no_larger_than_a_chunk_and_cover_everything_once(tmp_path: Path) -> None:
    numels = [10, 0, 500_000, 64, 1]
    kinds = {"a": torch.float32, "b": torch.bfloat16}
    state = StreamedState(numels, kinds, str(tmp_path), 1 << 20)
    assert state.bucket_bytes <= 1 << 20
    seen = [torch.zeros(numel, dtype=torch.int32) for numel in numels]
    on_device: list[int] = []

    def update(pieces: Any) -> None:
        on_device.append(sum(v.nbytes for piece in pieces for v in piece.values.values()))
        for piece in pieces:
            seen[piece.shard][piece.start : piece.stop] += 1
            piece.values["a"].fill_(piece.shard)
            piece.values["b"] += 1

    for _ in range(2):
        state.stream(torch.device("cpu"), update)
    assert all((count == 2).all() for count in seen)
    assert len(on_device) == 2 * 3
    assert max(on_device) <= state.bucket_bytes
    for shard, numel in enumerate(numels):
        assert (state.tensor("a", shard) == shard).all()
        assert (state.tensor("b", shard) == 2).all()
        assert state.tensor("a", shard).shape == (numel,)
    state.close()


def test_a_failed_write_is_an_error_and_no_thread_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    from miles.backends.training_utils.direct_file import OffloadError

    state = StreamedState([600_000], {"a": torch.float32}, str(tmp_path), 1 << 20)

    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OffloadError, match="writing: Input/output error"):
        state.stream(torch.device("cpu"), lambda pieces: None)
    state.close()
