"""Joins the Ray cluster of ``RAY_ADDRESS``, or starts one on this machine for this run."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

import psutil
import ray

from miles.core import logging
from miles.ray.errors import JobError, describe

WORKING_DIR = "MILES_WORKING_DIR"
"""Environment variable of the workers: where the driver is."""

CONNECT_TIMEOUT_S = 10.0
LOSS_SEEN_WITHIN_S = 0.5
"""After a signal to all processes of a run, Ray's head does not listen any more by then."""

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
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        # Ray colours the name in front of a worker's line, also in a file.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    require_reachable(os.environ.get("RAY_ADDRESS", ""))
    runtime_env = {
        "env_vars": {
            "PYTHONPATH": python_path,
            WORKING_DIR: os.getcwd(),
            # Progress bars of several processes would overwrite each other.
            "TQDM_DISABLE": "1",
        },
        "worker_process_setup_hook": f"{__name__}.{enter_working_dir.__name__}",
    }
    with _own_sigterm_handler():
        _connect(runtime_env)


@contextlib.contextmanager
def _own_sigterm_handler() -> Generator[None]:
    """Ray's own ends the process before anything is taken down, by ``SystemExit`` while Ray starts:
    a signal that comes then is ours afterwards."""
    ours, was_sent = signal.getsignal(signal.SIGTERM), False
    try:
        yield
    except SystemExit as ended:
        was_sent = ended.code == signal.SIGTERM
        if not was_sent:
            raise
    finally:
        signal.signal(signal.SIGTERM, ours)
    if was_sent:
        signal.raise_signal(signal.SIGTERM)


def is_own() -> bool:
    """Whether the cluster is one that this run starts on this machine: no other machine joins."""
    return _address() == "local"


def is_lost(within_s: float = LOSS_SEEN_WITHIN_S) -> bool:
    """Whether a cluster that this run started has lost its head, or loses it now, as by a signal
    that went to all processes of the run: what is asked of Ray then has no answer for a minute."""
    if not is_own() or not ray.is_initialized():
        return False
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)


def abandon() -> None:
    """End every process that a lost cluster has left here, without Ray. The process should end
    with ``leave``: Ray's own end would wait for its head."""
    _end(set(psutil.Process().children(recursive=True)))


def leave(status: int) -> None:
    """End this process at once if its cluster is lost; return otherwise."""
    if is_lost(0):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _address() -> str:
    # Without one Ray would join whatever cluster `ray start` left behind here.
    return os.environ.get("RAY_ADDRESS") or "local"


def _connect(runtime_env: dict[str, Any]) -> None:
    address = os.environ.get("RAY_ADDRESS")
    before = set(psutil.Process().children(recursive=True))
    error = _init(runtime_env)
    if error is None:
        return
    if address:
        raise JobError(
            f"joining the Ray cluster of RAY_ADDRESS={address} failed ({describe(error)}): see "
            "`ray status` there; one that asks for a token wants RAY_AUTH_MODE=token and its "
            "RAY_AUTH_TOKEN here too (`ray get-auth-token` there); or unset RAY_ADDRESS to run on "
            "this machine alone"
        ) from error
    # Ray gives its processes half a minute, which a busy machine may not have the time for.
    log.warning("Ray did not start on this machine (%s); trying once more", describe(error))
    ray.shutdown()
    _end(set(psutil.Process().children(recursive=True)) - before)
    error = _init(runtime_env)
    if error is not None:
        raise JobError(
            f"Ray did not start on this machine, twice ({describe(error)}): try again when the "
            "machine is less busy, end what earlier runs left (`ray stop`), or start a cluster "
            "(`ray start --head`) and set RAY_ADDRESS; Ray's logs are in session_latest/logs of "
            "/tmp/ray (or RAY_TMPDIR)"
        ) from error


def _end(processes: Collection[psutil.Process]) -> None:
    """Those of an attempt that failed, which Ray leaves running until the driver ends."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=CONNECT_TIMEOUT_S)


def _init(runtime_env: dict[str, Any]) -> Exception | None:
    """What came in the way; ``None``: nothing."""
    try:
        ray.init(
            address=_address(),
            include_dashboard=False,
            logging_level=logging.ERROR,
            runtime_env=runtime_env,
        )
    except Exception as error:  # what Ray raises when a node does not start is often bare Exception
        return error
    return None


def require_reachable(address: str) -> None:
    """Raise ``JobError`` when nothing listens at ``host:port``: Ray itself tries for minutes.

    Other forms of an address (``auto``, ``local``) are left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise JobError(
            f"no Ray cluster at RAY_ADDRESS={address} ({error}): start it, or unset RAY_ADDRESS to "
            "run on this machine alone"
        ) from error


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
    """Disconnect, and end the cluster when this run started it and it is not lost."""
    if not is_lost(0):
        ray.shutdown()
