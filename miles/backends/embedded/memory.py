"""Gives the memory of a model's weights away and takes it back."""

import torch

from miles.core import device


class WeightMemory:
    """The storages of a model's parameters. Buffers are small and stay."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Must run before anything else keeps views of the parameters: a parameter whose storage
        cannot be resized (memory-mapped) is copied."""
        for parameter in model.parameters():
            if not parameter.untyped_storage().resizable():
                parameter.data = parameter.data.clone()
        self._parameters = list(model.parameters())
        self._num_bytes: dict[int, int] = {}

    @property
    def released(self) -> bool:
        return bool(self._num_bytes)

    def release(self) -> None:
        """Free the storages. Idempotent."""
        for index, parameter in enumerate(self._parameters):
            storage = parameter.untyped_storage()
            if storage.nbytes():
                self._num_bytes[index] = storage.nbytes()
                storage.resize_(0)
        device.empty_cache()

    def restore(self) -> None:
        """Allocate them again, filled with NaN: a weight that is then not loaded is noticed at the
        first step instead of generating nonsense. Idempotent."""
        for index, num_bytes in self._num_bytes.items():
            parameter = self._parameters[index]
            parameter.untyped_storage().resize_(num_bytes)
            if parameter.is_floating_point():
                parameter.data.fill_(torch.nan)
        self._num_bytes.clear()
