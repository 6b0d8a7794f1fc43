"""How far log-probs of one model in bf16 lie apart when only the order of sums differs: the floor
under the difference of trainer and engine.

    python benchmarks/bf16_noise.py --model models/smollm2-135m-instruct-bf16

transformers alone: it samples answers to sums in float32, and scores them in float32, in bf16, in
bf16 with float32 logits, and in bf16 with attention written another way. The table shows mean
absolute differences over all sampled tokens.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles.core import device


@dataclass(frozen=True)
class Benchmark:
    """Measure what bf16 does to log-probs."""

    model: Path
    """Hugging Face directory."""
    num_prompts: int = 6
    """Sums that are asked."""
    num_samples: int = 4
    """Answers to each."""
    new_tokens: int = 40
    """Most tokens of an answer."""
    seed: int = 0
    """Of the sums and of sampling."""


@dataclass(frozen=True)
class Answers:
    """To one prompt, padded; ``is_token_SxT`` says which of the new tokens are an answer's."""

    ids_SxL: Tensor
    prompt_length: int
    is_token_SxT: Tensor


def load(path: Path, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention
    )
    return model.eval().to(device.current_device())


@torch.no_grad()
def sample(options: Benchmark, model: Any) -> list[Answers]:
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    answers: list[Answers] = []
    for first, second in torch.randint(0, 100, (options.num_prompts, 2), generator=generator):
        question = f"State the final answer: {first} + {second} ="
        if tokenizer.chat_template:
            message = {"role": "user", "content": question}
            question = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, tokenize=False
            )
        ids = tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
        prompts = ids.to(model.device).repeat(options.num_samples, 1)
        ids_SxL = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=options.new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        is_end_SxT = ids_SxL[:, ids.shape[1] :] == tokenizer.eos_token_id
        ended_before_SxT = is_end_SxT.cumsum(1) - is_end_SxT.int()
        answers.append(Answers(ids_SxL, ids.shape[1], ended_before_SxT == 0))
    return answers


def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits


def float32_logits(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model(ids).last_hidden_state
    return hidden.float() @ model.lm_head.weight.float().T


@torch.no_grad()
def score(model: Any, answers: list[Answers], head: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """float32, of all tokens of all answers, on the host."""
    scores: list[Tensor] = []
    for one in answers:
        start = one.prompt_length
        log_probs = head(model, one.ids_SxL)[:, start - 1 : -1].float().log_softmax(-1)
        taken_SxT = log_probs.gather(2, one.ids_SxL[:, start:, None]).squeeze(2)
        scores.append(taken_SxT[one.is_token_SxT].cpu())
    return torch.cat(scores)


def main(options: Benchmark) -> None:
    exact = load(options.model, torch.float32)
    answers = sample(options, exact)
    reference = score(exact, answers, logits)
    bf16 = load(options.model, torch.bfloat16)
    rounded = score(bf16, answers, logits)
    other = score(load(options.model, torch.bfloat16, "eager"), answers, logits)
    rows = {
        "bf16, and float32": (rounded - reference),
        "bf16 with float32 logits, and float32": score(bf16, answers, float32_logits) - reference,
        "bf16, and bf16 with attention written another way": other - rounded,
    }
    print(f"{options.model.name}, {len(reference):,} tokens\n")
    print("| log-probs apart | mean absolute difference |\n|---|---:|")
    for name, difference in rows.items():
        print(f"| {name} | {difference.abs().mean():.4f} |")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
