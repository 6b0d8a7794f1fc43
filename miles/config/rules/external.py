"""Engines that were launched elsewhere (``--rollout-external``), and a router that was."""

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem
from miles.config.values import split_address


def addresses_are_given(config: MilesConfig, given: Given) -> list[Problem]:
    """Nobody finds them otherwise."""
    rollout = config.rollout
    if not rollout.rollout_external or rollout.rollout_external_engine_addrs:
        return []
    remedy = "is required with --rollout-external: HOST:PORT of each engine"
    return [problem(config, "rollout_external_engine_addrs", remedy=remedy)]


def addresses_are_complete(config: MilesConfig, given: Given) -> list[Problem]:
    """Each is a host and a port, and stands there once."""
    addresses = config.rollout.rollout_external_engine_addrs
    wrong = [address for address in addresses if split_address(address) is None]
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    problems: list[Problem] = []
    if wrong:
        remedy = f"must be HOST:PORT, without http://; not so: {', '.join(wrong)}"
        problems.append(problem(config, "rollout_external_engine_addrs", remedy=remedy))
    if twice:
        remedy = f"an engine counts once; twice there: {', '.join(twice)}"
        problems.append(problem(config, "rollout_external_engine_addrs", remedy=remedy))
    return problems


def router_is_a_host(config: MilesConfig, given: Given) -> list[Problem]:
    """Its port has a flag of its own."""
    host = config.rollout.sglang_router_ip
    if host is None:
        return []
    ipv6 = host.count(":") > 1 and not host.startswith("[")
    if split_address(f"[{host}]:1" if ipv6 else f"{host}:1") is not None:
        return []
    remedy = "must be the address or name of a machine, without http:// and port"
    return [problem(config, "sglang_router_ip", remedy=remedy)]


def external_engines_keep_their_devices(config: MilesConfig, given: Given) -> list[Problem]:
    """Their devices are not the trainer's, and their memory is theirs."""
    if not config.rollout.rollout_external:
        return []
    problems: list[Problem] = []
    if config.cluster.colocate:
        remedy = (
            "engines launched elsewhere are on devices of their own, and take weights by "
            "broadcast; leave one out"
        )
        problems.append(problem(config, "rollout_external", "colocate", remedy=remedy))
    if config.offload.offload_rollout and "offload_rollout" in given:
        remedy = "engines launched elsewhere keep their memory; leave one out"
        problems.append(problem(config, "rollout_external", "offload_rollout", remedy=remedy))
    return problems


EXTERNAL_CHECKS: tuple[Check, ...] = (
    addresses_are_given,
    addresses_are_complete,
    router_is_a_host,
    external_engines_keep_their_devices,
)
