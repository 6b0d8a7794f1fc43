"""The demo's task: ``r1234=`` → ``4321``. Made data and its reward."""

import json
import random
from pathlib import Path
from typing import Any

from miles.config.root import MilesConfig
from miles.contracts.types import Sample

ALPHABET = "0123456789r="
NUM_DIGITS = 4


def reward(sample: Sample, config: MilesConfig) -> float:
    """Half for the share of right positions (the end token counts as one), half for all right."""
    del config
    wanted = [*str(sample.prompt.label), "<end>"]
    ended = sample.status == "completed"
    given = [*sample.response.removesuffix("<eos>")[: len(wanted)], *(["<end>"] if ended else [])]
    right = sum(a == b for a, b in zip(wanted, given, strict=False)) / len(wanted)
    return 0.5 * right + 0.5 * (given == wanted)


def write_data(folder: Path, seed: int, num_supervised: int, num_train: int, num_eval: int) -> None:
    """Write ``supervised.jsonl``, ``train.jsonl`` and ``eval.jsonl``; no number occurs twice."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed).sample(range(10**NUM_DIGITS), num_train + num_eval)
    drawn = random.Random(seed + 1).choices(numbers[:num_train], k=num_supervised)
    parts = {"supervised": drawn, "train": numbers[:num_train], "eval": numbers[num_train:]}
    for name, part in parts.items():
        rows = "".join(json.dumps(_row(number)) + "\n" for number in part)
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")


def _row(number: int) -> dict[str, Any]:
    digits = f"{number:0{NUM_DIGITS}d}"
    return {"input": f"r{digits}=", "label": digits[::-1]}
