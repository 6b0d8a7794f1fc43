"""What the documents say can be done: their commands, flags, paths and links exist."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.config.flags import flag_specs
from miles.config.megatron_flags import MEGATRON_FLAGS, REFUSED_FLAGS
from miles.config.root import MilesConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "benchmarks/README.md", *ROOT.glob("docs/*.md")])
OURS = {option for spec in flag_specs(MilesConfig) for option in spec.options}
OURS |= {"--config", "--help", "--help-megatron", "--help-sglang", "--help-router"}
OURS |= {f"--{name}" for name in MEGATRON_FLAGS - REFUSED_FLAGS}
PASSED_THROUGH = ("--sglang-", "--router-")
OF_OTHERS = {
    "pip": ("--no-deps",),
    "ray start": ("--head", "--address", "--node-ip-address", "--port", "--num-gpus"),
    "ray get-auth-token": ("--generate",),
    "torchrun": ("--nproc-per-node",),
    "sglang": (
        *("--api-key", "--device", "--attention-backend", "--enable-dp-attention", "--ep-size"),
        *("--enable-memory-saver", "--moe-a2a-backend", "--moe-runner-backend"),
        *("--skip-server-warmup", "--disable-health-check"),
    ),
}
"""Flags that the pages name of programs that are not ours."""
PATHS = re.compile(r"`((?:docs|scripts|tools|benchmarks|miles|miles_plugins|tests)/[\w./-]+\.\w+)`")
LINKS = re.compile(r"\]\(([^)\s]+)\)")


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each command of the page's shell blocks."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                yield words


COMMANDS = [
    pytest.param(words, id=f"{page.name}-{' '.join(words)[:50]}")
    for page in PAGES
    for words in commands(page)
]


def fields_of(source: Path) -> set[str]:
    """Flags of a script: the fields of its dataclasses, and what it adds to a parser."""
    tree = ast.parse(source.read_text())
    fields = {
        field.target.id
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for field in cls.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    added = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("--")
    }
    dashed = {name.replace("_", "-") for name in fields}
    return {f"--{name}" for name in dashed} | {f"--no-{name}" for name in dashed} | added


def flags_in(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_names_programs_and_flags_that_exist(words: list[str]) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == []
    if not re.fullmatch(r"(\.venv/bin/)?python3?", words[0]):
        return
    if words[1] == "-m":
        program, given = words[2], words[3:]
        spec = importlib.util.find_spec(program)
        assert spec is not None or program.startswith("sglang")
    else:
        program, given = words[1], words[2:]
        assert (ROOT / program).is_file()
    of_run = {flag for flag in flags_in(given) if not flag.startswith(PASSED_THROUGH)}
    if program in ("train.py", "miles.plan"):
        own = fields_of(ROOT / "miles/plan/__main__.py") if program == "miles.plan" else set[str]()
        assert of_run - OURS - own == set()
    elif program.startswith(("scripts/", "benchmarks/", "tools/")):
        assert of_run - fields_of(ROOT / program) - OURS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_paths_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    known = OURS | {flag for flags in OF_OTHERS.values() for flag in flags}
    known |= {f"--{name}" for name in MEGATRON_FLAGS}
    for folder in ("scripts", "tools", "benchmarks", "miles/plan"):
        for source in (ROOT / folder).glob("*.py"):
            known |= fields_of(source)
    for module in ("miles/report.py", "miles/utils/external_utils/model_args_utils.py"):
        known |= fields_of(ROOT / module)
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w-]+)", text))
    unknown = {name for name in named - known if not name.startswith(PASSED_THROUGH)}
    assert {name for name in unknown if not name.endswith("-")} == set()
    assert [path for path in PATHS.findall(text) if not (ROOT / path).exists()] == []


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINKS.findall(page.read_text()):
        if link.startswith("http"):
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), link
        if anchor:
            assert anchor in anchors(there), link
