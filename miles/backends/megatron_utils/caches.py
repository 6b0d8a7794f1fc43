"""Device memory that Megatron keeps from step to step, and makes anew when it is missing."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.parallel_state import get_global_memory_buffer


def drop_caches() -> None:
    """Let go of the rotary embeddings of the last sequence lengths, and of the buffer that
    sequence-parallel layers gather their inputs in."""
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    get_global_memory_buffer().buffer.clear()
