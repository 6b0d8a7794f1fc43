"""``MegatronTrainRayActor``: the six methods of the contract on megatron-core."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from miles.backends.megatron_utils import cpu_platform

# Megatron binds functions of torch while it is imported.
cpu_platform.install()

from miles.backends.megatron_utils.converters import Converter  # noqa: E402
from miles.backends.megatron_utils.initialize import destroy, initialize, parallel_state  # noqa: E402
from miles.backends.megatron_utils.model import HeadOptions, PolicyModel, build_chunks  # noqa: E402
from miles.backends.megatron_utils.optimizer import Optimizer  # noqa: E402
from miles.backends.megatron_utils.shards import local_tensors  # noqa: E402
from miles.backends.megatron_utils.weights import load_hf, stream_hf  # noqa: E402
from miles.backends.training_utils.consume import consume  # noqa: E402
from miles.backends.training_utils.hf_files import HFFiles  # noqa: E402
from miles.backends.training_utils.losses import needs_entropy  # noqa: E402
from miles.backends.training_utils.offload_store import HostStore  # noqa: E402
from miles.config.derived import total_optimizer_steps  # noqa: E402
