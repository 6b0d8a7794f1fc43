import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from miles.backends.megatron_utils.partial_tensor import PartialTensor, boxes

SHAPES = [(), (7,), (1, 1), (3, 4), (2, 3, 4), (2, 1, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_range_of_a_flattened_tensor_is_a_few_boxes_of_it(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).reshape(shape)
    for start in range(numel + 1):
        for end in range(start, numel + 1):
            found: list[int] = []
            cut = list(boxes(shape, start, end))
            for box in cut:
                part = whole[
                    tuple(
                        map(slice, box.offsets, map(sum, zip(box.offsets, box.sizes, strict=True)))
                    )
                ]
                assert part.shape == box.sizes
                assert part.numel() == box.numel
                if box.numel:
                    assert part.reshape(-1)[0] == box.start
                found += part.reshape(-1).tolist()
            assert found == list(range(start, end))
            assert len(cut) <= max(2 * len(shape) - 1, 1)


def test_a_range_of_whole_rows_is_one_box() -> None:
    (box,) = boxes((4, 2, 3), 6, 18)
    assert (box.offsets, box.sizes, box.start) == ((1, 0, 0), (2, 2, 3), 6)


def parts(whole: torch.Tensor, *ranges: tuple[int, int]) -> dict[torch.Size, torch.Tensor]:
    flat = whole.reshape(-1)
    return {
        torch.Size(box.offsets): flat[box.start : box.start + box.numel].view(box.sizes)
        for start, end in ranges
        for box in boxes(whole.shape, start, end)
    }


def test_what_was_written_in_some_boxes_is_read_into_others(tmp_path: Path) -> None:
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    written = PartialTensor(whole.shape, parts(whole, (0, 13), (13, 30)), torch.float32)
    save(
        {"state": written},
        storage_writer=FileSystemWriter(tmp_path),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    target = torch.zeros(5, 6)
    read = PartialTensor(whole.shape, parts(target, (4, 22)), torch.float32)
    load(
        {"state": read},
        storage_reader=FileSystemReader(tmp_path),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    assert torch.equal(target.view(-1)[4:22], whole.view(-1)[4:22])
    assert not target.view(-1)[:4].any()
    assert not target.view(-1)[22:].any()


def test_it_is_written_in_the_dtype_it_says() -> None:
    narrow = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensor = PartialTensor((4, 3), {torch.Size((0, 0)): narrow}, torch.float32)
    (item,) = tensor.__create_write_items__("state", tensor)
    assert item.tensor_data is not None
    assert item.tensor_data.properties.dtype == torch.float32
    assert torch.equal(tensor.__get_tensor_shard__(item.index), narrow.float())


def test_nothing_is_computed_with_it() -> None:
    with pytest.raises(RuntimeError, match="only be written and read"):
        print(PartialTensor((2,), {}, torch.float32) + 1)
