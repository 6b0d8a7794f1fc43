"""``--sglang-*`` and ``--router-*``: what reaches SGLang, and what is refused with which remedy."""

import importlib.metadata
import itertools
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from miles.backends.sglang_utils import arguments, package, refusals, surface
from miles.backends.sglang_utils.arguments import (
    check,
    colocated_arguments,
    machine_arguments,
    router_arguments,
    server_arguments,
)
from miles.config.command_line import Foreign
from miles.config.errors import Problem
from miles.config.flags import flag_specs
from miles.config.root import MilesConfig

ROOT = Path(__file__).parents[4]


def job(engine: str, *, gpus: int = 1, colocate: bool = False, **rollout: Any) -> MilesConfig:
    config = MilesConfig()
    return replace(
        config,
        rollout=replace(config.rollout, rollout_engine=engine, **rollout),
        cluster=replace(config.cluster, rollout_num_gpus_per_engine=gpus, colocate=colocate),
        offload=replace(config.offload, offload_rollout=colocate),
    )


def machine(monkeypatch: pytest.MonkeyPatch, *, sglang: bool, accelerator: bool = True) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: sglang)
    monkeypatch.setattr(package, "has_accelerator", lambda: accelerator)


def flags(*words: str) -> list[Foreign]:
    """``--name value ...`` words as the command line's parser hands over what it does not know."""
    found: list[Foreign] = []
    for word in words:
        if word.startswith("--"):
            found.append(Foreign(name=word))
        else:
            found[-1] = replace(found[-1], words=(*found[-1].words, word))
    return found


def by_flag(problems: Sequence[Problem]) -> dict[str, str]:
    return {problem.flag: problem.remedy for problem in problems}


# Everywhere


def test_the_embedded_engine_refuses_each_flag_that_it_does_not_implement() -> None:
    config = job("embedded", sglang_mem_fraction_static=0.5)
    given = frozenset({"sglang_mem_fraction_static"})
    foreign = flags(
        *("--sglang-page-size", "16", "--router-policy", "random", "--sglang-tp-size", "2")
    )
    problems = by_flag(check(config, given, foreign).problems)
    assert "--rollout-num-gpus-per-engine" in problems["--sglang-tp-size"]
    assert "the embedded engine has no such flag" in problems["--sglang-page-size"]
    assert "the embedded engine has no such flag" in problems["--sglang-mem-fraction-static"]
    assert "no router stands before embedded engines" in problems["--router-policy"]


def test_a_slip_of_the_pen_is_corrected_without_sglang_too() -> None:
    foreign = flags("--sglang-contxt-length", "8")
    (found,) = check(job("embedded"), frozenset(), foreign).problems
    assert "did you mean --sglang-context-length" in found.remedy


def test_flags_without_the_package_are_one_problem_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, sglang=False)
    foreign = flags("--sglang-page-size", "16", "--sglang-enable-metrics")
    (found,) = check(job("auto"), frozenset(), foreign).problems
    assert found.flag == "--sglang-page-size, --sglang-enable-metrics"
    assert "miles[sglang]" in found.remedy
    assert "sglang==0.5.16" in found.remedy


def test_an_engine_chosen_for_a_reason_says_it_when_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, sglang=True, accelerator=False)
    (found,) = check(job("auto"), frozenset(), flags("--sglang-enable-metrics")).problems
    assert "--rollout-engine auto is here (there is no accelerator" in found.remedy


def test_flags_for_a_router_that_runs_already_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, sglang=True)
    config = job("sglang", sglang_router_ip="10.0.0.1", sglang_router_port=3000)
    (found,) = check(config, frozenset(), flags("--router-policy", "random")).problems
    assert "runs already" in found.remedy


def test_flags_for_engines_that_run_already_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, sglang=True)
    config = job("sglang", rollout_external=True, rollout_external_engine_addrs=("10.0.0.1:3000",))
    (found,) = check(config, frozenset(), flags("--sglang-page-size", "16")).problems
    assert found.flag == "--sglang-page-size"
    assert "launched with flags of their own" in found.remedy


def test_the_router_waits_for_a_request_as_long_as_the_job_does() -> None:
    config = job("sglang", rollout_request_timeout_s=90.5, sglang_log_level="WARNING")
    assert router_arguments(replace(config, router_argv=("--policy", "random"))) == [
        *("--request-timeout-secs", "91", "--log-level", "warn", "--disable-health-check"),
        *("--policy", "random"),
    ]


def test_a_run_without_engines_refuses_flags_of_engines() -> None:
    config = job("sglang")
    supervised = replace(config, algorithm=replace(config.algorithm, loss_type="sft_loss"))
    (found,) = check(supervised, frozenset(), flags("--sglang-page-size", "16")).problems
    assert "applies only where there are engines" in found.remedy


