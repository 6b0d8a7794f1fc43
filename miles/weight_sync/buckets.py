"""Groups a stream of weights into buckets: bounded bytes, one dtype, contiguous tensors."""

from collections.abc import Iterable, Iterator

import torch

from miles.contracts.types import NamedTensor, WeightBucket


def bucketize(weights: Iterable[NamedTensor], max_bytes: int) -> Iterator[WeightBucket]:
    """Yield every weight once, in order within its dtype.

    One bucket a dtype is open at a time, and all open ones together stay within ``max_bytes``; a
    tensor larger than that travels alone. ``weights`` is read only as far as the next bucket needs.
    """
    if max_bytes < 1:
        raise ValueError(f"--update-weight-buffer-size {max_bytes}: must be at least 1")
    opened: dict[torch.dtype, list[NamedTensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for weight in weights:
        tensor = weight.tensor.detach().contiguous()
        while opened and sum(sizes.values()) + tensor.nbytes > max_bytes:
            largest = max(opened, key=sizes.__getitem__)
            del sizes[largest]
            yield WeightBucket(tensors=tuple(opened.pop(largest)))
        opened.setdefault(tensor.dtype, []).append(NamedTensor(name=weight.name, tensor=tensor))
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    for tensors in opened.values():
        yield WeightBucket(tensors=tuple(tensors))
