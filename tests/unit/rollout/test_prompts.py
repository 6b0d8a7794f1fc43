import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from miles.config.errors import ConfigError
from miles.rollout.prompts import PromptSource, check, eval_sources, make_source
from tests.unit.rollout.scripted import ListSource, made_config


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    """Ten rows: input n0 .. n9, label 0 .. 9."""
    return write_rows(tmp_path / "n.jsonl", [{"input": f"n{i}", "y": i} for i in range(10)])


def source_of(tokenizer: Any, spec: str, **changes: Any) -> PromptSource:
    return PromptSource(made_config(prompt_data=spec, **changes), tokenizer)


def texts(source: PromptSource, num: int) -> list[str]:
    return [prompt.text for prompt in source.next(num)]


def error_of(tokenizer: Any, spec: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        source_of(tokenizer, spec, **changes)
    return str(caught.value)


def test_a_row_becomes_a_prompt_with_tokens_label_and_metadata(
    tmp_path: Path, tokenizer: Any
) -> None:
    row = {"q": "a=", "y": "b", "metadata": {"rm_type": "f1"}, "tools": '[{"name": "t"}]'}
    spec = write_rows(tmp_path / "d.jsonl", [row])
    (prompt,) = source_of(tokenizer, spec, input_key="q", label_key="y").next(1)
    assert prompt.text == "a="
    assert list(prompt.tokens) == tokenizer.convert_tokens_to_ids(["a", "="])
    assert prompt.label == "b"
    assert prompt.metadata == {"rm_type": "f1"}
    assert prompt.tools == ({"name": "t"},)


@pytest.mark.parametrize(
    ("value", "label"), [("x", "x"), (4, "4"), (1.5, "1.5"), (True, "true"), (None, None)]
)
def test_a_label_is_text_or_nothing(
    tmp_path: Path, tokenizer: Any, value: Any, label: str | None
) -> None:
    spec = write_rows(tmp_path / "d.jsonl", [{"input": "a", "y": value}])
    assert source_of(tokenizer, spec, label_key="y").next(1)[0].label == label


COMPARED = [
    {"rm_type": "math"},
    {"rm_type": "boxed_exact_match"},
    {"rm_type": "random", "metadata": {"rm_type": "f1"}},
    {"rm_type": "reasoning_gym", "metadata": {"source_dataset": "chain_sum"}},
    {"loss_type": "sft_loss"},
]


@pytest.mark.parametrize("settings", COMPARED)
def test_a_label_that_is_compared_as_text_is_text_or_a_whole_number(
    tmp_path: Path, tokenizer: Any, settings: dict[str, Any]
) -> None:
    """A float, a boolean or a list has more than one text, and null has none."""
    changes = {k: v for k, v in settings.items() if k != "metadata"}
    row = {"input": "a", "metadata": settings.get("metadata")}
    labels = ["1.50", 4, -(2**70), None, 1.5, True, ["a"], {"a": 1}]
    spec = write_rows(tmp_path / "d.jsonl", [{**row, "y": label} for label in labels])
    message = error_of(tokenizer, spec, label_key="y", **changes)
    assert "5 rows cannot be used" in message
    null = "nothing to train on" if settings == COMPARED[-1] else "'y' is null"
    said = {4: null, 5: "'y' is float", 6: "'y' is bool", 7: "'y' is list", 8: "'y' is dict"}
    for number, what in said.items():
        assert f"line {number}: {what}" in message
    spec = write_rows(tmp_path / "d.jsonl", [{**row, "y": label} for label in labels[:3]])
    kept = source_of(tokenizer, spec, label_key="y", **changes).next(3)
    assert [prompt.label for prompt in kept] == ["1.50", "4", "-1180591620717411303424"]


@pytest.mark.parametrize(
    "changes", [{"custom_rm_path": "json.loads"}, {"rm_type": "remote_rm"}, {"rm_type": "random"}]
)
def test_a_reward_that_reads_labels_its_own_way_gets_them_all(
    tmp_path: Path, tokenizer: Any, changes: dict[str, Any]
) -> None:
    labels = ["x", 4, 1.5, True, ["a", None], {"a": 1}, None]
    spec = write_rows(tmp_path / "d.jsonl", [{"input": "a", "y": label} for label in labels])
    prompts = source_of(tokenizer, spec, label_key="y", **changes).next(len(labels))
    wanted = ["x", "4", "1.5", "true", '["a", null]', '{"a": 1}', None]
    assert [prompt.label for prompt in prompts] == wanted


def test_columns_of_a_parquet_file_that_became_floats_are_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    """What pandas writes for whole numbers of which some are missing."""
    table = pyarrow.table({"input": ["a", "b"], "y": [4.0, float("nan")]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    spec = str(tmp_path / "d.parquet")
    assert "row 2: 'y' is float" in error_of(tokenizer, spec, label_key="y", rm_type="f1")
    message = error_of(tokenizer, spec, label_key="y", rm_type="random")
    assert "1 row cannot be used" in message
    assert "row 2: 'y' cannot be written as JSON" in message


@pytest.mark.parametrize("what", ["page header", "values", "text"])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "d.parquet"
    text = "a text"
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    table = pyarrow.table({"input": [text] * 9})
    pyarrow.parquet.write_table(table, path, write_statistics=False, **plain)
    content = bytearray(path.read_bytes())
    first = content.index(text.encode())
    start, stop = {
        "page header": (4, 24),
        "values": (first - 4, first),
        "text": (first, first + 1),
    }[what]
    content[start:stop] = b"\xff" * (stop - start)
    path.write_bytes(content)
    (problem,) = check(made_config(prompt_data=str(path), rm_type="random"))
    assert (problem.flag, problem.value) == ("--prompt-data", str(path))
    assert "the file: not a readable parquet file (" in problem.remedy


def test_rows_that_no_reward_can_score_are_refused_when_flags_are_parsed(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input": "a"},
        {"input": "a", "metadata": {"rm_type": "maths"}},
        {"input": "a", "metadata": {"rm_type": 7}},
        {"input": "a", "metadata": {"rm_type": "reasoning_gym"}},
        {"input": "a", "metadata": {"rm_type": "math"}},
    ]
    spec = write_rows(tmp_path / "d.jsonl", rows)
    (problem,) = check(made_config(prompt_data=spec, rm_type="random"))
    said = {2: "no reward is called 'maths'; there are: ", 3: "no reward is called 7"}
    said |= {
        4: "the row's metadata names no reasoning-gym family",
        5: "there is no label (--label-key)",
    }
    assert "4 rows cannot be used" in problem.remedy
    for number, what in said.items():
        assert f"line {number}: {what}" in problem.remedy
    assert "did you mean math?" in problem.remedy
    # The flag has the problem, not the rows.
    for rm_type in ("maths", "math"):
        assert (
            check(
                made_config(prompt_data=write_rows(tmp_path / "e.jsonl", rows[:1]), rm_type=rm_type)
            )
            == []
        )


def test_rows_that_no_family_of_reasoning_gym_grades_are_refused_when_flags_are_parsed(
    tmp_path: Path,
) -> None:
    recipe = {"family": "chain_sum", "kwargs": {"seed": 1}, "index": 0}
    metadata: list[dict[str, Any]] = [
        {"source_dataset": "chain_sum"},
        {"source_dataset": "chain_sun"},
        {"source_dataset": None},
        {"reasoning_gym": recipe},
        {"reasoning_gym": {**recipe, "family": "nosuch"}},
        {"reasoning_gym": "chain_sum"},
    ]
    rows = [
        {"input": "a", "y": "1", "metadata": {"rm_type": "reasoning_gym", **m}} for m in metadata
    ]
    spec = write_rows(tmp_path / "d.jsonl", rows)
    (problem,) = check(made_config(prompt_data=spec, rm_type="random", label_key="y"))
    assert (problem.flag, problem.value) == ("--prompt-data", spec)
    assert "4 rows cannot be used" in problem.remedy
    family = "reasoning-gym has no such family"
    said = {
        2: f"metadata.source_dataset is 'chain_sun': {family}; did you mean chain_sum",
        3: f"metadata.source_dataset is None: {family}; it has ab, acre",
        5: f"metadata.reasoning_gym.family is 'nosuch': {family}",
        6: "metadata.reasoning_gym must be {family, kwargs, index}",
    }
    for number, what in said.items():
        assert f"line {number}: {what}" in problem.remedy


def test_a_row_with_a_remote_reward_needs_its_address_which_needs_such_a_row(
    tmp_path: Path,
) -> None:
    remote = {"input": "a", "metadata": {"rm_type": "remote_rm"}}
    spec = write_rows(tmp_path / "d.jsonl", [{"input": "a"}, remote])
    (problem,) = check(made_config(prompt_data=spec, rm_type="random"))
    assert problem.flag == "--prompt-data"
    assert "line 2: metadata.rm_type is remote_rm; give its address (--rm-url)" in problem.remedy
    url = "http://host:80/rm"
    assert check(made_config(prompt_data=spec, rm_type="random", rm_url=url)) == []
    without = made_config(prompt_data=f"{spec}@[:1]", rm_type="random", rm_url=url)
    (problem,) = check(without)
    assert (problem.flag, problem.value) == ("--rm-url", url)
    evaluated = made_config(
        prompt_data=f"{spec}@[:1]", eval_prompt_data=("e", spec), rm_type="random", rm_url=url
    )
    assert check(evaluated) == []


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("[2:4]", [2, 3]),
        ("[:2]", [0, 1]),
        ("[-2:]", [8, 9]),
        ("[:-8]", [0, 1]),
        ("[:]", list(range(10))),
        ("[8:99]", [8, 9]),
    ],
)
def test_a_slice_takes_the_rows_it_names(
    numbered: str, tokenizer: Any, rows: str, wanted: list[int]
) -> None:
    source = source_of(tokenizer, f"{numbered}@{rows}")
    assert len(source) == len(wanted)
    assert texts(source, len(wanted)) == [f"n{i}" for i in wanted]


def test_a_slice_without_rows_and_an_empty_file_are_refused(
    tmp_path: Path, numbered: str, tokenizer: Any
) -> None:
    assert "no row is left of 10" in error_of(tokenizer, f"{numbered}@[20:]")
    (tmp_path / "empty.jsonl").write_text("")
    assert "no row is left" in error_of(tokenizer, str(tmp_path / "empty.jsonl"))


def test_parquet_rows_are_read_like_json_lines(tmp_path: Path, tokenizer: Any) -> None:
    table = pyarrow.table(
        {
            "input": [[{"role": "user", "content": "hi", "name": None}]] * 2,
            "y": [1, 2],
            "metadata": [{"k": "a"}, None],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    spec = str(tmp_path / "d.parquet") + "@[1:]"
    (prompt,) = source_of(tokenizer, spec, label_key="y", apply_chat_template=True).next(1)
    assert prompt.messages == ({"role": "user", "content": "hi"},)
    assert prompt.label == "2"
    assert prompt.metadata == {}


def test_every_bad_row_is_named_with_its_line_and_none_is_skipped(
    tmp_path: Path, tokenizer: Any
) -> None:
    lines = [
        b'\xef\xbb\xbf{"input": "fine", "y": "1"}',
        b"",
        b'{"input": "cut", ',
        b'{"question": "no input key", "y": "1"}',
        b'{"input": 7, "y": "1"}',
        b'["not an object"]',
        b'{"input": "no label"}',
        b'{"input": "bad \xff byte", "y": "1"}',
        b'\xef\xbb\xbf{"input": "mark inside", "y": "1"}',
        b'{"input": "", "y": "1"}',
        b'{"input": "m", "y": "1", "metadata": [1]}',
        b'{"input": "fine too", "y": "1"}',
    ]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    spec = str(tmp_path / "d.jsonl")
    message = error_of(tokenizer, spec, label_key="y")
    assert "10 rows cannot be used" in message
    said = {3: "not JSON", 4: "no key 'input'", 5: "'input' is int", 6: "list instead of an object"}
    said |= {2: "blank", 7: "no key 'y'", 8: "not JSON", 9: "a byte order mark"}
    said |= {10: "'input' is empty", 11: "'metadata' is list"}
    for number, what in said.items():
        assert f"line {number}: {what}" in message
    (tmp_path / "d.jsonl").write_bytes(lines[0] + b"\n" + lines[11])
    assert texts(source_of(tokenizer, spec, label_key="y"), 2) == ["fine", "fine too"]


def test_twenty_bad_rows_are_spelled_out_and_the_others_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "d.jsonl").write_text("x\n" * 25)
    message = error_of(tokenizer, str(tmp_path / "d.jsonl"))
    assert "25 rows" in message
    assert "line 20:" in message
    assert "line 21:" not in message
    assert "and 5 more" in message


def test_text_becomes_a_user_message_under_the_chat_template(numbered: str, tokenizer: Any) -> None:
    (prompt,) = source_of(tokenizer, numbered, apply_chat_template=True).next(1)
    assert prompt.text == "<|im_start|>user\nn0<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.tokens) == tokenizer.apply_chat_template(
        [{"role": "user", "content": "n0"}], add_generation_prompt=True, return_dict=False
    )


def test_a_message_list_without_the_chat_template_is_refused_with_the_flag(
    tmp_path: Path, tokenizer: Any
) -> None:
    row = {"input": [{"role": "user", "content": "hi"}]}
    spec = write_rows(tmp_path / "d.jsonl", [row])
    assert "--apply-chat-template" in error_of(tokenizer, spec)


def test_prompts_that_are_too_long_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spec = write_rows(tmp_path / "d.jsonl", [{"input": "a" * n} for n in (3, 5, 4, 9)])
    source = source_of(tokenizer, spec, rollout_max_prompt_len=4)
    assert texts(source, 2) == ["aaa", "aaaa"]
    assert "2 of 4 prompts are longer than 4 tokens" in caplog.text
    assert "the shortest has 3" in error_of(tokenizer, spec, rollout_max_prompt_len=2)


def test_a_prompt_that_leaves_no_room_for_a_response_is_left_out(
    tmp_path: Path, tokenizer: Any
) -> None:
    spec = write_rows(tmp_path / "d.jsonl", [{"input": "a" * n} for n in (4, 5)])
    assert len(source_of(tokenizer, spec, rollout_max_context_len=5)) == 1


def test_the_stream_goes_through_epochs_and_numbers_its_prompts(
    numbered: str, tokenizer: Any
) -> None:
    source = source_of(tokenizer, numbered)
    prompts = source.next(25)
    assert [p.text for p in prompts] == [f"n{i % 10}" for i in range(25)]
    assert [p.group_id for p in prompts + source.next(2)] == list(range(27))


def test_each_epoch_is_the_permutation_of_its_seed(numbered: str, tokenizer: Any) -> None:
    source = source_of(tokenizer, numbered, rollout_shuffle=True, rollout_seed=5)
    for epoch in range(3):
        order = list(range(10))
        random.Random(5 + epoch).shuffle(order)
        assert texts(source, 7) + texts(source, 3) == [f"n{i}" for i in order]


def test_a_resumed_source_goes_on_where_the_other_stopped(numbered: str, tokenizer: Any) -> None:
    whole = source_of(tokenizer, numbered, rollout_shuffle=True)
    stopped = source_of(tokenizer, numbered, rollout_shuffle=True)
    whole.next(8 * 3)
    for _ in range(8):
        stopped.next(3)
    resumed = source_of(tokenizer, numbered, rollout_shuffle=True)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.next(30) == whole.next(30)


def test_eight_batches_of_128_from_1000_prompts_end_at_offset_24_of_epoch_two(
    tmp_path: Path, tokenizer: Any
) -> None:
    spec = write_rows(tmp_path / "d.jsonl", [{"input": f"{i}"} for i in range(1000)])
    source = source_of(tokenizer, spec)
    for _ in range(8):
        source.next(128)
    resumed = source_of(tokenizer, spec)
    resumed.load_state_dict(source.state_dict())
    assert texts(resumed, 2) == ["24", "25"]


def test_a_stop_at_the_end_of_an_epoch_resumes_with_the_next(numbered: str, tokenizer: Any) -> None:
    source = source_of(tokenizer, numbered, rollout_shuffle=True)
    first = texts(source, 10)
    resumed = source_of(tokenizer, numbered, rollout_shuffle=True)
    resumed.load_state_dict(source.state_dict())
    second = texts(resumed, 10)
    assert sorted(first) == sorted(second)
    assert first != second
    assert resumed.state_dict()["position"] == 20


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"prompt_data": "other"}, "--prompt-data"),
        ({"prompt_data": "shorter"}, "--prompt-data"),
        ({"rollout_seed": 1}, "--rollout-seed"),
        ({"rollout_shuffle": False}, "--rollout-shuffle"),
    ],
)
def test_a_state_of_another_stream_is_refused(
    tmp_path: Path, numbered: str, tokenizer: Any, changes: dict[str, Any], flag: str
) -> None:
    others = {
        "other": write_rows(tmp_path / "o.jsonl", [{"input": f"m{i}"} for i in range(10)]),
        "shorter": f"{numbered}@[1:]",
    }
    changes = {k: others.get(v, v) for k, v in changes.items()}
    settings = {"prompt_data": numbered, "rollout_shuffle": True, **changes}
    source = source_of(tokenizer, numbered, rollout_shuffle=True)
    other = PromptSource(made_config(**settings), tokenizer)
    with pytest.raises(ConfigError, match=flag):
        other.load_state_dict(source.state_dict())


