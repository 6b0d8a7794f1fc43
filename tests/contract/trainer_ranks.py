"""Two trainer ranks over gloo that push sharded weights, driven from a test through pipes."""

import multiprocessing as mp
import os
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from miles.contracts.engine import EngineFeatures, EngineSet
from miles.contracts.transport import WeightTransport
from miles.contracts.types import NamedTensor
from miles.core import distributed
from miles.core.hf import load_config
from miles.core.ports import hold_port
from miles.weight_sync.fused import fuse_table
from miles.weight_sync.session import TRANSPORTS, WeightSync

NUM_RANKS = 2
ANSWER_TIMEOUT_S = 240.0


def new_weights(model: Path, seed: int) -> dict[str, Tensor]:
    """Other values for every weight of the checkpoint, in its names, dtypes and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (old.float() + 0.05 * torch.randn(old.shape, generator=generator)).to(old.dtype)
        for name, old in load_file(model / "model.safetensors").items()
    }


class TrainerRanks:
    """Spawned once; ``push`` runs on both ranks and returns what each of them got."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        # Rank 0 listens there much later, when it has imported torch.
        self._held = hold_port()
        port = self._held.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def source_pid(self) -> int:
        return self._processes[0].pid

    def push(self, transport: str, engines: EngineSet, model: Path, **how: Any) -> list[Any]:
        """For each rank ``(version, timings)``, or the exception that ``push`` raised.

        ``how``: ``seed``, ``version`` (to go on from), ``check``, ``timeout_s``, and ``fault``, see
        ``_weights``.
        """
        for pipe in self._pipes:
            pipe.send((transport, engines, model, how))
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(ANSWER_TIMEOUT_S), f"rank {rank} hangs"
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._held.close()


def _run(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(NUM_RANKS)
    )
    distributed.init_process_group(timeout_minutes=3)
    syncs: dict[Any, WeightSync] = {}
    while (job := pipe.recv()) is not None:
        transport, engines, model, how = job
        key = (transport, model, how.get("timeout_s", 60.0), how.get("check", True))
        if key not in syncs:
            syncs[key] = WeightSync(
                partial(_make_transport, transport, key[2]),
                max_bytes=20_000,
                check=key[3],
                fused=fuse_table(load_config(str(model))),
            )
        sync = syncs[key]
        sync.version = how.get("version", sync.version)
        try:
            version = sync.push(engines, _weights(model, how["seed"], how.get("fault")))
            assert version == sync.version
            pipe.send((version, sync.last_timings))
        except Exception as error:  # the test judges it
            pipe.send(error)
    for sync in syncs.values():
        sync.close()
    distributed.destroy_process_group()


def _make_transport(name: str, timeout_s: float, features: EngineFeatures) -> WeightTransport:
    del features
    return TRANSPORTS.load(name)(timeout_s=timeout_s)


def _weights(model: Path, seed: int, fault: str | None) -> Iterator[NamedTensor]:
    """Each rank holds half of every weight; reading one is a collective.

    ``fault``: ``"shape"`` one tensor in the middle has a row too many; ``"missing"`` it is left
    out; ``"raise"`` every rank raises there; ``"raise-1"`` rank 1 raises after the last one;
    ``"overwrite"`` it is changed after it was handed out; ``"nothing"`` there is no weight at all.
    """
    if fault == "nothing":
        return
    weights = new_weights(model, seed)
    middle = list(weights)[len(weights) // 2]
    for name, full in weights.items():
        tensor = _gathered(full)
        if name == middle and fault == "shape":
            tensor = torch.cat([tensor, tensor[:1]])
        if name == middle and fault == "raise":
            raise ValueError("the optimizer state is gone")
        if name == middle and fault == "missing":
            continue
        yield NamedTensor(name=name, tensor=_strided(tensor) if fault is None else tensor)
        if name == middle and fault == "overwrite":
            tensor.zero_()
    if fault == "raise-1" and distributed.rank() == 1:
        raise ValueError("rank 1 only")


def _gathered(full: Tensor) -> Tensor:
    """The tensor, put together from the half that each rank holds."""
    halves = list(torch.tensor_split(full.reshape(-1), NUM_RANKS))
    parts = [torch.zeros_like(half) for half in halves]
    parts[distributed.rank()] = halves[distributed.rank()].clone()
    for rank, part in enumerate(parts):
        dist.broadcast(part, src=rank)
    return torch.cat(parts).reshape(full.shape)


def _strided(tensor: Tensor) -> Tensor:
    """The same values, a matrix in column order: what arrives must be the bytes in C order."""
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
