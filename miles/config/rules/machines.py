"""Whether trainer ranks and engines fit machines of ``--num-gpus-per-node`` accelerators.

Not among the rules of every command line: without accelerators a slot is a process.
"""

from miles.config.derived import engines_fit_machines, needs_engines, ranks_fit_machines
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem


def fit_machines(config: MilesConfig) -> list[Problem]:
    """Problems of a job whose slots are accelerators."""
    cluster = config.cluster
    size = cluster.num_gpus_per_node
    ranks, engine = cluster.actor_num_gpus_per_node, cluster.rollout_num_gpus_per_engine
    problems: list[Problem] = []
    if min(size, ranks, engine) < 1:
        return []  # The table of ranges has it.
    if not ranks_fit_machines(config) and not config.observability.debug_rollout_only:
        remedy = (
            f"{ranks} trainer ranks do not fit a machine of {size} GPUs; spread them over more "
            "(--actor-num-nodes), or say how many a machine has (the second)"
        )
        dests = ("actor_num_gpus_per_node", "num_gpus_per_node")
        problems.append(problem(config, *dests, remedy=remedy))
    if needs_engines(config) and not engines_fit_machines(config):
        remedy = (
            f"an engine is on one machine or on all GPUs of several, but {size} / {engine} leaves "
            f"{size % engine} and {engine} / {size} leaves {engine % size}; use a divisor of "
            f"{size} or a multiple, or say how many GPUs a machine has (the second)"
        )
        dests = ("rollout_num_gpus_per_engine", "num_gpus_per_node")
        problems.append(problem(config, *dests, remedy=remedy))
    return problems