def test_a_state_of_other_prompts_names_the_flags_with_their_own_values(
    numbered: str, tokenizer: Any
) -> None:
    state = source_of(tokenizer, numbered).state_dict()
    message = rf"--prompt-data = '{numbered}@[:2]': the checkpoint is of a run with 10 prompts, "
    with pytest.raises(ConfigError, match=f"{re.escape(message)}these are 2: resume"):
        source_of(tokenizer, f"{numbered}@[:2]").load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            {"prompt_data_kwargs": {"size": 3, "seed": 1}},
            {"prompt_data_kwargs": {"size": 3, "seed": 1, "max_digits": 2}},
            "--prompt-data, --prompt-data-kwargs = ('reasoning_gym:chain_sum', "
            "{'size': 3, 'seed': 1, 'max_digits': 2}): the checkpoint is of a run with other",
        ),
        (
            {"prompt_data_kwargs": {"size": 3}},
            {"prompt_data_kwargs": {"size": 3}, "rollout_seed": 7},
            "--prompt-data, --prompt-data-kwargs, --rollout-seed = ('reasoning_gym:chain_sum', "
            "{'size': 3}, 7): the checkpoint is of a run with other prompts",
        ),
    ],
)
def test_a_state_of_other_problems_of_a_family_names_its_arguments(
    tokenizer: Any, before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    spec = "reasoning_gym:chain_sum"
    state = source_of(tokenizer, spec, **before).state_dict()
    with pytest.raises(ConfigError, match=re.escape(says)):
        source_of(tokenizer, spec, **after).load_state_dict(state)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"size": "a"}, "'size' is 'a': Expected `int`, got `str`"),
        ({"min_digits": 1.5}, "'min_digits' is 1.5: Expected `int`, got `float`"),
        ({"allow_negation": 1}, "'allow_negation' is 1: Expected `bool`, got `int`"),
        ({"seed": "x"}, "'seed' is 'x': Expected `int | null`, got `str`"),
        ({"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ({"size": 0}, "size must be positive"),
        ({"min_term": 2}, "there is no 'min_term', did you mean min_terms"),
    ],
)
def test_arguments_that_a_family_refuses_are_a_problem_once_and_before_any_problem_is_made(
    kwargs: dict[str, Any], says: str
) -> None:
    evaluated = ("e", "reasoning_gym:chain_sum@[:4]")
    config = made_config(
        prompt_data="reasoning_gym:chain_sum",
        prompt_data_kwargs=kwargs,
        eval_prompt_data=evaluated,
    )
    (problem,) = check(config)
    assert (problem.flag, problem.value) == ("--prompt-data-kwargs", kwargs)
    assert says in problem.remedy


