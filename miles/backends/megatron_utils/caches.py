"""Device memory that Megatron and our attention keep from step to step, and make anew when it is
missing."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.parallel_state import get_global_memory_buffer

from miles.backends.megatron_utils.attention import drop_layouts


def drop_caches() -> None:
    """Let go of the rotary embeddings of the last sequence lengths, of the layouts of the last
    packed rows, and of the buffer that sequence-parallel layers gather their inputs in."""
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    drop_layouts()
    get_global_memory_buffer().buffer.clear()