def test_a_run_on_recorded_rollouts_takes_the_command_line_that_recorded_them() -> None:
    config = job("sglang")
    recorded = replace(
        config, observability=replace(config.observability, load_debug_rollout_data="x")
    )
    checked = check(recorded, frozenset(), flags("--sglang-page-size", "16"))
    assert (checked.problems, checked.sglang_argv) == ([], ())


@pytest.mark.parametrize(("share", "warned"), [(None, False), (0.8, False), (0.85, True)])
def test_a_colocated_engine_with_more_than_its_share_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, share: float | None, warned: bool
) -> None:
    machine(monkeypatch, sglang=True)
    for colocate in (True, False):
        config = job("sglang", colocate=colocate, sglang_mem_fraction_static=share)
        levels = [message.level for message in check(config, frozenset(), ()).messages]
        assert levels == [logging.WARNING] * (warned and colocate)


def test_a_colocated_engine_leaves_room_for_the_trainer() -> None:
    expected = ["--mem-fraction-static", "0.8", "--cuda-graph-backend-prefill", "disabled"]
    assert colocated_arguments(job("sglang", colocate=True)) == [
        *expected,
        "--enable-memory-saver",
    ]
    own = job("sglang", colocate=True, sglang_mem_fraction_static=0.6)
    assert "--mem-fraction-static" not in colocated_arguments(own)


def test_an_explicit_graph_config_is_not_overruled_by_our_default() -> None:
    config = replace(job("sglang", colocate=True), sglang_argv=("--cuda-graph-config", "{}"))
    assert "--cuda-graph-backend-prefill" not in colocated_arguments(config)


def test_an_engine_with_devices_of_its_own_has_sglangs_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, sglang=True)
    assert machine_arguments(job("sglang"), 1) == []


def test_flags_of_the_user_come_after_ours_and_win(tiny_qwen3: Path) -> None:
    config = job(
        "sglang",
        hf_checkpoint=str(tiny_qwen3),
        sglang_mem_fraction_static=0.25,
        sglang_max_total_tokens=100,
        sglang_dtype="bfloat16",
    )
    config = replace(config, sglang_argv=("--attention-backend", "triton"))
    argv = server_arguments(config, 0, num_engines=4)
    assert argv[-2:] == ["--attention-backend", "triton"]
    pairs = list(itertools.pairwise(argv))
    for pair in (
        ("--mem-fraction-static", "0.25"),
        ("--max-total-tokens", "100"),
        ("--dtype", "bfloat16"),
    ):
        assert pair in pairs
        assert argv.count(pair[0]) == 1


def test_the_extra_has_the_versions_that_messages_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["sglang"]
    assert package.TESTED_VERSIONS.split(", ") == extra[:2]


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().split()
    return {canonicalize_name(n): version for n, _, version in (x.partition("==") for x in lines)}


def test_without_an_accelerator_the_versions_are_those_of_the_extra() -> None:
    installed = pins("constraints-sglang-cpu.txt")
    named = ("sglang", "sglang-router")
    assert ", ".join(f"{n}=={installed[n]}" for n in named) == package.TESTED_VERSIONS


@pytest.mark.sglang
def test_sglang_takes_the_versions_that_its_page_installs_it_beside() -> None:
    """What it asks for itself; what its own dependencies ask for only an index knows."""
    page = (ROOT / "docs/sglang.md").read_text()
    (left_out,) = re.findall(r"grep -vE '\^\((.*)\)==' constraints.txt", page)
    pinned = pins("constraints.txt")
    for name in left_out.split("|"):
        del pinned[name]
    asked = [Requirement(line) for line in importlib.metadata.requires("sglang") or ()]
    asked = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    shared = {canonicalize_name(each.name): each.specifier for each in asked}
    assert {"torch", "transformers"} <= shared.keys() & pinned.keys()
    for name in shared.keys() & pinned.keys():
        assert shared[name].contains(pinned[name]), name


def test_the_page_lists_every_flag_that_ours_alone_set() -> None:
    page = (ROOT / "docs/sglang.md").read_text()
    for prefix, table in (("--sglang-", refusals.SERVER), ("--router-", refusals.ROUTER)):
        assert [name for name in table if f"`{prefix}{name}`" not in page] == []
    assert [name for name in refusals.RENAMES if f"`--sglang-{name}`" not in page] == []