def test_a_slice_that_leaves_no_problem_of_a_family_is_refused_without_making_them() -> None:
    spec = "reasoning_gym:chain_sum@[64:]"
    (problem,) = check(made_config(prompt_data=spec, prompt_data_kwargs={"size": 64}))
    assert (problem.flag, problem.value) == ("--prompt-data", spec)
    assert "no problem is left of 64" in problem.remedy
    assert check(made_config(prompt_data=spec, prompt_data_kwargs={"size": 65})) == []


def test_the_defaults_of_every_family_are_accepted() -> None:
    from reasoning_gym.factory import DATASETS

    refused = {
        family: problems
        for family in DATASETS
        if family != "composite"  # It has no default.
        and (problems := check(made_config(prompt_data=f"reasoning_gym:{family}")))
    }
    assert refused == {}


def test_a_reasoning_gym_family_is_a_source_that_is_the_same_each_time(tokenizer: Any) -> None:
    settings = {"prompt_data_kwargs": {"size": 6, "min_terms": 2, "max_terms": 2}}
    spec = "reasoning_gym:chain_sum@[2:5]"
    prompts = source_of(tokenizer, spec, **settings).next(3)
    assert prompts == source_of(tokenizer, spec, **settings).next(3)
    assert [p.metadata["reasoning_gym"]["index"] for p in prompts] == [2, 3, 4]
    expression = prompts[0].text.removesuffix(" =").split(": ")[-1]
    assert eval(expression) == int(prompts[0].label or "")


