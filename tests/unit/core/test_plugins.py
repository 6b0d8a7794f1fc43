"""User code by dotted path."""

import re
from pathlib import Path

import pytest

from miles.core.plugins import PluginError, load_function


def expected(sample: int, config: str) -> float: ...  # pyright: ignore[reportReturnType]


async def expected_async(sample: int) -> float: ...  # pyright: ignore[reportReturnType]


def good(sample: int, config: str) -> float:
    return 1.0


def any_names(a: int, b: str, extra: int = 0) -> float:
    return 1.0


def too_few(sample: int) -> float:
    return 1.0


class Callable:
    def __call__(self, sample: int, config: str) -> float:
        return 2.0


instance = Callable()


@pytest.mark.parametrize("name", ["good", "any_names", "instance"])
def test_a_function_that_can_be_called_as_declared_is_accepted(name: str) -> None:
    assert load_function(f"{__name__}.{name}", expected)(1, "x") > 0


def test_a_function_with_too_few_parameters_is_refused_with_both_signatures() -> None:
    with pytest.raises(PluginError, match=re.escape("(sample: int, config: str)")):
        load_function(f"{__name__}.too_few", expected)


def test_a_plain_function_where_async_is_declared_is_refused() -> None:
    with pytest.raises(PluginError, match="must be async"):
        load_function(f"{__name__}.too_few", expected_async)


def test_an_unknown_module_says_what_to_check() -> None:
    with pytest.raises(PluginError, match="PYTHONPATH"):
        load_function("no_such_module_anywhere.f", expected)


def test_a_module_that_lacks_another_one_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_another.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"no_such_module_anywhere.*not installed here"):
        load_function("lacks_another.f", expected)


def test_an_unknown_attribute_names_the_module() -> None:
    with pytest.raises(PluginError, match="has no 'nothing'"):
        load_function(f"{__name__}.nothing", expected)
