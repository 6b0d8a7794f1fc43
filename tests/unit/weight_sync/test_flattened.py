"""A bucket as SGLang's own deserializer reads it."""

import os

import pytest
import torch

from miles.contracts.types import NamedTensor, WeightBucket
from miles.weight_sync.flattened import FlattenedSegment


def bucket(*sizes: int) -> WeightBucket:
    return WeightBucket(
        tensors=tuple(
            NamedTensor(name=str(i), tensor=torch.full((n, 2), i + 1.5, dtype=torch.bfloat16))
            for i, n in enumerate(sizes)
        )
    )


@pytest.mark.sglang
def test_each_rank_of_each_engine_reads_every_tensor_from_a_handle_of_its_own() -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    segment = FlattenedSegment()
    segment.write(bucket(5), num_engines=1, gpus_per_engine=1)
    sent = bucket(1, 0, 3)
    refs = segment.write(sent, num_engines=2, gpus_per_engine=2)
    assert [len(ref.serialized) for ref in refs] == [2, 2]
    for serialized in (text for ref in refs for text in ref.serialized):
        payload = MultiprocessingSerializer.deserialize(serialized)
        read = FlattenedTensorBucket(
            flattened_tensor=payload["flattened_tensor"], metadata=payload["metadata"]
        ).reconstruct_tensors()
        assert [name for name, _ in read] == ["0", "1", "2"]
        for (_, found), named in zip(read, sent.tensors, strict=True):
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, named.tensor)
    segment.release()


def test_too_little_shared_memory_is_an_error_that_names_the_remedy() -> None:
    segment = FlattenedSegment()
    system = os.statvfs("/dev/shm")
    with pytest.raises(OSError, match=r"--shm-size\) or lower --update-weight-buffer-size"):
        segment._reserve((system.f_blocks + 1) * system.f_frsize)


def test_the_sharing_strategy_of_the_process_stays_as_it_was() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    segment = FlattenedSegment()
    segment._reserve(100)
    assert torch.multiprocessing.get_sharing_strategy() == before
    segment.release()
