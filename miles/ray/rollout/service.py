"""The rollout manager as the driver sees it: typed calls, failures that name the rollout."""

from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles.backends.sglang_utils.package import unserved_tokens
from miles.config.root import MilesConfig
from miles.config.rules.problems import option_name, values_of
from miles.contracts.hooks import HOOKS
from miles.ray.errors import JobError, call, is_death, kill
from miles.ray.rollout.manager import GeneratedBatch, RolloutManager
from miles.rollout.engine_set import EngineAddresses


class RolloutService:
    """Starts the manager's actor and calls it."""

    def __init__(self, config: MilesConfig) -> None:
        # Where the driver is: it reads the same files, and reaches a router on loopback.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here}
        self._user_code = user_code(config)
        # Told here: the actor has no device, by which the engine may be chosen.
        unserved = unserved_tokens(config)
        self._actor: Any = ray.remote(RolloutManager).options(**options).remote(config, unserved)

    async def start(self) -> int | None:
        """Load prompts; return the number of an epoch, ``None`` for recorded rollouts."""
        return await self._call("start", during="start")

    async def set_engines(self, addresses: EngineAddresses) -> None:
        await self._call("set_engines", addresses, during="connecting to the engines")

    async def generate(self, rollout_id: int, dp_size: int) -> GeneratedBatch:
        return await self._call("generate", rollout_id, dp_size, during=f"rollout {rollout_id}")

    async def evaluate(self, step: int) -> dict[str, float]:
        return await self._call("evaluate", step, during=f"evaluation after {step} rollouts")

    async def save(self, folder: Path) -> None:
        await self._call("save", str(folder), during="saving the data position")

    async def load(self, folder: Path) -> None:
        await self._call("load", str(folder), during="resuming the data position")

    def kill(self) -> None:
        kill(self._actor)

    async def _call(self, method: str, *args: Any, during: str) -> Any:
        try:
            return await call(
                "rollout manager", getattr(self._actor, method).remote(*args), during=during
            )
        except JobError as error:
            if not is_death(error) or not self._user_code:
                raise
            raise JobError(
                f"{error}. Its process runs your {', '.join(self._user_code)}: code that calls "
                "os._exit, crashes outside Python or takes all memory ends it"
            ) from error


def user_code(config: MilesConfig) -> list[str]:
    """The flags given, with their values, whose functions run in the manager's process."""
    values = values_of(config)
    return [
        f"{option_name(dest)} {path}"
        for dest in HOOKS
        if dest not in IN_TRAINERS and (path := values[dest]) and not path.startswith("miles.")
    ]


IN_TRAINERS = frozenset(
    (
        "custom_loss_function_path",
        "custom_tis_function_path",
        "custom_megatron_init_path",
        "custom_megatron_before_log_prob_hook_path",
        "custom_megatron_before_train_step_hook_path",
    )
)
"""Hooks that the ranks of the trainer call."""
