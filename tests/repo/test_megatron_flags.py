"""Against the pinned megatron-core: which flags are its own, and that the shared ones agree."""

from importlib.metadata import version
from pathlib import Path

import pytest

from miles.config.flags import add_arguments, flag_specs, read_namespace
from miles.config.root import MilesConfig
from miles.config.values import base_type, is_switch, literal_choices
from scripts import list_megatron_flags

pytestmark = pytest.mark.megatron
GENERATED = Path(__file__).parents[2] / "miles/config/megatron_flags.py"


@pytest.fixture(autouse=True)
def megatron() -> None:
    pytest.importorskip("megatron.training")


def test_the_list_of_megatrons_flags_is_generated() -> None:
    parser = list_megatron_flags.megatron_parser()
    text = list_megatron_flags.render(parser, version("megatron-core"))
    assert GENERATED.read_text() == text


def test_our_flags_fit_on_megatrons_parser_with_our_defaults() -> None:
    parser = list_megatron_flags.megatron_parser()
    add_arguments(parser, MilesConfig)
    assert read_namespace(parser.parse_args([]), MilesConfig) == (MilesConfig(), [])


def test_shared_flags_have_megatrons_name_type_and_choices() -> None:
    parser = list_megatron_flags.megatron_parser()
    actions = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]
    for spec in flag_specs(MilesConfig):
        assert (spec.on in actions) == spec.shared, spec.on
        if not spec.shared:
            continue
        action = actions[spec.on]
        assert action.dest == spec.dest
        assert (action.nargs == 0) == is_switch(spec.annotation)
        assert set(literal_choices(spec.annotation)) == set(action.choices or ())
        if action.nargs is None and not action.choices:
            assert (action.type or str) is base_type(spec.annotation)
