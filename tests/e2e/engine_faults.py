"""User code under which engines of SGLang fail while they generate, for tests."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace

import psutil

from miles.contracts.hooks import GenerateContext
from miles.contracts.types import Prompt, Sample
from miles.core.ports import LOOPBACK
from miles.rollout.engine_client import http_url
from miles.rollout.generate import generate
from tests.engine_process import running_requests

SERVER = "miles.backends.sglang_utils.server"


def servers_of(model: str) -> list[psutil.Process]:
    """The first process of each engine that serves ``model``, a path of one run alone."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if model in command and SERVER in command:
            found.append(process)
    return found


def url_of(server: psutil.Process) -> str:
    """Its other ports are open to every interface."""
    listening = [c for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    (port,) = (c.laddr.port for c in listening if c.laddr.ip == LOOPBACK)
    return http_url(LOOPBACK, port)


def scheduler_of(server: psutil.Process) -> psutil.Process:
    (scheduler,) = (p for p in server.children() if "scheduler" in " ".join(p.cmdline()))
    return scheduler


def kill_one(servers: list[psutil.Process]) -> None:
    servers[0].kill()


def hang_one(servers: list[psutil.Process]) -> None:
    """Its HTTP server answers on."""
    scheduler_of(servers[1]).send_signal(signal.SIGSTOP)


def kill_all(servers: list[psutil.Process]) -> None:
    """One at its server, one at its scheduler alone."""
    servers[0].kill()
    scheduler_of(servers[1]).kill()


FAULTS: dict[int, Callable[[list[psutil.Process]], None]] = {
    7: kill_one,
    11: hang_one,
    15: kill_all,
}
"""By the group that brings the fault: the last one of a rollout of four, from the second on."""


async def generate_under_faults(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    """Every response has as many tokens as it may. A fault comes once: the engines may not be
    those that it met when a prompt is tried again."""
    context = replace(context, params=replace(context.params, ignore_eos=True))
    answer = asyncio.ensure_future(generate(prompt, context))
    fault = FAULTS.pop(prompt.group_id, None)
    if fault is not None:
        servers = servers_of(str(context.config.rollout.hf_checkpoint))
        await until_all_generate([url_of(server) for server in servers])
        fault(servers)
    return await answer


async def until_all_generate(urls: list[str]) -> None:
    async with asyncio.timeout(60):
        while not all([await asyncio.to_thread(running_requests, url) for url in urls]):
            await asyncio.sleep(0.02)
