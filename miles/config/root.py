"""``MilesConfig``: one frozen field per group of flags."""

from dataclasses import asdict, dataclass, field
from typing import Any

from miles.config.algorithm import AlgorithmConfig
from miles.config.checkpoint import CheckpointConfig
from miles.config.cluster import ClusterConfig
from miles.config.data import DataConfig
from miles.config.evaluation import EvaluationConfig
from miles.config.fsdp import FsdpConfig
from miles.config.hooks import HooksConfig
from miles.config.observability import ObservabilityConfig
from miles.config.offload import OffloadConfig
from miles.config.optimizer import OptimizerConfig
from miles.config.precision import PrecisionConfig
from miles.config.reward import RewardConfig
from miles.config.rollout import RolloutConfig
from miles.config.weight_sync import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class MilesConfig:
    """Everything the command line says. Made once by ``miles.utils.arguments.parse_args``."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    megatron_argv: tuple[str, ...] = ()
    """Megatron's own arguments of a run on that backend, given and derived: its parser reads them
    in the driver, to check them, and again in each trainer process."""

    sglang_argv: tuple[str, ...] = ()
    """``--sglang-*`` that are none of our fields, as arguments of SGLang's server."""
    router_argv: tuple[str, ...] = ()
    """``--router-*``, as arguments of its router."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values by group: what is logged and checkpointed."""
        return asdict(self)
