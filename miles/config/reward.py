"""How responses are scored."""

from dataclasses import dataclass
from typing import Annotated

from miles.config.flags import Doc


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward: how responses are scored."""

    rm_type: Annotated[
        str | None,
        Doc(
            "Built-in reward: math, reasoning_gym, f1, exact_match, remote_rm, random or "
            "deterministic_random; boxed_ in front takes the \\boxed{} part first. A row's "
            "metadata.rm_type wins."
        ),
    ] = None
    reward_key: Annotated[
        str | None, Doc("Key of the number to train on, when the reward is an object.")
    ] = None
    eval_reward_key: Annotated[
        str | None, Doc("Key of the number to report in evaluation; by default --reward-key.")
    ] = None
    group_rm: Annotated[bool, Doc("Call the reward once for a whole group.")] = False
    rm_url: Annotated[str | None, Doc("Address of the remote reward.")] = None
    rm_timeout_s: Annotated[float, Doc("Time-out of one reward call, s.")] = 60.0
    rm_max_retries: Annotated[int, Doc("Retries of a failed reward call.")] = 2
    rm_default: Annotated[
        float, Doc("Reward of a sample whose reward call failed for good (with a warning).")
    ] = 0.0
