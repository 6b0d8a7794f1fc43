"""What fits machines of --num-gpus-per-node accelerators."""

from collections.abc import Callable

import pytest

from miles.config.root import MilesConfig
from miles.config.rules.machines import fit_machines
from miles.core import device
from miles.utils.arguments import check_machines

Resolved = Callable[..., tuple[MilesConfig, frozenset[str]]]

ENGINE = "--rollout-num-gpus-per-engine"


@pytest.mark.parametrize(
    "argv",
    [
        (),
        (ENGINE, "2"),
        (ENGINE, "8"),
        (ENGINE, "16"),
        ("--num-gpus-per-node", "4", "--actor-num-gpus-per-node", "4", ENGINE, "12"),
        ("--num-gpus-per-node", "16", "--actor-num-gpus-per-node", "16"),
        # Without a trainer the number of its ranks says nothing.
        ("--num-gpus-per-node", "4", "--debug-rollout-only"),
    ],
)
def test_what_fits(argv: tuple[str, ...], resolved: Resolved) -> None:
    assert fit_machines(resolved(*argv)[0]) == []


def test_more_ranks_than_a_machine_has_are_refused(resolved: Resolved) -> None:
    (problem,) = fit_machines(resolved("--num-gpus-per-node", "4")[0])
    assert problem.flag == "--actor-num-gpus-per-node, --num-gpus-per-node"
    assert problem.value == (8, 4)
    assert "8 trainer ranks do not fit a machine of 4 GPUs" in problem.remedy


@pytest.mark.parametrize(
    ("size", "arithmetic"), [("3", "8 / 3 leaves 2"), ("12", "12 / 8 leaves 4")]
)
def test_an_engine_that_divides_no_machines_is_refused_with_the_arithmetic(
    size: str, arithmetic: str, resolved: Resolved
) -> None:
    (problem,) = fit_machines(resolved(ENGINE, size)[0])
    assert problem.flag == f"{ENGINE}, --num-gpus-per-node"
    assert arithmetic in problem.remedy


@pytest.mark.parametrize("on_accelerators", [False, True])
def test_where_a_slot_is_a_process_everything_fits(
    on_accelerators: bool, resolved: Resolved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "has_accelerator", lambda: on_accelerators)
    config = resolved("--actor-num-gpus-per-node", "16")[0]
    assert bool(check_machines(config)) is on_accelerators