def test_an_environment_of_nccl_other_than_the_engines_is_refused() -> None:
    config = job("embedded")
    for value, flags_wrong in (("1", ["--train-env-vars"]), ("0", [])):
        cluster = replace(config.cluster, train_env_vars={"NCCL_CUMEM_ENABLE": value})
        checked = check(replace(config, cluster=cluster), frozenset(), [])
        assert [found.flag for found in checked.problems] == flags_wrong


# With SGLang


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an accelerator, as far as flags are concerned."""
    monkeypatch.setattr(package, "has_accelerator", lambda: True)


@pytest.mark.sglang
@pytest.mark.usefixtures("sglang")
class TestWithSglang:
    def test_flags_reach_the_server_and_the_router_under_their_own_names(self) -> None:
        foreign = [
            *flags("--sglang-enable-dp-attention", "--sglang-dp-size", "8"),
            *flags("--sglang-chunked-prefill-size", "-1"),
            *flags("--sglang-log-requests-target", "stdout", "/tmp/x"),
            *flags("--router-balance-abs-threshold", "0"),
        ]
        checked = check(job("sglang", gpus=8), frozenset(), foreign)
        assert checked.problems == []
        assert checked.sglang_argv == (
            *("--enable-dp-attention", "--dp-size", "8", "--chunked-prefill-size=-1"),
            *("--log-requests-target", "stdout", "/tmp/x"),
        )
        assert checked.router_argv == ("--balance-abs-threshold", "0")

    def test_what_ours_alone_set_is_refused_with_the_flag_that_sets_it(self) -> None:
        foreign = flags(
            *("--sglang-tp-size", "2", "--sglang-tensor-parallel-size", "2"),
            *("--sglang-model-path", "x", "--sglang-port", "1", "--router-port", "1"),
            *("--sglang-random-seed", "1", "--router-worker-urls", "http://a"),
        )
        problems = by_flag(check(job("sglang"), frozenset(), foreign).problems)
        assert problems.keys() == {flag.name for flag in foreign}
        assert "--rollout-num-gpus-per-engine" in problems["--sglang-tp-size"]
        assert "--rollout-num-gpus-per-engine" in problems["--sglang-tensor-parallel-size"]
        assert "--hf-checkpoint" in problems["--sglang-model-path"]
        assert "--rollout-seed" in problems["--sglang-random-seed"]

    def test_weights_that_a_sync_cannot_update_are_refused(self) -> None:
        foreign = flags(
            *("--sglang-quantization", "fp8", "--sglang-torchao-config", "int8wo"),
            *("--sglang-modelopt-quant", "fp8", "--sglang-quantize-and-serve"),
        )
        problems = by_flag(check(job("sglang"), frozenset(), foreign).problems)
        assert problems.keys() == {flag.name for flag in foreign}
        assert all("weight sync" in remedy for remedy in problems.values())

    @pytest.mark.parametrize(("words", "value"), [((), "1"), (("--sglang-enable-symm-mem",), "0")])
    def test_symmetric_memory_needs_the_trainers_environment_to_be_like_the_engines(
        self, words: tuple[str, ...], value: str
    ) -> None:
        config = job("sglang")
        cluster = replace(config.cluster, train_env_vars={"NCCL_CUMEM_ENABLE": value})
        (found,) = check(replace(config, cluster=cluster), frozenset(), flags(*words)).problems
        assert found.flag == "--train-env-vars"
        assert "symm-mem" in found.remedy

    def test_every_refused_name_is_one_of_the_installed_release(self) -> None:
        server, router = surface.server(), surface.router()
        assert refusals.SERVER.keys() <= set(server.names.values())
        assert refusals.ROUTER.keys() <= set(router.names.values())

    def test_values_are_read_with_sglangs_own_types(self) -> None:
        foreign = flags(
            *("--sglang-page-size", "x", "--sglang-schedule-policy", "nope"),
            *("--sglang-enable-metrics", "true", "--sglang-max-queued-requests"),
            *("--sglang-nnodez", "2", "--router-policy", "nope", "--router-cache-threshold", "x"),
        )
        problems = by_flag(check(job("sglang"), frozenset(), foreign).problems)
        assert problems.keys() == {flag.name for flag in foreign}
        assert "invalid int value: 'x'" in problems["--sglang-page-size"]
        assert "choose from 'lpm'" in problems["--sglang-schedule-policy"]
        assert "expected one argument" in problems["--sglang-max-queued-requests"]
        assert "round_robin" in problems["--router-policy"]

    def test_an_unknown_flag_is_answered_with_sglangs_nearest(self) -> None:
        foreign = flags("--sglang-schedule-polcy", "lpm", "--router-polcy", "random")
        problems = by_flag(check(job("sglang"), frozenset(), foreign).problems)
        assert "did you mean --sglang-schedule-policy" in problems["--sglang-schedule-polcy"]
        assert "did you mean --router-policy" in problems["--router-polcy"]

    def test_a_flag_that_a_release_has_given_up_is_passed_on_under_its_new_name(self) -> None:
        foreign = flags("--sglang-enable-ep-moe", "--sglang-enable-deepep-moe")
        checked = check(job("sglang", gpus=4), frozenset(), foreign)
        assert checked.problems == []
        assert checked.sglang_argv == ("--ep-size", "4", "--moe-a2a-backend", "deepep")
        assert [message.level for message in checked.messages] == [logging.INFO] * 2
        assert checked.messages[0].text.startswith("--sglang-enable-ep-moe: ")
        assert "--ep-size 4" in checked.messages[0].text

    def test_new_names_are_of_the_installed_release_and_old_ones_are_not(self) -> None:
        known = surface.server().names
        for old, rename in refusals.RENAMES.items():
            assert f"--sglang-{old}" not in known
            value = rename.value(job("sglang", gpus=4))
            assert surface.server().fault([f"--{rename.option}", value]) is None

    @pytest.mark.parametrize(
        ("gpus", "words", "flag"),
        [
            (8, ("--sglang-dp-size", "2"), "--sglang-dp-size"),
            (8, ("--sglang-dp-size", "3", "--sglang-enable-dp-attention"), "--sglang-dp-size"),
            (2, ("--sglang-ep-size", "4"), "--sglang-ep-size"),
            (2, ("--sglang-ep-size", "0"), "--sglang-ep-size"),
        ],
    )
    def test_sizes_that_an_engines_gpus_do_not_divide_into_are_refused(
        self, gpus: int, words: tuple[str, ...], flag: str
    ) -> None:
        (found,) = check(job("sglang", gpus=gpus), frozenset(), flags(*words)).problems
        assert found.flag == flag

    @pytest.mark.parametrize(
        "words",
        [("--sglang-ep-size", "2"), ("--sglang-enable-dp-attention", "--sglang-dp-size", "2")],
    )
    def test_weights_are_checked_under_tensor_parallelism_alone(
        self, words: tuple[str, ...]
    ) -> None:
        config = job("sglang", gpus=2)
        assert check(config, frozenset(), flags(*words)).problems == []
        sync = replace(config.weight_sync, check_weight_update_equal=True)
        (found,) = check(replace(config, weight_sync=sync), frozenset(), flags(*words)).problems
        assert found.flag == words[0]

    @pytest.mark.parametrize("accelerator", [True, False])
    @pytest.mark.parametrize("colocate", [True, False])
    def test_the_installed_release_reads_every_argument_of_a_server(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tiny_qwen3: Path,
        accelerator: bool,
        colocate: bool,
    ) -> None:
        monkeypatch.setattr(package, "has_accelerator", lambda: accelerator)
        config = job("sglang", gpus=2, colocate=colocate, hf_checkpoint=str(tiny_qwen3))
        args = surface.server().read(server_arguments(config, 1, num_engines=2))
        assert (args.tp_size, args.dtype, args.random_seed) == (2, "float32", 43)
        assert args.model_path == str(tiny_qwen3)
        share = {(True, True): 0.8, (True, False): None}.get((accelerator, colocate), 0.4)
        assert args.mem_fraction_static == share
        off = colocate or not accelerator
        assert args.cuda_graph_backend_prefill == ("disabled" if off else None)
        assert args.enable_memory_saver == (accelerator and colocate)

    def test_the_installed_router_reads_every_argument_of_ours(self) -> None:
        args = surface.router().read(router_arguments(job("sglang", sglang_log_level="critical")))
        assert (args.request_timeout_secs, args.log_level) == (14400, "error")
        assert args.disable_health_check is True

    def test_the_help_has_every_flag_but_those_that_ours_alone_set(self) -> None:
        text = arguments.server_help()
        ours = {option for spec in flag_specs(MilesConfig) for option in spec.options}
        for name, first in surface.server().names.items():
            words = f"{name} " in text or f"{name}\n" in text or f"{name}," in text
            action = surface.server().parser._option_string_actions[f"--{first}"]
            if action.help != "==SUPPRESS==":
                assert words == (first not in refusals.SERVER and f"--sglang-{first}" not in ours)
        assert "--router-balance-abs-threshold" in arguments.router_help()
        assert "--router-worker-urls" not in arguments.router_help()

    @pytest.mark.full
    def test_reading_flags_leaves_the_environment_alone(self) -> None:
        code = (
            "import os, torch\n"
            "from miles.backends.sglang_utils import surface\n"
            "before = dict(os.environ)\n"
            "surface.server()\n"
            "assert dict(os.environ) == before\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