def test_wrong_arguments_of_a_family_are_refused(tokenizer: Any) -> None:
    message = error_of(tokenizer, "reasoning_gym:chain_sum", prompt_data_kwargs={"terms": 2})
    assert "--prompt-data-kwargs" in message


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        (None, "give the prompts"),
        ("missing.jsonl", "no such file"),
        ("data.csv", ".jsonl or .parquet"),
        ("data.jsonl@[1]", "slice"),
        ("data.jsonl@[-:2]", "slice"),
        ("reasoning_gym:chain_sums", "no such family"),
        ("reasoning_gym:chain_sun", "did you mean chain_sum"),
    ],
)
def test_data_that_cannot_be_used_is_refused_when_flags_are_parsed(
    spec: str | None, remedy: str
) -> None:
    (problem,) = check(made_config(prompt_data=spec))
    assert problem.flag == "--prompt-data"
    assert remedy in problem.remedy
    assert spec is None or spec not in problem.remedy  # It is shown as the value.


def test_a_family_that_is_like_none_is_answered_with_all() -> None:
    (problem,) = check(made_config(prompt_data="reasoning_gym:zzz"))
    assert problem.remedy.startswith("reasoning-gym has no such family; it has ab, acre,")
    (problem,) = check(made_config(prompt_data="reasoning_gym:chain_sun"))
    assert problem.remedy.startswith("reasoning-gym has no such family; did you mean chain_sum")


