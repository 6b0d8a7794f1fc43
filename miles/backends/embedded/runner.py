"""A Hugging Face causal language model that runs one step of many sequences at once.

A step is one forward over a packed row of tokens: one token for each decoding row and the whole
text of each new prompt. Logits are computed where a token is drawn, nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from miles.backends.embedded.kv_slots import KVSlots, PromptRun, StepLayout, UnsupportedModelError
from miles.core import hf

if TYPE_CHECKING:
    from torch import Tensor

_runner_numbers = count()
"""Transformers looks attention functions up by name: each runner registers its own."""


@dataclass(frozen=True)
class PromptInput:
    """A prompt to prefill into ``num_slots`` slots, starting with ``slot``."""

    tokens: Sequence[int]
    slot: int
    num_slots: int = 1


def load_model(path: str, dtype: str, device: torch.device) -> Any:
    """The model of a checkpoint directory, frozen. ``dtype`` "auto": the checkpoint's."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=hf.load_config(path),
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        trust_remote_code=True,
    )
    return model.to(device).requires_grad_(False).eval()


class Runner:
    """Runs steps. ``rows`` of a step are the slots 0 .. D-1; not thread-safe."""

    def __init__(self, model: Any, context_length: int) -> None:
        """Take over ``model`` and prove on a few tokens that its attention runs on our slots.

        Raises ``UnsupportedModelError``.
        """
        self.model = model
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.kv = KVSlots(context_length)
        self._device: torch.device = model.device
        if model._is_stateful or not model._supports_attention_backend:
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps state other than keys and values, or does not take "
                "its attention from transformers' AttentionInterface; use --rollout-engine sglang"
            )
        self._prove()
        self.kv_bytes_per_token = self.kv.bytes_per_token
        self.kv.drop()

    @torch.inference_mode()
    def step(
        self,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        prompts: Sequence[PromptInput] = (),
    ) -> "Tensor":
        """Run one token of each decoding row and all of each prompt.

        ``tokens`` and ``lengths`` are ``[D]``: the token to feed and the number of tokens already
        in the slot. Returns float32 logits ``[D + len(prompts), V]``, in the order given.
        """
        num_decode = len(tokens)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        packed = [tokens, *(np.asarray(prompts[i].tokens, np.int64) for i in order)]
        positions = [lengths, *(np.arange(len(prompts[i].tokens)) for i in order)]
        keep: int | Tensor = 0
        if prompts:
            ends = np.empty(len(prompts), np.int64)
            ends[order] = num_decode + np.cumsum([len(prompts[i].tokens) for i in order]) - 1
            keep = self._tensor(np.concatenate([np.arange(num_decode), ends]))
        self.kv.layout = self._layout(lengths, prompts, order)
        try:
            output = self.model(
                input_ids=self._tensor(np.concatenate(packed))[None],
                position_ids=self._tensor(np.concatenate(positions))[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        finally:
            self.kv.layout = None
        self._share(prompts)
        return output.logits[0].float()

    @torch.inference_mode()
    def repeat(self, logits: "Tensor", copies: Sequence[int]) -> "Tensor":
        """Repeat row ``i`` ``copies[i]`` times."""
        return logits.repeat_interleave(self._tensor(np.asarray(copies, np.int64)), dim=0)

    @torch.inference_mode()
    def move(self, source: NDArray[np.int64], target: NDArray[np.int64], length: int) -> None:
        """Copy ``length`` tokens of the slots ``source`` to the slots ``target``."""
        self.kv.copy(self._tensor(source), self._tensor(target), length)

    @torch.inference_mode()
    def clear(self, slots: NDArray[np.int64]) -> None:
        """Zero slots whose values may not be finite."""
        self.kv.clear(self._tensor(slots))

    @torch.inference_mode()
    def reserve(self, num_slots: int, capacity: int, num_rows: int, length: int) -> None:
        """See ``KVSlots.reserve``."""
        self.kv.reserve(num_slots, capacity, num_rows, length)

    def _tensor(self, array: NDArray[Any]) -> "Tensor":
        return torch.from_numpy(array).to(self._device)

    def _layout(
        self, lengths: NDArray[np.int64], prompts: Sequence[PromptInput], order: list[int]
    ) -> StepLayout:
        longest = int(lengths.max(initial=0)) + 1
        mask = None
        if len(lengths) and (lengths != longest - 1).any():
            mask = self._tensor(np.arange(longest)[None] <= lengths[:, None])[:, None, None]
        runs: list[PromptRun] = []
        start = len(lengths)
        for length, group in groupby(order, key=lambda i: len(prompts[i].tokens)):
            slots = np.array([prompts[i].slot for i in group], np.int64)
            runs.append(PromptRun(start=start, length=length, slots=self._tensor(slots)))
            start = runs[-1].stop
        return StepLayout(
            num_decode=len(lengths),
            rows=self._tensor(np.arange(len(lengths))),
            lengths=self._tensor(lengths),
            max_length=longest,
            mask=mask,
            prompts=tuple(runs),
        )

    def _share(self, prompts: Sequence[PromptInput]) -> None:
        """Give every further slot of a prompt a copy of the first one's keys and values."""
        shared = [prompt for prompt in prompts if prompt.num_slots > 1]
        if not shared:
            return
        source = np.repeat([p.slot for p in shared], [p.num_slots - 1 for p in shared])
        target = np.concatenate([np.arange(p.slot + 1, p.slot + p.num_slots) for p in shared])
        length = max(len(p.tokens) for p in shared)
        self.kv.copy(self._tensor(source), self._tensor(target), length)

    def _prove(self) -> None:
        """Compare prefill, sharing and decoding on slots with plain forwards of the same tokens."""
        ids = (np.arange(8) * 7 + 3) % self.vocab_size
        sequences = [ids[:5], ids[2:8]]
        reference = torch.stack([self._plain_log_probs(s) for s in sequences])
        name = f"miles_kv_slots_{next(_runner_numbers)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self.kv.attend)
        self.model.set_attn_implementation(name)
        self.reserve(3, 8, 0, 0)
        no_rows = np.empty(0, np.int64)
        self.step(
            no_rows,
            no_rows,
            [PromptInput(ids[2:6].tolist(), 2), PromptInput(ids[:3].tolist(), 0, 2)],
        )
        self.move(np.array([2]), np.array([0]), 4)
        self.step(ids[[6, 3]], np.array([4, 3]))
        logits = self.step(ids[[7, 4]], np.array([5, 4]))
        if not self.kv.layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not take its attention from transformers' "
                "AttentionInterface; use --rollout-engine sglang"
            )
        # Rows were moved: row 0 now holds the longer sequence.
        found = torch.log_softmax(logits, -1).flip(0)
        error = (found - reference).square().mean().sqrt() / reference.std()
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
        if not error < tolerance:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives other log-probs on the engine's key/value "
                f"slots than in a plain forward (relative error {error:.1e}, allowed "
                f"{tolerance:.0e}); use --rollout-engine sglang"
            )

    @torch.inference_mode()
    def _plain_log_probs(self, ids: NDArray[np.int64]) -> "Tensor":
        output = self.model(input_ids=self._tensor(ids)[None], use_cache=False)
        return torch.log_softmax(output.logits[0, -1].float(), -1)
