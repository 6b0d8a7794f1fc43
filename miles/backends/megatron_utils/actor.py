"""``MegatronTrainRayActor``: the six methods of the contract on megatron-core."""

from miles.backends.megatron_utils import cpu_platform

# Megatron binds functions of torch while it is imported.
cpu_platform.install()
