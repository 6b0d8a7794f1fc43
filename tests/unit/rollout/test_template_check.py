"""A broken chat template is one problem of the flag that brings it, found at parse."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from miles.config.errors import Problem
from miles.rollout import prompts, template_check
from scripts.made_models import make_tokenizer
from tests.unit.rollout.scripted import made_config


@pytest.fixture
def rows(tmp_path: Path) -> str:
    lines = [json.dumps({"input": f"n{i}", "y": "a"}) for i in range(30)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "d.jsonl")


@pytest.fixture
def bare_model(tiny_qwen3: Path, tmp_path: Path) -> str:
    """A model whose tokenizer has no chat template."""
    folder = Path(copytree(tiny_qwen3, tmp_path / "bare"))
    for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def problems(model: Any, rows: str, template: Path | None = None, **changes: Any) -> list[Problem]:
    path = None if template is None else str(template)
    changes = {"apply_chat_template": True, **changes}
    return prompts.check(
        made_config(hf_checkpoint=str(model), prompt_data=rows, chat_template_path=path, **changes)
    )


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('tools are needed') }}", "tools are needed"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[0].content.nothing() }}", "nothing"),
        ("{{ '' }}", "'input' is empty"),
    ],
)
def test_a_broken_template_is_one_problem_of_its_flag(
    tiny_qwen3: Path, rows: str, tmp_path: Path, template: str, says: str
) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text(template)
    evaluation = {"eval_prompt_data": ("held-out", rows)}
    (problem,) = problems(tiny_qwen3, rows, path, **evaluation)
    assert (problem.flag, problem.value) == ("--chat-template-path", str(path))
    assert f"does not render any of the first 30 rows of --prompt-data {rows}" in problem.remedy
    assert "line 1: " in problem.remedy
    assert "line 2: " not in problem.remedy
    assert says in problem.remedy


def test_a_template_that_some_rows_fit_is_fine(tiny_qwen3: Path, rows: str, tmp_path: Path) -> None:
    """The other rows are listed when they are rendered."""
    path = tmp_path / "picky.jinja"
    path.write_text("{% if messages[0].content != 'n7' %}{{ raise_exception('no') }}{% endif %}x")
    assert problems(tiny_qwen3, rows, path) == []


def test_a_tokenizer_without_template_is_the_problem_of_the_flag_that_needs_it(
    bare_model: str, rows: str, tmp_path: Path
) -> None:
    (problem,) = problems(bare_model, rows)
    assert problem.flag == "--apply-chat-template"
    assert "has no chat template; give one with --chat-template-path" in problem.remedy
    assert problems(bare_model, rows, apply_chat_template=False) == []
    path = tmp_path / "good.jinja"
    path.write_text("{{ messages[0].content }}")
    assert problems(bare_model, rows, path) == []


def test_conversations_of_supervised_training_need_a_template_without_any_flag(
    bare_model: str, tmp_path: Path
) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"input": talk}) + "\n")
    (problem,) = problems(
        bare_model, str(tmp_path / "t.jsonl"), apply_chat_template=False, loss_type="sft_loss"
    )
    assert problem.flag == "--chat-template-path"
    assert "has no chat template" in problem.remedy


def test_a_family_of_problems_is_rendered_too(bare_model: str) -> None:
    (problem,) = problems(bare_model, "reasoning_gym:chain_sum", rm_type="reasoning_gym")
    assert problem.flag == "--apply-chat-template"


def test_what_other_checks_find_missing_is_left_to_them(rows: str, tmp_path: Path) -> None:
    assert problems(tmp_path / "nowhere", rows) == []
    config = made_config(prompt_data=rows, chat_template_path="no.jinja", apply_chat_template=True)
    assert prompts.check(config) == []
    assert [p.remedy for p in template_check.check_file(config)] == ["there is no such file"]


@pytest.mark.parametrize(
    ("content", "says"), [(b"\xff\xfe\x00", "cannot be read as text"), (b" \n", "is empty")]
)
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "b.jinja"
    path.write_bytes(content)
    (problem,) = template_check.check_file(made_config(chat_template_path=str(path)))
    assert problem.flag == "--chat-template-path"
    assert says in problem.remedy


def test_a_tokenizer_that_cannot_be_loaded_is_the_models_problem(
    tiny_qwen3: Path, rows: str, tmp_path: Path
) -> None:
    folder = Path(copytree(tiny_qwen3, tmp_path / "odd"))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (problem,) = problems(folder, rows)
    assert problem.flag == "--hf-checkpoint"
    assert "has no usable tokenizer" in problem.remedy
