"""Derivations (``resolve``) and constraints (``check``) of a config: tables of pure rules."""

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.applies import APPLIES_CHECKS
from miles.config.rules.conflicts import CONFLICT_CHECKS
from miles.config.rules.external import EXTERNAL_CHECKS
from miles.config.rules.lengths import LENGTH_CHECKS
from miles.config.rules.notes import notes
from miles.config.rules.offload import OFFLOAD_CHECKS
from miles.config.rules.places import PLACE_CHECKS
from miles.config.rules.problems import Check, Given
from miles.config.rules.ranges import RANGE_CHECKS
from miles.config.rules.required import REQUIRED_CHECKS
from miles.config.rules.resolve import RESOLVE, resolve

__all__ = ["CHECK", "RESOLVE", "check", "notes", "resolve"]

CHECK: tuple[Check, ...] = (
    *REQUIRED_CHECKS,
    *RANGE_CHECKS,
    *APPLIES_CHECKS,
    *LENGTH_CHECKS,
    *CONFLICT_CHECKS,
    *EXTERNAL_CHECKS,
    *OFFLOAD_CHECKS,
    *PLACE_CHECKS,
)


def check(config: MilesConfig, given: Given = frozenset()) -> list[Problem]:
    """Everything wrong with a resolved config; ``given`` are the fields that a user named."""
    return [problem for rule in CHECK for problem in rule(config, given)]
