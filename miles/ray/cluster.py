"""Joins the Ray cluster of ``RAY_ADDRESS``, or starts one on this machine for this run."""

import os
from pathlib import Path

import ray

from miles.core import logging


def start() -> None:
    """Connect the driver. Actors import this checkout, whatever directory the driver is in."""
    logging.setup("driver")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    root = str(Path(__file__).resolve().parents[2])
    existing = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    python_path = os.pathsep.join(dict.fromkeys([root, os.getcwd(), *existing]))
    ray.init(
        include_dashboard=False,
        logging_level=logging.ERROR,
        # Progress bars of several processes at once would overwrite each other and the run's lines.
        runtime_env={"env_vars": {"PYTHONPATH": python_path, "TQDM_DISABLE": "1"}},
    )


def stop() -> None:
    """Disconnect, and end the cluster when this run started it."""
    ray.shutdown()
