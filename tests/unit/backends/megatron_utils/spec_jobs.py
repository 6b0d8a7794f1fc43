"""Models built from specs, and specs for ``--spec``."""

from argparse import Namespace
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from tests.unit.backends.megatron_utils.layer_jobs import make_config, parallel

HERE = __name__
LAYER = ModuleSpec(module=TransformerLayer)


def make_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    from miles.backends.megatron_utils.specs import block_spec

    args.seen.append((config, vp_stage))
    return block_spec(config)


def make_nothing(args: Namespace, config: Any, vp_stage: int | None) -> None:
    del args, config, vp_stage


def module_types(changes: dict[str, Any]) -> dict[str, Any]:
    """The class of every module of a model, and the shape of its logits."""
    with parallel():
        from megatron.core.models.gpt import GPTModel

        from miles.backends.megatron_utils.specs import layer_spec

        config = make_config(**changes)
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(Namespace(spec=None), config),
            vocab_size=64,
            max_sequence_length=16,
            position_embedding_type="rope",
            parallel_output=True,
        )
        tokens = torch.arange(12).view(2, 6)
        logits = model(tokens, torch.arange(6).expand(2, 6), None)
        assert logits.isfinite().all()
        names = {name: type(module).__name__ for name, module in model.named_modules()}
        return names | {"logits": list(logits.shape)}
