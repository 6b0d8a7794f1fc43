"""Runs of ``train.py`` whose engines were launched elsewhere."""

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Start, completed, metrics_of, wait_until
from tests.engine_process import EngineProcess, ending, get, launch, launch_sglang

Runner = Callable[..., "subprocess.CompletedProcess[str]"]


def external(flags: dict[str, Any], *urls: str) -> dict[str, Any]:
    own = {name: value for name, value in flags.items() if name != "rollout-num-gpus"}
    addresses = [url.removeprefix("http://") for url in urls]
    return {**own, "rollout-external": True, "rollout-external-engine-addrs": addresses}


def version(url: str) -> int:
    return int(get(url, "/model_info").json["weight_version"])


@pytest.mark.full
def test_an_engine_launched_elsewhere_is_trained_and_outlives_the_run(
    run_train: Runner, base_flags: dict[str, Any], tiny_qwen3: Path, tmp_path: Path
) -> None:
    with ending(launch(tiny_qwen3, tmp_path / "server")) as engine:
        flags = external({**base_flags, "num-rollout": 2}, engine.url)
        result = run_train({**flags, "run-dir": tmp_path / "run"})
        assert result.returncode == 0, result.stderr
        rows = metrics_of(tmp_path / "run")
        assert [row["rollout/weight_version"] for row in rows] == [2, 3]
        assert all(row["train/grad_norm"] > 0 for row in rows)
        assert version(engine.url) == 3
        assert get(engine.url, "/health_generate").status == 200
    assert not (tmp_path / "run/logs").exists()


@pytest.mark.sglang
@pytest.mark.full
def test_sglang_launched_elsewhere_stands_behind_the_jobs_router(
    run_train: Runner, base_flags: dict[str, Any], tiny_qwen3: Path, tmp_path: Path
) -> None:
    with ending(launch_sglang(tiny_qwen3, tmp_path / "server")) as engine:
        flags = external({**base_flags, "num-rollout": 2}, engine.url)
        del flags["deterministic-rollout"]
        run = tmp_path / "run"
        result = run_train({**flags, "rollout-engine": "sglang", "run-dir": run}, timeout=280)
        assert result.returncode == 0, result.stderr
        rows = metrics_of(run)
        assert [row["rollout/weight_version"] for row in rows] == [2, 3]
        assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
        assert version(engine.url) == 3
        assert get(engine.url, "/health").status == 200
        assert [file.name for file in (run / "logs").iterdir()] == ["router.log"]


@pytest.mark.full
def test_an_engine_that_is_not_what_the_job_needs_is_refused(
    run_train: Runner, base_flags: dict[str, Any], tiny_qwen3: Path, tmp_path: Path
) -> None:
    with ending(launch(tiny_qwen3, tmp_path / "server", "--dtype", "bfloat16")) as engine:
        flags = external({**base_flags, "rollout-num-gpus-per-engine": 2}, engine.url)
        result = run_train({**flags, "run-dir": tmp_path / "run"})
        assert result.returncode == 1
        assert f"{engine.url}: tp_size is 1 and must be 2" in result.stderr
        assert f"{engine.url}: dtype is 'bfloat16' and must be 'float32'" in result.stderr
        assert version(engine.url) == 0


@pytest.mark.full
def test_an_engine_that_ends_within_a_run_and_comes_back_is_given_weights(
    start: Start, base_flags: dict[str, Any], tiny_qwen3: Path, tmp_path: Path
) -> None:
    steady = launch(tiny_qwen3, tmp_path / "steady")
    mortal = launch(tiny_qwen3, tmp_path / "mortal")
    again: EngineProcess | None = None
    try:
        urls = [engine.wait_ready().url for engine in (steady, mortal)]
        flags = external({**base_flags, "num-rollout": 400}, *urls)
        del flags["deterministic-rollout"]
        run = start({**flags, "run-dir": tmp_path / "run"})
        lines: list[str] = []
        assert run.stdout is not None
        output = run.stdout
        reader = threading.Thread(target=lambda: lines.extend(output), daemon=True)
        reader.start()
        wait_until(lambda: completed(tmp_path / "run") >= 2, run)
        mortal.process.kill()
        mortal.process.wait()
        wait_until(lambda: any("left out until it answers again" in line for line in lines), run)
        seen = completed(tmp_path / "run")
        wait_until(lambda: completed(tmp_path / "run") >= seen + 2, run)
        port = urls[1].rpartition(":")[2]
        again = launch(tiny_qwen3, tmp_path / "again", "--port", port).wait_ready()
        wait_until(lambda: any(f"engine {urls[1]} is back" in line for line in lines), run)
        wait_until(lambda: version(urls[1]) > 2, run)
        behind = version(urls[0]) - version(urls[1])
        assert abs(behind) <= 1
        psutil.Process(run.pid).terminate()
        run.wait(60)
        assert get(urls[0], "/health").status == get(urls[1], "/health").status == 200
    finally:
        for engine in filter(None, (steady, mortal, again)):
            engine.stop()


@pytest.mark.full
def test_a_run_whose_only_engine_ends_stops_and_says_what_to_do(
    start: Start, base_flags: dict[str, Any], tiny_qwen3: Path, tmp_path: Path
) -> None:
    engine = launch(tiny_qwen3, tmp_path / "server").wait_ready()
    try:
        flags = external({**base_flags, "num-rollout": 400}, engine.url)
        run = start({**flags, "run-dir": tmp_path / "run"})
        wait_until(lambda: completed(tmp_path / "run") >= 1, run)
        engine.process.kill()
        began = time.monotonic()
        output, _ = run.communicate(timeout=120)
        assert run.returncode == 1
        assert "none of the engines of --rollout-external-engine-addrs answers" in output
        assert time.monotonic() - began < 60
    finally:
        engine.stop()
