"""What must hold between a model's layers and the stages of the pipeline: pure rules."""

import argparse

from miles.config.errors import Problem
from miles.config.root import MilesConfig

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_LAYOUT = "--pipeline-model-parallel-layout"


def layers_divide_into_stages(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Every pipeline stage has as many layers, unless Megatron's uneven flags say otherwise."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    if layers is None or _ends(args) or args.pipeline_model_parallel_layout is not None:
        return []
    counted = layers
    counted += args.account_for_embedding_in_pipeline_split
    counted += args.account_for_loss_in_pipeline_split
    uneven = f"{_FIRST}, {_LAST} and {_LAYOUT} split unevenly"
    remedy = f"must divide the model's {layers} layers ({uneven})"
    if counted % stages != 0:
        return [Problem("--pipeline-model-parallel-size", stages, remedy)]
    per_stage = counted // stages
    rows = (
        ("--num-layers-per-virtual-pipeline-stage", args.num_layers_per_virtual_pipeline_stage),
        ("--num-virtual-stages-per-pipeline-rank", args.num_virtual_stages_per_pipeline_rank),
    )
    return [
        Problem(flag, number, f"must divide the {per_stage} layers of a stage")
        for flag, number in rows
        if number is not None and (number < 1 or per_stage % number != 0)
    ]


def stages_are_split_in_one_way(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Megatron refuses two of them once the ranks have started."""
    counted = {
        "--account-for-embedding-in-pipeline-split": args.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": args.account_for_loss_in_pipeline_split,
    }
    ways = (
        [flag for flag, is_counted in counted.items() if is_counted],
        list(_ends(args)),
        [_LAYOUT] if args.pipeline_model_parallel_layout is not None else [],
    )
    given = [flags for flags in ways if flags]
    if len(given) < 2:
        return []
    flags = ", ".join(flag for way in given for flag in way)
    return [Problem(flags, "", "split layers into stages, each in another way; give one of them")]


def uneven_stages_hold_every_layer(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Megatron builds what the flags of the ends say, also when that is not the whole model."""
    ends, layers = _ends(args), args.num_layers
    if not ends or layers is None:
        return []
    small = [Problem(flag, n, "must be at least 1") for flag, n in ends.items() if n < 1]
    if small:
        return small
    stages = args.pipeline_model_parallel_size
    left, others = layers - sum(ends.values()), stages - len(ends)
    fits = left == 0 if others == 0 else left >= others > 0 and left % others == 0
    if not fits:
        rest = f"{left} of the model's {layers} layers for the other {others} of {stages} stages"
        remedy = f"leaves {rest} (--pipeline-model-parallel-size); each needs as many, at least 1"
        return [Problem(", ".join(ends), " ".join(map(str, ends.values())), remedy)]
    sizes = [*ends.values(), *([left // others] if others else [])]
    virtual = args.num_virtual_stages_per_pipeline_rank
    if virtual is not None and (virtual < 1 or any(size % virtual != 0 for size in sizes)):
        remedy = f"must divide the layers of every stage ({', '.join(map(str, sizes))})"
        return [Problem("--num-virtual-stages-per-pipeline-rank", virtual, remedy)]
    return []


def layout_holds_every_layer(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """The stages that are written out are those of the model."""
    layout, layers = args.pipeline_model_parallel_layout, args.num_layers
    if layout is None or layers is None:
        return []
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        stages = PipelineParallelLayerLayout(layout, args.pipeline_model_parallel_size)
        stages.validate_layer_layout(layers, args.mtp_num_layers)
    except (AssertionError, IndexError, NotImplementedError) as error:  # its way to refuse
        return [Problem(_LAYOUT, layout, f"does not fit the model's {layers} layers: {error}")]
    return []


def virtual_stages_overlap(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """The interleaved schedule is right with overlapped communication only: batched sends between
    the same two ranks mix up their order (over gloo without any error)."""
    virtual = (
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
    )
    if args.overlap_p2p_comm or all(flag is None for flag in virtual):
        return []
    remedy = "virtual pipeline stages need overlapped communication; leave it out"
    return [Problem("--no-overlap-p2p-communication", True, remedy)]


def _ends(args: argparse.Namespace) -> dict[str, int]:
    """Layers of the first and the last stage, where they are given."""
    given = {
        _FIRST: args.decoder_first_pipeline_num_layers,
        _LAST: args.decoder_last_pipeline_num_layers,
    }
    return {flag: number for flag, number in given.items() if number is not None}


PIPELINE_RULES = (
    layers_divide_into_stages,
    stages_are_split_in_one_way,
    uneven_stages_hold_every_layer,
    layout_holds_every_layer,
    virtual_stages_overlap,
)
