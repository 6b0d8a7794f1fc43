"""One SGLang engine of two server processes, as it has them on two machines: here both are on one
host, each with an address and a device of its own."""

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from miles.config.root import MilesConfig
from miles.contracts.engine import GenerateRequest, SamplingParams
from miles.ray.placement import Placement
from miles.ray.rollout.engines import find_dead_soon
from miles.rollout.engine_client import EngineClient
from scripts.made_models import make_qwen3
from tests.engine_groups import started

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="2 accelerators are needed"),
    pytest.mark.timeout(900),
]

MACHINES = ("127.0.0.1", "127.0.0.2")
SGLANG = (
    *("--attention-backend", "fa3"),
    *("--sampling-backend", "pytorch"),
    # They ask the driver about devices of other processes on the same host, which these cannot see.
    "--disable-custom-all-reduce",
    *("--cuda-graph-backend-prefill", "disabled"),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MilesConfig:
    model = make_qwen3(
        tmp_path_factory.mktemp("models") / "qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        head_dim=64,
        dtype=torch.bfloat16,
    )
    config = MilesConfig(sglang_argv=SGLANG)
    return replace(
        config,
        cluster=replace(config.cluster, rollout_num_gpus=2, rollout_num_gpus_per_engine=2),
        rollout=replace(
            config.rollout,
            hf_checkpoint=str(model),
            rollout_engine="sglang",
            sglang_mem_fraction_static=0.3,
        ),
    )


def on_two_machines(placement: Placement) -> Placement:
    slots = zip(placement.slots, MACHINES, strict=True)
    return replace(placement, slots=tuple(replace(slot, node_ip=ip) for slot, ip in slots))


async def greedy(url: str) -> tuple[int, ...]:
    client = EngineClient(url, timeout_s=120)
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    try:
        (completion,) = await client.generate(GenerateRequest(input_ids=[5, 6, 7], params=params))
    finally:
        await client.close()
    return completion.output_ids


def test_an_engine_of_two_machines_generates_and_is_replaced_as_a_whole(
    ray_address: str, config: MilesConfig, tmp_path: Path
) -> None:
    async def run() -> tuple[list[tuple[int, ...]], list[int], list[int | None], list[int | None]]:
        async with started(config, tmp_path, on_two_machines) as engines:
            before = await greedy(engines.url(0))
            old = await engines.pids()
            assert old[1] is not None
            psutil.Process(old[1]).kill()
            dead = await find_dead_soon(engines)
            await engines.restart(0)
            return [before, await greedy(engines.url(0))], dead, old, await engines.pids()

    outputs, dead, old, new = asyncio.run(asyncio.wait_for(run(), 800))
    assert len(outputs[0]) == 8
    assert outputs[0] == outputs[1]
    assert dead == [0]
    assert len(old) == len(new) == 2
    assert not set(old) & set(new)
    assert not any(psutil.pid_exists(pid) for pid in old if pid is not None)
