"""What must hold between the flags for SGLang to be the engine."""

from miles.backends.sglang_utils import package
from miles.config.derived import needs_engines
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem
from miles.core import hf


def check(config: MilesConfig) -> list[Problem]:
    """Problems of a job whose engine is SGLang; none for any other."""
    if not needs_engines(config) or package.choose_engine(config)[0] != "sglang":
        return []
    if (missing := package.problem()) is not None:
        return [missing]
    return [*_ranks_have_devices(config), *_weights_can_be_checked(config)]


def _ranks_have_devices(config: MilesConfig) -> list[Problem]:
    if config.cluster.rollout_num_gpus_per_engine == 1 or package.has_accelerator():
        return []
    remedy = (
        "SGLang divides no model without an accelerator; use 1 and more engines "
        "(--rollout-num-gpus), or --rollout-engine embedded"
    )
    return [problem(config, "rollout_num_gpus_per_engine", remedy=remedy)]


def _weights_can_be_checked(config: MilesConfig) -> list[Problem]:
    if not config.weight_sync.check_weight_update_equal:
        return []
    if config.cluster.rollout_num_gpus_per_engine > 1:
        remedy = "SGLang's checksums of a divided model are not compared; leave the first out"
        dests = ("check_weight_update_equal", "rollout_num_gpus_per_engine")
        return [problem(config, *dests, remedy=remedy)]
    from miles.weight_sync.fused import TABLES, architecture

    path = config.rollout.hf_checkpoint
    try:
        hf.check_directory(str(path))
    except hf.CheckpointDirError:
        return []  # The check of the models says so.
    name = architecture(hf.load_config(str(path)))
    if name in TABLES:
        return []
    remedy = (
        f"SGLang's checksums are of fused parameters, and it is not known how it fuses {name!r} "
        f"(known: {', '.join(TABLES)}); leave it out, or use --rollout-engine embedded"
    )
    return [problem(config, "check_weight_update_equal", remedy=remedy)]
