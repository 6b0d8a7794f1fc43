"""The whole line on a CPU: engines, rewards, two trainer ranks, weight sync, checkpoints."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.backends.training_utils.checkpoints import TRACKER
from miles.backends.training_utils.hf_files import HFFiles
from miles.weight_sync.checksums import checksum
from tests.e2e.conftest import BACKENDS, metrics_of, with_backend
from tests.metrics_page import unlisted

Runner = Callable[..., "subprocess.CompletedProcess[str]"]
TIMES = ("perf/", "time")


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """What must be equal between two runs: everything but seconds."""
    return {k: v for k, v in row.items() if not k.startswith(TIMES)}


def on_disk(folder: Path) -> dict[str, Any]:
    return {
        "offload-train-target": "disk",
        "offload-train-disk-dir": folder,
        "offload-train-disk-chunk-mb": 1,
        "stream-optimizer-state-to-disk": True,
    }


@pytest.fixture(scope="module", params=BACKENDS)
def flags(
    request: pytest.FixtureRequest, base_flags: dict[str, Any], reverse_data: Path
) -> dict[str, Any]:
    """Evaluated before the first rollout and after the third."""
    return {
        **with_backend(base_flags, request.param),
        "num-rollout": 4,
        # As many as there are trainer ranks, and so as with --colocate.
        "rollout-num-gpus": 2,
        "eval-interval": 3,
        "eval-prompt-data": ["digits", f"{reverse_data / 'eval.jsonl'}@[:4]"],
    }


def rollouts(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metrics_of(run_dir) if row["step"] > 0]


@pytest.fixture(scope="module")
def reference_run(
    run_train: Runner, flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Four uninterrupted rollouts, disaggregated, with checkpoints and an export.

    Its paths are relative to another directory than the one that the cluster was started in."""
    folder = tmp_path_factory.mktemp("reference")
    result = run_train(
        {
            **flags,
            "save": "ckpt",
            "save-interval": 2,
            "save-hf": "hf-{rollout_id}",
            "run-dir": "run",
        },
        cwd=folder,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "output.txt").write_text(result.stdout + result.stderr, encoding="utf-8")
    return folder


def test_output_that_goes_to_a_file_has_no_escape_sequences(reference_run: Path) -> None:
    output = (reference_run / "output.txt").read_text(encoding="utf-8")
    assert "pid=" in output, "workers speak too"
    assert "\x1b" not in output


def test_the_terminal_shows_the_numbers_of_every_rollout(reference_run: Path) -> None:
    output = (reference_run / "output.txt").read_text(encoding="utf-8")
    lines = [line for line in output.splitlines() if line.startswith("rollout ")]
    for line, row in zip(lines, rollouts(reference_run / "run"), strict=True):
        assert line == "  ".join(
            [
                f"rollout {row['step']}/4",
                f"reward {row['rollout/raw_reward']:.3f}",
                f"len {row['rollout/response_len/mean']:.1f}",
                f"loss {row['train/loss']:+.4f}",
                f"kl {row['train/ppo_kl']:.1e}",
                f"grad {row['train/grad_norm']:.2f}",
                f"lr {row['train/lr']:.1e}",
                f"gen s {row['perf/rollout_time']:.2f}",
                f"train s {row['perf/train_time']:.2f}",
                f"sync s {row['perf/update_weights_time']:.2f}",
                f"tok/s {row['rollout/num_tokens'] / row['perf/step_time']:,.0f}",
            ]
        )