def test_all_problems_of_the_evaluation_data_are_reported(numbered: str) -> None:
    pairs = ("a", "missing.jsonl", "b", "x.csv")
    problems = check(made_config(prompt_data=numbered, eval_prompt_data=pairs))
    assert [p.value for p in problems] == ["missing.jsonl", "x.csv"]
    for pairs in (("a",), ("a", numbered, "a", numbered)):
        (problem,) = check(made_config(prompt_data=numbered, eval_prompt_data=pairs))
        assert "pairs of a name" in problem.remedy


def test_evaluation_sets_have_their_own_keys(tmp_path: Path, tokenizer: Any) -> None:
    spec = write_rows(tmp_path / "e.jsonl", [{"q": "a", "a": "1"}, {"q": "b", "a": "2"}])
    config = made_config(eval_prompt_data=("held", spec), eval_input_key="q", eval_label_key="a")
    sets = eval_sources(config, tokenizer)
    assert [(p.group_id, p.text, p.label) for p in sets["held"]] == [(0, "a", "1"), (1, "b", "2")]


def test_the_data_source_flag_replaces_the_source(tokenizer: Any) -> None:
    config = made_config(data_source_path="tests.unit.rollout.test_prompts.made_source")
    source = make_source(config, tokenizer)
    assert isinstance(source, ListSource)


