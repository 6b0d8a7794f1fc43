import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from miles.contracts.hooks import RolloutContext, RolloutOutput
from miles.contracts.types import Status
from miles.rollout.prompts import PromptSource
from miles.rollout.supervised import rollout
from scripts.made_models import make_tokenizer
from tests.unit.rollout.scripted import ScriptedEngines, made_config

TOKENIZER: Any = make_tokenizer()


def run(path: Path, rows: list[dict[str, Any]], **changes: Any) -> RolloutOutput:
    path = path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = made_config(
        prompt_data=str(path),
        loss_type="sft_loss",
        label_key="y",
        rollout_batch_size=len(rows),
        **{"n_samples_per_prompt": 1, **changes},
    )
    context = RolloutContext(
        config=config,
        engines=ScriptedEngines(TOKENIZER, lambda text, request: None),
        tokenizer=TOKENIZER,
        data_source=PromptSource(config, TOKENIZER),
    )
    return asyncio.run(rollout(0, context))


def test_a_text_row_trains_on_its_label_and_the_end_token(tmp_path: Path) -> None:
    output = run(tmp_path, [{"input": "r12=", "y": "21"}])
    ((sample,),) = output.groups
    assert TOKENIZER.decode(sample.tokens) == "r12=21<eos>"
    assert (sample.response_length, sample.loss_mask) == (3, [1, 1, 1])
    assert sample.status is Status.COMPLETED
    assert all(map(math.isnan, sample.rollout_log_probs))
    sample.validate()


def test_a_conversation_trains_on_its_assistant_turns(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    ((sample,),) = run(tmp_path, [{"input": talk, "y": None}]).groups
    sample.validate()
    assert sample.tokens == TOKENIZER.apply_chat_template(talk, return_dict=False)
    assert TOKENIZER.decode(sample.tokens[: -sample.response_length]) == sample.prompt.text
    response = sample.tokens[-sample.response_length :]
    trained = [t for t, bit in zip(response, sample.loss_mask, strict=True) if bit]
    assert TOKENIZER.decode(trained) == "b<|im_end|>d<|im_end|>"


@pytest.mark.parametrize("row", ["a", [{"role": "user", "content": "a"}]])
def test_a_label_is_the_assistant_turn_under_the_chat_template(tmp_path: Path, row: Any) -> None:
    rows = [{"input": row, "y": "b"}]
    ((sample,),) = run(tmp_path, rows, apply_chat_template=True).groups
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert sample.tokens == TOKENIZER.apply_chat_template(talk, return_dict=False)
    assert sample.loss_mask == [1, 1, 0]


def test_what_is_too_long_is_cut_off_and_counted(tmp_path: Path) -> None:
    rows = [{"input": "abc", "y": "123456"}, {"input": "abc", "y": "1"}]
    output = run(tmp_path, rows, rollout_max_context_len=5)
    cut, whole = (group[0] for group in output.groups)
    assert TOKENIZER.decode(cut.tokens) == "abc12"
    assert (cut.status, cut.loss_mask) == (Status.TRUNCATED, [1, 1])
    assert whole.status is Status.COMPLETED
    assert output.metrics["rollout/truncated_ratio"] == 0.5


def test_each_row_makes_as_many_samples_as_the_flag_says(tmp_path: Path) -> None:
    (group,) = run(tmp_path, [{"input": "a", "y": "b"}], n_samples_per_prompt=3).groups
    assert [s.index for s in group] == [0, 1, 2]
    assert group[0].tokens is not group[1].tokens