def test_every_rollout_is_recorded_and_weights_advance(reference_run: Path) -> None:
    rows = rollouts(reference_run / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    versions = [row["rollout/weight_version"] for row in rows]
    assert versions == [2, 3, 4, 5]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert (reference_run / "run" / "reward.png").stat().st_size > 0
    assert (reference_run / "run" / "samples.txt").read_text(encoding="utf-8")


def test_every_metric_is_on_the_page(reference_run: Path) -> None:
    assert unlisted(metrics_of(reference_run / "run")) == set()


def test_the_first_step_sees_the_engines_own_log_probs(reference_run: Path) -> None:
    for row in rollouts(reference_run / "run"):
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_the_export_is_what_transformers_loads(reference_run: Path) -> None:
    from transformers import AutoModelForCausalLM

    from miles.core.hf import load_tokenizer

    exports = sorted(reference_run.glob("hf-*"))
    assert exports
    model = AutoModelForCausalLM.from_pretrained(exports[-1])
    assert model.num_parameters() > 0
    assert load_tokenizer(str(exports[-1])).eos_token == "<eos>"


@pytest.mark.parametrize("target", ["disk", pytest.param("cpu", marks=pytest.mark.full)])
def test_a_colocated_run_equals_the_disaggregated_one(
    run_train: Runner, flags: dict[str, Any], reference_run: Path, tmp_path: Path, target: str
) -> None:
    """Wherever the trainer's state lies while it sleeps, and during its steps."""
    # Without --rollout-engine too: its default must find the same engine.
    omitted = ("rollout-num-gpus", "rollout-engine")
    result = run_train(
        {
            **{k: v for k, v in flags.items() if k not in omitted},
            "colocate": True,
            **(on_disk(tmp_path / "scratch") if target == "disk" else {}),
            "run-dir": tmp_path,
        }
    )
    assert result.returncode == 0, result.stdout + result.stderr
    expected = [numbers(row) for row in metrics_of(reference_run / "run")]
    rows = metrics_of(tmp_path)
    assert [numbers(row) for row in rows] == expected
    assert unlisted(rows) == set()


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    run_train: Runner, flags: dict[str, Any], reference_run: Path, tmp_path: Path
) -> None:
    flags = {
        **flags,
        "save": tmp_path / "ckpt",
        "load": tmp_path / "ckpt",
        "save-hf": tmp_path / "hf-{rollout_id}",
    }
    first = run_train(
        {**flags, "save-interval": 2, "debug-exit-after-rollout": 2, "run-dir": tmp_path / "a"}
    )
    assert first.returncode == 0, first.stdout + first.stderr
    second = run_train({**flags, "run-dir": tmp_path / "b"})
    assert second.returncode == 0, second.stdout + second.stderr
    rows = metrics_of(tmp_path / "a") + metrics_of(tmp_path / "b")
    expected = [numbers(row) for row in metrics_of(reference_run / "run")]
    assert [without_version(numbers(row)) for row in rows] == [
        without_version(row) for row in expected
    ]
    assert exported_weights(tmp_path) == exported_weights(reference_run)


@pytest.mark.full
@pytest.mark.parametrize("told_not_to", [None, True], ids=["", "skipping"])
def test_a_run_that_resumes_where_an_evaluation_is_due_evaluates_once_before_it_trains(
    run_train: Runner,
    flags: dict[str, Any],
    reference_run: Path,
    tmp_path: Path,
    told_not_to: bool | None,
) -> None:
    """--skip-eval-before-train is about the start of training, which this is not."""
    ckpt = Path(shutil.copytree(reference_run / "ckpt", tmp_path / "ckpt"))
    (ckpt / TRACKER).write_text("2", encoding="utf-8")
    result = run_train(
        {
            **flags,
            "load": ckpt,
            "eval-interval": 2,
            "skip-eval-before-train": told_not_to,
            "debug-exit-after-rollout": 1,
            "run-dir": tmp_path / "run",
        }
    )
    assert result.returncode == 0, result.stdout + result.stderr
    text = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    events = [
        (row["step"], name)
        for row in map(json.loads, text.splitlines())
        for name in ("eval/digits", "train/grad_norm")
        if name in row
    ]
    assert events == [(2, "eval/digits"), (3, "train/grad_norm")]


def without_version(row: dict[str, Any]) -> dict[str, Any]:
    """The engines of a resumed run start counting anew."""
    return {k: v for k, v in row.items() if "weight_version" not in k}


def exported_weights(folder: Path) -> dict[str, str]:
    """Digest of every tensor after the last rollout."""
    files = HFFiles(folder / "hf-3")
    return {name: checksum(files.read(name)) for name in files.headers}


def test_config_json_records_every_flag(reference_run: Path) -> None:
    config = json.loads((reference_run / "run" / "config.json").read_text(encoding="utf-8"))
    assert config["data"]["num_rollout"] == 4
    assert config["checkpoint"]["save_interval"] == 2


@pytest.mark.megatron
def test_a_colocated_megatron_run_generates_trains_and_syncs(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    omitted = ("rollout-num-gpus", "rollout-engine")
    flags = {k: v for k, v in base_flags.items() if k not in omitted}
    result = run_train(
        {
            **with_backend(flags, "megatron"),
            "num-rollout": 2,
            "colocate": True,
            # One engine with the cores of both slots.
            "rollout-num-gpus-per-engine": 2,
            "run-dir": tmp_path,
        }
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = rollouts(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert unlisted(rows) == set()
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows)
