"""Every example of docs/customization.md is loaded as its flag loads it, and run; those of the
Megatron backend by ``tests/unit/backends/megatron_utils/test_hooks.py``."""

import asyncio
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from miles.contracts.hooks import HOOKS, GenerateContext, LossScale, RolloutContext, group_reward
from miles.contracts.types import Sample, Status, TokenStats
from miles.core.plugins import load_function
from miles.rollout import multi_turn
from miles.rollout.collect import Collector
from miles.rollout.rewards.score import make_reward, score
from miles.rollout.steps import sampling_params
from miles.rollout.tool_specs import load_tool_specs
from tests.unit.backends.training_utils.made_batches import micro_batch
from tests.unit.customization_page import PAGE, write_examples
from tests.unit.rollout.scripted import ListSource, ScriptedEngines, made_config, made_prompt

FUNCTION_OF = {
    "data_source_path": "AdditionSource",
    "rollout_function_path": "rollout",
    "eval_function_path": "evaluation",
    "custom_generate_function_path": "generate",
    "generate_execute_tool_function_path": "execute_tool",
    "custom_rm_path": "reward",
    "custom_reward_post_process_path": "reward_post_process",
    "dynamic_sampling_filter_path": "dynamic_filter",
    "buffer_filter_path": "buffer_filter",
    "rollout_sample_filter_path": "sample_filter",
    "rollout_all_samples_process_path": "all_samples_process",
    "custom_loss_function_path": "loss",
    "custom_tis_function_path": "importance_weights",
    "custom_megatron_init_path": "megatron_init",
    "custom_megatron_before_log_prob_hook_path": "megatron_before_log_prob",
    "custom_megatron_before_train_step_hook_path": "megatron_before_train_step",
    "custom_rollout_log_function_path": "rollout_log",
    "custom_eval_rollout_log_function_path": "eval_log",
}


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page's examples as the module that it says they are."""
    folder = tmp_path_factory.mktemp("user")
    write_examples(folder)
    sys.path.insert(0, str(folder))
    import my_hooks  # pyright: ignore[reportMissingImports]

    yield my_hooks
    sys.path.remove(str(folder))
    del sys.modules["my_hooks"]


def sample_of(tokenizer: Any, response: str, reward: float = 0.0, index: int = 0) -> Sample:
    return Sample(
        prompt=made_prompt(0, tokenizer, "q", label="12"),
        index=index,
        tokens=[1, *tokenizer.encode(response)],
        response=response,
        response_length=len(response),
        reward=reward,
        status=Status.COMPLETED,
    )


def test_every_hook_has_a_section_and_an_example_of_its_signature(hooks: Any) -> None:
    headings = re.findall(r"^### (.*)$", PAGE.read_text(), re.MULTILINE)
    flags = {flag for heading in headings for flag in re.findall(r"`(--[a-z-]+)`", heading)}
    assert flags == {"--" + field.replace("_", "-") for field in HOOKS} | {
        "--generate-tool-specs-path",
        "--spec",
    }
    for field, name in FUNCTION_OF.items():
        load_function(f"my_hooks.{name}", HOOKS[field])
    load_function("my_hooks.group_reward", group_reward)


def test_the_reward_examples_score(hooks: Any, tokenizer: Any) -> None:
    group = [sample_of(tokenizer, text, index=i) for i, text in enumerate(["12", "21", "1"])]
    for sample in group:
        sample.reward = None
    reward = make_reward(made_config(custom_rm_path="my_hooks.reward"), tokenizer)
    assert asyncio.run(score(group, reward)) == []
    assert [s.reward for s in group] == [1.0, 0.5, 0.0]
    group = [sample_of(tokenizer, text) for text in ("12", "it is 12", "x")]
    config = made_config(custom_rm_path="my_hooks.group_reward", group_rm=True)
    assert asyncio.run(score(group, make_reward(config, tokenizer))) == []
    assert [s.reward for s in group] == [1.0, 0.5, 0.0]
    processed = hooks.reward_post_process(group, np.array([5, 1, 3], np.float32), config)
    assert processed.tolist() == [1.0, -1.0, 0.0]
    assert processed.dtype == np.float32


