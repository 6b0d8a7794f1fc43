"""Times steps of TRL's ``GRPOTrainer`` on a CPU. Runs in an environment of its own, without Miles.

Called by ``grpo_step.py``; writes a JSON list of ``{"step", "generate", "train"}`` in seconds.
Generation ends where the reward function is called; what TRL does between that and the end of
the optimizer step counts as training.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

MODULUS = 7


class StepTimer(TrainerCallback):
    """Wall times of each step, and the check that every completion had full length."""

    def __init__(self, num_completions: int, completion_length: int) -> None:
        self.num_completions = num_completions
        self.completion_length = completion_length
        self.rows: list[dict[str, float]] = []
        self._begin = 0.0
        self._scored = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.perf_counter()

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self._scored = time.perf_counter()
        lengths = {len(ids) for ids in completion_ids}
        if lengths != {self.completion_length} or len(completion_ids) != self.num_completions:
            raise ValueError(f"{len(completion_ids)} completions of {lengths} tokens")
        return [sum(ids) % MODULUS / MODULUS for ids in completion_ids]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        end = time.perf_counter()
        self.rows.append(
            {
                "step": end - self._begin,
                "generate": self._scored - self._begin,
                "train": end - self._scored,
            }
        )
        print(f"TRL step {len(self.rows)}: {end - self._begin:.2f} s", flush=True)


def settings(options: argparse.Namespace, folder: Path) -> GRPOConfig:
    """One optimizer step a generation, plain fp32 on a CPU, the same loss as Miles."""
    samples = options.num_prompts * options.num_samples
    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=samples // options.micro_batch_size,
        num_generations=options.num_samples,
        max_completion_length=options.response_length,
        generation_kwargs={"min_new_tokens": options.response_length},
        max_steps=options.num_steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.num_threads)
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    timer = StepTimer(options.num_prompts * options.num_samples, options.response_length)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[timer.reward],
        args=settings(options, options.out.parent / "trl"),
        train_dataset=Dataset.from_list([{"prompt": row["input"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[timer],
    )
    trainer.train()
    versions = {m.__name__: m.__version__ for m in (trl, torch, transformers)}
    return {"versions": versions, "steps": timer.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--response-length", type=int, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()
    options.out.write_text(json.dumps(run(options), indent=2))


if __name__ == "__main__":
    main()
