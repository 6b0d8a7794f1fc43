"""This rank's part of Megatron's model: one chunk, or several under virtual pipeline stages."""

import argparse
from contextlib import redirect_stdout
from os import devnull
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.training import get_model
from torch import nn

from miles.backends.megatron_utils.fp32_param_utils import marked_dtypes_kept
from miles.backends.megatron_utils.router import use_exact_routers
from miles.backends.megatron_utils.specs import layer_spec
from miles.core import device


def build_chunks(args: argparse.Namespace, *, trainable: bool) -> list[nn.Module]:
    """This rank's part of the model (several chunks under virtual pipeline parallelism), randomly
    initialised. ``trainable`` wraps it in Megatron's DDP; else nothing in it needs a gradient.

    Collective. The global arguments must be ``args``.
    """
    config = core_transformer_config_from_args(args)
    # Losses are divided by global counts already: gradients add up, they do not average.
    config.calculate_per_token_loss = True
    # Micro-batches differ in length.
    config.variable_seq_lengths = config.pipeline_model_parallel_size > 1
    if config.virtual_pipeline_model_parallel_size is not None and not device.has_accelerator():
        # Batched sends over gloo gave wrong gradients without an error.
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False

    def provide(
        *, pre_process: bool, post_process: bool, vp_stage: int | None = None, **others: Any
    ) -> GPTModel:
        spec: Any = layer_spec(args, config, vp_stage)
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            pg_collection=others.get("pg_collection"),
            vp_stage=vp_stage,
        )

    with (
        open(devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        marked_dtypes_kept(),
    ):
        chunks = get_model(
            provide, ModelType.encoder_or_decoder, wrap_with_ddp=trainable, config=config
        )
    use_exact_routers(chunks)
    for chunk in chunks:
        chunk.train()
        if not trainable:
            chunk.requires_grad_(False)
    return chunks
