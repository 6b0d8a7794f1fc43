"""docs/metrics.md against the code: the same names. Runs of tests/e2e are held against it too."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.backends.training_utils.metrics import HIDDEN
from miles.core.console import COLUMNS
from miles.report import SUMMARY
from tests.metrics_page import PAGE, names, unlisted

ROOT = Path(__file__).parents[2]
MODULES = {
    path.relative_to(ROOT / "miles").as_posix(): path.read_text()
    for path in (ROOT / "miles").rglob("*.py")
}
READERS = {"core/console.py", "report.py"}
"""They look metrics up and log none."""
LITERAL = re.compile(r'"((?:perf|rollout|train|eval)/[\w/{}]+)"')
SPAN = r'\.span\(\s*"(\w+)"'
PARTS: dict[tuple[str, str], dict[str, str]] = {
    ("loop.py", "perf/{name}"): {"loop.py": r'_phase\(\s*"\w+", "(\w+)"'},
    ("loop.py", "perf/update_weights/{k}"): {
        "weight_sync/session.py": r'(?:\.span|_together)\(\s*"(\w+)"'
    },
    ("loop.py", "perf/offload/{move}"): {"ray/memory.py": SPAN},
    ("loop.py", "perf/memory/{k}_peak_gib"): {"ray/train/group.py": r'_first\(\s*"(\w+)"'},
    ("backends/training_utils/consume.py", "perf/{name}_time"): {
        "backends/training_utils/consume.py": SPAN
    },
    ("backends/training_utils/metrics.py", "train/{name}"): {
        "backends/training_utils/metrics.py": r'metrics(?:\[| = {)"(\w+)"',
        "backends/training_utils/losses.py": r'(?:^ {8}|sums\[)"(\w+)"(?:: |\])',
        "backends/megatron_utils/router.py": r'"(moe_\w+_loss)"',
    },
    ("rollout/collect.py", "rollout/{name}"): {"rollout/collect.py": r'\.counts\[f?"([^"]+)"\]'},
    ("rollout/evaluate.py", "eval/{name}"): {"rollout/evaluate.py": r'"\{prefix\}(/[^"]+)"'},
    # What a user's function returns.
    ("ray/rollout/manager.py", "eval/{name}"): {},
}
"""Where the code makes names of parts; in which modules the parts are, and how they look there."""
TIMERS_OF_TRAINING = re.compile(r"self\._timer\.span")
AS_ON_THE_PAGE = {"{decision.reason}": "<reason>", "@{k}": "@<k>", "eval//": "eval/<set>/"}


def literals() -> set[tuple[str, str]]:
    """Module and name; with braces where it is made of parts."""
    return {
        (module, name)
        for module, source in MODULES.items()
        if module not in READERS
        for name in LITERAL.findall(source)
    }


def filled(template: str, where: dict[str, str]) -> Iterator[str]:
    before, after = re.split(r"\{\w+\}", template)
    for module, written in where.items():
        parts = re.findall(written, MODULES[module], re.MULTILINE)
        assert parts, (module, written)
        yield from (f"{before}{part}{after}" for part in parts)


def names_in_code() -> set[str]:
    made = {name for (_, template), where in PARTS.items() for name in filled(template, where)}
    made -= {f"train/{name}" for name in HIDDEN}
    for code, page in AS_ON_THE_PAGE.items():
        made = {name.replace(code, page) for name in made}
    return made | {"eval/<set>"} | {name for _, name in literals() if "{" not in name}


def test_names_are_made_of_parts_only_where_this_test_looks() -> None:
    assert {(module, name) for module, name in literals() if "{" in name} == set(PARTS)
    actors = [source for module, source in MODULES.items() if module.endswith("_utils/actor.py")]
    assert len(actors) == 2
    # Spans of these would be metrics too.
    assert not any(TIMERS_OF_TRAINING.search(source) for source in actors)


def test_the_page_has_the_names_of_the_code_and_no_others() -> None:
    assert names() - names_in_code() == set(), "no code logs these"
    assert names_in_code() - names() == set(), "these are not on the page"


def test_names_in_the_text_of_the_page_are_those_of_its_tables() -> None:
    named = set(re.findall(r"`((?:perf|rollout|train|eval)/[^`<]+)`", PAGE.read_text()))
    assert unlisted([dict.fromkeys(named)]) == set()


def test_what_the_console_and_the_report_show_is_on_the_page() -> None:
    shown = {name for _, name, _ in (*COLUMNS, *SUMMARY)}
    assert unlisted([dict.fromkeys(shown)]) == set()


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("rollout/dynamic_filter/drop_zero_std_0.0", True),
        ("eval/digits", True),
        ("eval/digits/pass@4", True),
        ("eval/digits/pass", False),
        ("train/ppo_kl_old", False),
        ("rollout/raw", False),
    ],
)
def test_a_placeholder_stands_for_any_text_and_all_else_for_itself(name: str, listed: bool) -> None:
    assert (unlisted([{name: 1.0}]) == set()) == listed
