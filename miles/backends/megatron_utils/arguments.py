"""The Megatron backend's side of the command line: what it derives, demands and refuses.

Megatron owns the parser of its runs (``namespace.py``): its options stay out of the frozen config,
which carries them as ``megatron_argv``.
"""

import argparse

from miles.backends.megatron_utils import machine, namespace, package
from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.core import logging

log = logging.get(__name__)


def parse(config: MilesConfig) -> argparse.Namespace:
    """Megatron's validated namespace in a trainer process (RANK and WORLD_SIZE are set).

    Raises ``ConfigError`` for what Megatron refuses on this machine.
    """
    missing = package.problem()
    if missing is not None:
        raise ConfigError([missing])
    flags = machine.flags()
    if flags:
        log.info("%s: %s", machine.reason(), " ".join(flags))
    try:
        args = namespace.parse_args([*flags, *config.megatron_argv])
        namespace.validate(args, config)
    except namespace.MegatronArgumentError as error:
        raise ConfigError([Problem("Megatron", "its arguments", str(error))]) from error
    return args
