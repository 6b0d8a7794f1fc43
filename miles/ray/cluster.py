"""Joins the Ray cluster of ``RAY_ADDRESS``, or starts one on this machine for this run."""

import os
from pathlib import Path

import ray

from miles.core import logging
from miles.ray.errors import JobError

WORKING_DIR = "MILES_WORKING_DIR"
"""Environment variable of the workers: where the driver is."""

log = logging.get(__name__)


def start() -> None:
    """Connect the driver. Actors import this checkout, and relative paths mean the same to them as
    to the driver, whatever directory the cluster was started in. Raises ``JobError``."""
    logging.setup("driver")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    root = str(Path(__file__).resolve().parents[2])
    existing = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    python_path = os.pathsep.join(dict.fromkeys([root, os.getcwd(), *existing]))
    try:
        ray.init(
            include_dashboard=False,
            logging_level=logging.ERROR,
            runtime_env={
                "env_vars": {
                    "PYTHONPATH": python_path,
                    WORKING_DIR: os.getcwd(),
                    # Progress bars of several processes would overwrite each other.
                    "TQDM_DISABLE": "1",
                },
                "worker_process_setup_hook": f"{__name__}.{enter_working_dir.__name__}",
            },
        )
    except ConnectionError as error:
        address = os.environ.get("RAY_ADDRESS")
        remedy = "start that cluster, or unset RAY_ADDRESS to run on this machine alone"
        raise JobError(f"no Ray cluster at RAY_ADDRESS={address} ({error}): {remedy}") from error


def enter_working_dir() -> None:
    """Run by Ray in every worker process before anything else."""
    folder = os.environ[WORKING_DIR]
    try:
        os.chdir(folder)
    except OSError as error:
        log.warning(
            "this machine cannot enter the driver's directory, so relative paths differ here: %s",
            error,
        )


def stop() -> None:
    """Disconnect, and end the cluster when this run started it."""
    ray.shutdown()
