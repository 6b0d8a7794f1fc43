"""What ``grpo_step.py`` measures: a model, prompts of one length, and the shape of a step."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts import reverse_digits
from scripts.made_models import make_qwen3
from scripts.smollm2 import DTYPES, DtypeName, prepare

WorkloadName = Literal["smollm2", "demo"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One GRPO step: ``num_prompts * num_samples`` responses of equal length, one update."""

    make_model: Callable[[Path, DtypeName], Path]
    make_prompts: Callable[[Path, int], None]
    """Write so many rows with the key ``input`` to a file, all of ``prompt_length`` tokens."""
    num_prompts: int
    num_samples: int
    prompt_length: int
    response_length: int
    micro_batch_size: int
    """Samples of a forward pass in Miles, on each rank."""
    trl_micro_batch_size: int


def _smollm2_model(folder: Path, dtype: DtypeName) -> Path:
    del folder
    return prepare(dtype)


def _smollm2_prompts(path: Path, count: int) -> None:
    """Sums and differences of two digits after the chat template: 46 tokens each."""
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(prepare("fp32"))
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    problems = reasoning_gym.create_dataset("chain_sum", size=count, seed=0, **settings)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem["question"]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for problem in problems
    ]
    lengths = {len(ids) for ids in tokenizer(texts).input_ids}
    assert lengths == {46}, lengths
    path.write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))


def _demo_model(folder: Path, dtype: DtypeName) -> Path:
    """The model of ``scripts/run_demo_cpu.py`` before any training."""
    return make_qwen3(
        folder / f"demo-model-{dtype}",
        alphabet=reverse_digits.ALPHABET,
        hidden_size=128,
        intermediate_size=384,
        head_dim=32,
        dtype=DTYPES[dtype],
    )


def _demo_prompts(path: Path, count: int) -> None:
    rows = (json.dumps({"input": f"r{number:04d}="}) + "\n" for number in range(count))
    path.write_text("".join(rows))


WORKLOADS: dict[WorkloadName, Workload] = {
    "smollm2": Workload(
        make_model=_smollm2_model,
        make_prompts=_smollm2_prompts,
        num_prompts=8,
        num_samples=8,
        prompt_length=46,
        response_length=24,
        micro_batch_size=16,
        trl_micro_batch_size=16,
    ),
    "demo": Workload(
        make_model=_demo_model,
        make_prompts=_demo_prompts,
        num_prompts=32,
        num_samples=16,
        prompt_length=6,
        response_length=6,
        micro_batch_size=256,
        trl_micro_batch_size=512,
    ),
}