def made_source(config: Any, tokenizer: Any) -> Any:
    return ListSource(tokenizer)


def test_supervised_rows_need_something_to_train_on(tmp_path: Path, tokenizer: Any) -> None:
    user = {"role": "user", "content": "hi"}
    rows = [
        {"input": [user, {"role": "assistant", "content": "ho"}]},
        {"input": [user]},
        {"input": "text"},
    ]
    spec = write_rows(tmp_path / "d.jsonl", rows)
    message = error_of(tokenizer, spec, loss_type="sft_loss")
    assert "line 1" not in message
    assert "line 2: nothing to train on" in message
    assert "line 3: nothing to train on" in message


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, miles.rollout.prompts; "
        "print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_recorded_rollouts_need_prompts_only_for_a_users_evaluation() -> None:
    recorded = {"load_debug_rollout_data": "rollout-{rollout_id}", "prompt_data": None}
    assert check(made_config(**recorded)) == []
    (problem,) = check(made_config(**recorded, eval_function_path="judge.evaluate"))
    assert problem.flag == "--prompt-data"


def test_keys_that_no_row_has_are_reported_together_each_by_its_flag(
    tmp_path: Path, numbered: str
) -> None:
    config = made_config(prompt_data=numbered, input_key="question", label_key="answer")
    problems = check(config)
    assert [(p.flag, p.value) for p in problems] == [
        ("--input-key", "question"),
        ("--label-key", "answer"),
    ]
    for problem in problems:
        assert f"no row of --prompt-data {numbered} has this key" in problem.remedy
        assert problem.remedy.endswith("the first has input, y")
    config = made_config(prompt_data=numbered, eval_prompt_data=("e", numbered), eval_label_key="a")
    assert [p.flag for p in check(config)] == ["--eval-label-key"]
    # Rows that cannot be read are said beside them.
    spec = write_rows(tmp_path / "d.jsonl", [{"input": "a"}, 3])
    problems = check(made_config(prompt_data=spec, label_key="answer"))
    assert [p.flag for p in problems] == ["--label-key", "--prompt-data"]
    assert "1 row cannot be used:\n    line 2" in problems[1].remedy


def test_a_row_that_lacks_both_keys_says_so_at_once(tmp_path: Path) -> None:
    spec = write_rows(tmp_path / "d.jsonl", [{"input": "a", "y": "b"}, {"other": "c"}])
    (problem,) = check(made_config(prompt_data=spec, label_key="y"))
    assert "line 2: no key 'input' (--input-key) and no key 'y' (--label-key)" in problem.remedy


def test_bad_rows_are_found_when_flags_are_parsed(tmp_path: Path, numbered: str) -> None:
    rows = [{"input": "a"}, {"input": 3}, {"inputs": "b"}, {"input": [{"role": "user"}]}]
    (problem,) = check(made_config(prompt_data=write_rows(tmp_path / "bad.jsonl", rows)))
    assert problem.flag == "--prompt-data"
    assert "3 rows cannot be used" in problem.remedy
    assert "line 2: 'input' is int" in problem.remedy
    (problem,) = check(made_config(prompt_data=f"{numbered}@[10:]"))
    assert "no row is left of 10" in problem.remedy
    conversation = [{"input": [{"role": "user", "content": "hi"}]}]
    spec = write_rows(tmp_path / "talk.jsonl", conversation)
    assert check(made_config(prompt_data=spec, apply_chat_template=True)) == []
