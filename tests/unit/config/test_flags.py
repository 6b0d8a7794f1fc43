"""Dataclass fields to argparse and back."""

import argparse
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from miles.config.flags import UNSET, Doc, Flag, add_arguments, flag_specs, read_namespace


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed: how fast."""

    max_speed: Annotated[float, Doc("Top speed, 100 % of it."), Flag(shared=True)] = 2.5
    gear: Annotated[Literal["low", "high"] | None, Doc("Gear.")] = None
    hybrid: Annotated[bool, Doc("Two engines."), Flag(shared=True)] = False
    brake: Annotated[bool, Doc("Brake."), Flag(name="--disable-brake")] = True
    keep_lane: Annotated[bool, Doc("Keep the lane.")] = True
    lights: Annotated[bool | None, Doc("Lights.")] = None
    no_radio: Annotated[bool, Doc("No radio.")] = False


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load: what is on board."""

    boxes: Annotated[tuple[int, ...], Doc("Boxes.")] = ()
    labels: Annotated[dict[str, Any], Doc("Labels.")] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Car:
    speed: Speed = field(default_factory=Speed)
    load: Load = field(default_factory=Load)


def read(*argv: str, parser: argparse.ArgumentParser | None = None) -> Car:
    parser = parser or argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, Car)
    config, problems = read_namespace(parser.parse_args(argv), Car)
    assert not problems
    return config


def test_no_arguments_give_the_defaults() -> None:
    assert read() == Car()


def test_every_kind_of_field_is_read_from_its_flag() -> None:
    car = read(
        *("--max-speed", "3", "--gear", "low", "--hybrid", "--disable-brake", "--no-keep-lane"),
        *("--no-lights", "--no-radio", "--boxes", "1", "-2", "--labels", '{"a": [1]}'),
    )
    assert car == Car(
        speed=Speed(
            max_speed=3.0,
            gear="low",
            hybrid=True,
            brake=False,
            keep_lane=False,
            lights=False,
            no_radio=True,
        ),
        load=Load(boxes=(1, -2), labels={"a": [1]}),
    )


def test_every_switch_has_an_opposite_and_the_last_one_wins() -> None:
    car = read("--hybrid", "--no-hybrid", "--disable-brake", "--brake", "--no-radio", "--radio")
    assert car == Car()
    assert read("--no-lights", "--lights").speed.lights is True


def test_groups_are_titled_by_the_docstring_and_show_the_flag_that_changes_the_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Car)
    text = parser.format_help()
    assert "Speed:\n  how fast." in text
    assert "Load:\n  what is on board." in text
    assert "--disable-brake" in text
    assert "Switch off: Brake." in text
    assert "--brake " not in text
    assert "Top speed, 100 % of it. [2.5]" in " ".join(text.split())
    assert "{low,high}" in text


def test_a_shared_option_keeps_its_declaration_and_gets_our_default() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--max-speed", type=float, default=99.0, help="theirs")
    parser.add_argument("--hybrid", action="store_true", default=None)
    assert read(parser=parser) == Car()
    assert read("--max-speed", "7", "--hybrid", parser=_with_options()).speed.max_speed == 7.0
    assert "theirs" in parser.format_help()


def _with_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--max-speed", type=float)
    parser.add_argument("--hybrid", action="store_true")
    return parser


def test_a_shared_option_is_checked_for_finite_numbers_too() -> None:
    parser = _with_options()
    add_arguments(parser, Car)
    config, problems = read_namespace(parser.parse_args(["--max-speed", "nan"]), Car)
    assert [problem.flag for problem in problems] == ["--max-speed"]
    assert config == Car()


def test_an_option_that_collides_without_being_shared_is_a_bug() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gear")
    with pytest.raises(AssertionError, match="--gear"):
        add_arguments(parser, Car)


def test_unreadable_values_are_all_reported_and_have_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Car)
    argv = ["--max-speed", "x", "--gear", "middle", "--boxes", "1", "b", "--labels", "3"]
    config, problems = read_namespace(parser.parse_args(argv), Car)
    assert [(p.flag, p.value) for p in problems] == [
        ("--max-speed", "x"),
        ("--gear", "middle"),
        ("--boxes", "b"),
        ("--labels", "3"),
    ]
    assert config == Car()


def test_flags_that_are_unset_have_their_defaults() -> None:
    namespace = argparse.Namespace(**{spec.dest: UNSET for spec in flag_specs(Car)})
    namespace.gear = "high"
    assert read_namespace(namespace, Car) == (Car(speed=Speed(gear="high")), [])
