"""User code is checked when the command line is parsed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles.config.errors import Problem
from miles.config.hooks import HooksConfig
from miles.config.reward import RewardConfig
from miles.config.root import MilesConfig
from miles.contracts.hook_check import check_hooks
from miles.contracts.hooks import HOOKS

CODE = """
import abc

TOOLS = [{"type": "function", "function": {"name": "add"}}]
NOT_TOOLS = "add"

def reward(sample, config): return 1.0
async def async_reward(sample, config): return 1.0
def group_of_samples(samples, config): return [1.0]
def too_few(sample): return 1.0
async def generate(prompt, context): return []
def not_async(prompt, context): return []

class Source:
    def __init__(self, config, tokenizer): ...
    def __len__(self): return 1
    def next(self, num_prompts): return []
    def state_dict(self): return {}
    def load_state_dict(self, state): ...

class Empty:
    def __init__(self, config, tokenizer): ...

class NextTakesNothing(Source):
    def next(self): return []

class Unfinished(Source, abc.ABC):
    @abc.abstractmethod
    def next(self, num_prompts): ...

def make_source(config, tokenizer): return Source(config, tokenizer)
"""


@pytest.fixture(scope="module", autouse=True)
def user_code(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("code")
    (folder / "user_hooks.py").write_text(CODE)
    (folder / "user_broken.py").write_text("def f(:\n")
    (folder / "user_needs.py").write_text("import a_package_that_is_not_there\n")
    (folder / "user_unset.py").write_text("import os\nHOST = os.environ['UNSET_BY_ALL']\n")
    (folder / "user_program.py").write_text("import sys\n\nsys.exit(3)\n")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    yield
    patch.undo()


def problems(group_rm: bool = False, **hooks: str) -> list[Problem]:
    config = MilesConfig(hooks=HooksConfig(**hooks))
    return check_hooks(replace(config, reward=RewardConfig(group_rm=group_rm)))


def test_hooks_that_match_their_signature_are_accepted() -> None:
    assert problems() == []
    assert problems(custom_rm_path="user_hooks.reward") == []
    assert problems(custom_rm_path="user_hooks:async_reward") == []
    assert problems(custom_rm_path="user_hooks.group_of_samples", group_rm=True) == []
    assert problems(custom_generate_function_path="user_hooks.generate") == []
    assert problems(data_source_path="user_hooks.Source") == []
    assert problems(generate_tool_specs_path="user_hooks.TOOLS") == []


@pytest.mark.parametrize(
    ("hook", "path", "says"),
    [
        ("custom_rm_path", "user_hooks.too_few", "needed is (sample"),
        ("custom_rm_path", "user_hooks.absent", "has no 'absent'"),
        ("custom_rm_path", "user_hooks.TOOLS", "not callable"),
        ("custom_rm_path", "reward", "not a dotted path"),
        ("custom_rm_path", "user_absent.reward", "PYTHONPATH"),
        ("custom_rm_path", "user_needs.reward", "a_package_that_is_not_there"),
        ("custom_rm_path", "user_broken.f", "invalid syntax"),
        ("custom_rm_path", "user_unset.f", "user_unset.py, line 2)"),
        ("custom_rm_path", "user_program.f", "user_program.py, line 3)"),
        ("generate_tool_specs_path", "user_program.TOOLS", "SystemExit: 3"),
        ("custom_generate_function_path", "user_hooks.not_async", "must be async"),
        ("data_source_path", "user_hooks.Empty", "lacks __len__, next, state_dict"),
        ("data_source_path", "user_hooks.NextTakesNothing", "NextTakesNothing.next' has signature"),
        ("data_source_path", "user_hooks.Unfinished", "leaves next abstract"),
        ("data_source_path", "user_hooks.make_source", "is no class"),
        ("data_source_path", "user_hooks.TOOLS", "not callable"),
        ("generate_tool_specs_path", "user_hooks.NOT_TOOLS", "list of tool schemas"),
        ("generate_tool_specs_path", "user_hooks.absent", "has no 'absent'"),
    ],
)
def test_a_hook_that_cannot_be_used_names_flag_path_and_reason(
    hook: str, path: str, says: str
) -> None:
    (problem,) = problems(**{hook: path})
    assert problem.flag == f"--{hook.replace('_', '-')}"
    assert problem.value == path
    assert says in problem.remedy


def test_group_rewards_take_another_signature(tmp_path: Path) -> None:
    (problem,) = problems(custom_rm_path="user_hooks.too_few", group_rm=True)
    assert "needed is (samples" in problem.remedy


def test_every_bad_hook_is_reported() -> None:
    found = problems(**dict.fromkeys(HOOKS, "user_absent.f"))
    assert len(found) == len(HOOKS)
