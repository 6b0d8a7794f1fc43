"""The embedding of the padding token, which transformers does not train where it is an input
(``torch.nn.Embedding(padding_idx=...)``): a response may well hold that token, which is often the
one that ends it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from miles.core import hf


def hold_padding(chunks: Sequence[nn.Module], hf_config: Any) -> None:
    """Let no gradient into the padding token's embedding from where it is an input, as the model of
    this Hugging Face config in transformers. A tied head trains it nevertheless, there as here."""
    padding_id = hf.padding_id(hf_config)
    if padding_id is None:
        return
    models: Any = unwrap_model(list(chunks))
    for model in models:
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.register_forward_hook(partial(_mask_gradient, padding_id))


def _mask_gradient(
    padding_id: int, module: VocabParallelEmbedding, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    if not output.requires_grad:
        return
    (ids,) = inputs
    trained = ids != padding_id
    if module.reduce_scatter_embeddings:
        # Sequence parallelism: [batch, tokens] in, this rank's part of [tokens, batch, width] out.
        group: Any = module.tp_group
        trained = trained.transpose(0, 1).chunk(group.size())[group.rank()]
    output.register_hook(lambda gradient: gradient * trained.unsqueeze(-1))
