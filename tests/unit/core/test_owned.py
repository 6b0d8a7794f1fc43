"""How a process ends that is told to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN = """
import asyncio
from miles.core import owned

async def run():
    try:
        print("up", flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.5)
        print("taken down", flush=True)

owned.interrupt_on_sigterm()
try:
    asyncio.run(run())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_sigterms_in_close_succession_are_one_that_takes_everything_down() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        output, errors = process.communicate(timeout=30)
    assert output == "taken down\ninterrupted\n"
    assert errors == ""
    assert process.returncode == 0
