"""Which engine a job gets, and what SGLang refuses when flags are parsed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles.backends.sglang_utils import package, rules
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from scripts.made_models import make_qwen3, make_qwen3_moe


def job(engine: str, model: Path | None = None, **rollout: Any) -> MilesConfig:
    config = MilesConfig()
    path = None if model is None else str(model)
    rollout = {"rollout_engine": engine, "hf_checkpoint": path, **rollout}
    return replace(config, rollout=replace(config.rollout, **rollout))


def checked(config: MilesConfig, gpus_per_engine: int = 1) -> MilesConfig:
    """The same with ``--check-weight-update-equal``."""
    return replace(
        config,
        cluster=replace(config.cluster, rollout_num_gpus_per_engine=gpus_per_engine),
        weight_sync=replace(config.weight_sync, check_weight_update_equal=True),
    )


def machine(
    monkeypatch: pytest.MonkeyPatch, *, sglang: bool = True, accelerator: bool = False
) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: sglang)
    monkeypatch.setattr(package, "has_router", lambda: sglang)
    monkeypatch.setattr(package, "has_accelerator", lambda: accelerator)
    monkeypatch.setattr(package, "_has_cpu_platform", lambda: True)


@pytest.mark.parametrize(
    ("sglang", "accelerator", "deterministic", "engine", "reason"),
    [
        (True, True, False, "sglang", "accelerator and the sglang package"),
        (True, False, False, "embedded", "no accelerator"),
        (False, True, False, "embedded", "not installed"),
        (True, True, True, "embedded", "--deterministic-rollout"),
    ],
)
def test_auto_is_sglang_where_it_and_an_accelerator_are(
    monkeypatch: pytest.MonkeyPatch,
    sglang: bool,
    accelerator: bool,
    deterministic: bool,
    engine: str,
    reason: str,
) -> None:
    machine(monkeypatch, sglang=sglang, accelerator=accelerator)
    chosen, why = package.choose_engine(job("auto", deterministic_rollout=deterministic))
    assert chosen == engine
    assert reason in why


@pytest.mark.parametrize("engine", ["sglang", "embedded"])
def test_an_engine_that_is_named_is_taken(engine: str) -> None:
    assert package.choose_engine(job(engine))[0] == engine


def test_a_driver_without_an_accelerator_says_that_its_cluster_may_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "RAY_ADDRESS" not in package.choose_engine(job("auto"))[1]
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    engine, why = package.choose_engine(job("auto"))
    assert engine == "embedded"
    assert "--rollout-engine sglang if the machines of RAY_ADDRESS have some" in why


def only(problems: list[Problem]) -> Problem:
    (found,) = problems
    return found


def test_sglang_that_is_not_installed_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, sglang=False)
    found = only(rules.check(job("sglang")))
    assert "make sglang-cpu" in found.remedy
    assert "--rollout-engine embedded" in found.remedy


def test_an_installation_without_our_entry_point_is_refused_without_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(package, "_has_cpu_platform", lambda: False)
    assert "pip install --no-deps -e ." in only(rules.check(job("sglang"))).remedy
    machine(monkeypatch, accelerator=True)
    monkeypatch.setattr(package, "_has_cpu_platform", lambda: False)
    assert rules.check(job("sglang")) == []


def test_a_divided_model_needs_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job("sglang")
    config = replace(config, cluster=replace(config.cluster, rollout_num_gpus_per_engine=2))
    machine(monkeypatch)
    assert only(rules.check(config)).flag == "--rollout-num-gpus-per-engine"
    machine(monkeypatch, accelerator=True)
    assert rules.check(config) == []


def test_checksums_are_refused_where_they_could_not_be_compared(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, tmp_path: Path
) -> None:
    machine(monkeypatch, accelerator=True)
    assert rules.check(checked(job("sglang", tiny_qwen3))) == []
    assert rules.check(checked(job("sglang", tiny_qwen3), gpus_per_engine=2)) == []

    other = tmp_path / "other"
    shutil.copytree(tiny_qwen3, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["MadeUp"]}))
    unknown = only(rules.check(checked(job("sglang", other))))
    assert unknown.flag == "--check-weight-update-equal"
    assert "'MadeUp' (known: LlamaForCausalLM, " in unknown.remedy
    assert rules.check(checked(job("embedded", other))) == []


def test_sizes_that_sglang_pads_on_a_host_are_refused_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = make_qwen3(tmp_path / "odd", intermediate_size=48)
    machine(monkeypatch)
    found = only(rules.check(job("sglang", odd)))
    assert found.flag == "--rollout-engine"
    assert "the model has intermediate_size 48;" in found.remedy
    machine(monkeypatch, accelerator=True)
    assert rules.check(job("sglang", odd)) == []


@pytest.mark.parametrize("accelerator", [True, False])
def test_dense_layers_that_sglang_would_make_layers_of_experts_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accelerator: bool
) -> None:
    machine(monkeypatch, accelerator=accelerator)
    sparse = make_qwen3_moe(tmp_path / "sparse")
    mixed = make_qwen3_moe(tmp_path / "mixed", dense_layers=(1,))
    assert rules.check(job("sglang", sparse)) == []
    found = only(rules.check(job("sglang", mixed)))
    assert found.flag == "--rollout-engine"
    assert "mlp_only_layers [1]" in found.remedy
    assert rules.check(job("embedded", mixed)) == []
    values = json.loads((sparse / "config.json").read_text())
    (sparse / "config.json").write_text(json.dumps({**values, "decoder_sparse_step": 2}))
    assert "decoder_sparse_step 2" in only(rules.check(job("sglang", sparse))).remedy


def test_nothing_is_refused_where_there_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, sglang=False)
    config = job("sglang")
    supervised = replace(config, algorithm=replace(config.algorithm, loss_type="sft_loss"))
    assert rules.check(supervised) == []


def test_a_router_is_needed_unless_one_runs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, accelerator=True)
    monkeypatch.setattr(package, "has_router", lambda: False)
    assert "sglang-router==0.3.2" in only(rules.check(job("sglang"))).remedy
    assert rules.check(job("sglang", sglang_router_ip="::1", sglang_router_port=3000)) == []