def test_the_examples_make_a_rollout(hooks: Any, tokenizer: Any) -> None:
    config = made_config(
        custom_generate_function_path="my_hooks.generate",
        custom_rm_path="my_hooks.reward",
        rollout_sample_filter_path="my_hooks.sample_filter",
        rollout_all_samples_process_path="my_hooks.all_samples_process",
        dynamic_sampling_filter_path="my_hooks.dynamic_filter",
        rollout_batch_size=2,
    )
    source = hooks.AdditionSource(config, tokenizer)

    def answer(text: str, request: Any) -> str:
        a, b = map(int, text.removesuffix("=").split("+"))
        return f"{a + b}" if a % 2 else f"{a + b + 1}"

    collector = Collector(config, ScriptedEngines(tokenizer, answer), tokenizer, source)
    output = asyncio.run(collector.collect(0))
    # Of the example's filter: right answers (reward 1) are too easy.
    assert [s.reward for group in output.groups for s in group] == [0.5] * 4
    assert 1.0 not in [s.reward for group in output.groups for s in group]
    assert set(hooks.solved.values()) <= {0, 2}
    metrics = hooks.rollout_log(0, output.groups, {"a": 1.0})
    assert metrics == {"a": 1.0, "rollout/asking": 0.0}
    again = hooks.AdditionSource(config, tokenizer)
    again.load_state_dict(source.state_dict())
    assert again.next(3) == source.next(3)


def test_the_whole_stage_examples_run(hooks: Any, tokenizer: Any) -> None:
    config = made_config()
    context = RolloutContext(
        config=config,
        engines=ScriptedEngines(tokenizer, lambda text, request: "abc"),
        tokenizer=tokenizer,
        data_source=ListSource(tokenizer),
    )
    output = asyncio.run(hooks.rollout(0, context))
    assert [s.reward for group in output.groups for s in group] == [-3.0] * 4
    assert asyncio.run(hooks.evaluation(0, context)) == {"train_prompts/response_len": 3.0}
    samples = {"s": [sample_of(tokenizer, "a", 0.5), sample_of(tokenizer, "a", 1.0)]}
    assert hooks.eval_log(0, samples, {}) == {"eval/s/best": 1.0}


def test_the_filter_examples_choose(hooks: Any, tokenizer: Any) -> None:
    groups = [[sample_of(tokenizer, "a" * n)] for n in (1, 3, 2)]
    assert hooks.buffer_filter(groups, 2) == [groups[1], groups[2]]
    groups[0][0].status = Status.TRUNCATED
    hooks.sample_filter(groups, made_config())
    assert [g[0].remove_sample for g in groups] == [True, False, False]
    hard = hooks.dynamic_filter([sample_of(tokenizer, "a", 0.0)], made_config())
    assert (hard.keep, hard.reason) == (False, "too_hard")


def test_the_tool_example_is_called_by_the_multi_turn_function(hooks: Any, tokenizer: Any) -> None:
    config = made_config(
        generate_tool_specs_path="my_hooks.tool_specs",
        generate_execute_tool_function_path="my_hooks.execute_tool",
        rollout_max_response_len=400,
        n_samples_per_prompt=1,
    )
    assert load_tool_specs(config) == tuple(hooks.tool_specs)
    call = '<tool_call>{"name": "add", "arguments": {"numbers": [1, 2.5]}}</tool_call><|im_end|>'
    engines = ScriptedEngines(
        tokenizer, lambda text, request: "3.5<|im_end|>" if "tool\n" in text else call
    )
    messages = ({"role": "user", "content": "1+2.5"},)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = made_prompt(0, tokenizer, text, messages=messages)
    context = GenerateContext(
        config=config,
        engines=engines,
        tokenizer=tokenizer,
        params=sampling_params(config, evaluation=False),
        num_samples=1,
        evaluation=False,
        first_index=0,
    )
    (sample,) = asyncio.run(multi_turn.generate(prompt, context))
    assert "<|im_start|>tool\n3.5<|im_end|>" in sample.response


def test_the_training_examples_compute(hooks: Any) -> None:
    batch = micro_batch([[1, 0], [1, 1]], advantages_R=[1.0, 1.0, -1.0, 2.0])
    log_probs = torch.tensor([-1.0, -9.0, -2.0, -3.0], requires_grad=True)
    stats = TokenStats(log_probs_R=log_probs, entropy_R=None)
    scale = LossScale(num_samples=2, num_tokens=4)
    output = hooks.loss(batch, stats, scale, made_config())
    # -(1 * -1 + -1 * -2 + 2 * -3) / 4
    assert output.loss.item() == pytest.approx(1.25)
    weights = hooks.importance_weights(torch.tensor([0.0, 0.6, -0.7, 0.8]), batch, made_config())
    assert weights.tolist() == [1.0, 1.0, 0.0, 0.0]
