"""Constraints: every rule refuses what it is for, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from types import NoneType
from typing import Any, get_args

import pytest

from miles.config.flags import flag_specs
from miles.config.root import MilesConfig
from miles.config.rules import CHECK, check, external, lengths, offload, places, ranges, required
from miles.config.rules import conflicts as conflict
from miles.config.rules.applies import APPLIES, flags_given_have_an_effect
from miles.config.rules.problems import Check, flag_name
from miles.config.rules.ranges import RANGES

Resolved = Callable[..., tuple[MilesConfig, frozenset[str]]]

EVAL = ("--eval-prompt-data", "a", "a.jsonl", "--eval-interval", "1")
SFT = ("--loss-type", "sft_loss")
NOT_SFT = (
    *("--rm-type", "--n-samples-per-prompt"),
    *("--rollout-max-response-len", "--rollout-num-gpus"),
)
EXTERNAL = ("--rollout-external", "--rollout-external-engine-addrs", "a.b:1", "[::1]:2")
DISK = ("--colocate", "--offload-train-target", "disk")
STREAM = (*DISK, "--stream-optimizer-state-to-disk")
REBUILD = ("--rematerialize-param-from-master-weight",)
REINFORCE = ("--advantage-estimator", "reinforce_plus_plus")

CASES: list[tuple[Check, str, tuple[str, ...], tuple[str, ...]]] = [
    # rule, flags that it names, arguments added to a valid command line, flags taken out of it
    (
        conflict.engines_compute_as_the_trainer,
        "--sglang-dtype, --fp16",
        ("--fp16", "--sglang-dtype", "bfloat16"),
        (),
    ),
    (
        conflict.engines_compute_as_the_trainer,
        "--check-weight-update-equal, --sglang-dtype",
        ("--check-weight-update-equal", "--sglang-dtype", "float32"),
        (),
    ),
    (required.model_is_given, "--hf-checkpoint", (), ("--hf-checkpoint",)),
    (required.batch_is_given, "--rollout-batch-size", (), ("--rollout-batch-size",)),
    (required.length_of_the_run_is_given, "--num-rollout", (), ("--num-rollout",)),
    (required.length_of_the_run_is_given, "--num-rollout, --num-epoch", ("--num-epoch", "1"), ()),
    (
        required.length_of_the_run_is_given,
        "--num-epoch",
        ("--num-epoch", "1", "--load-debug-rollout-data", "x"),
        ("--num-rollout",),
    ),
    (
        required.response_length_is_given,
        "--rollout-max-response-len",
        (),
        ("--rollout-max-response-len",),
    ),
    (required.response_length_is_given, "--eval-max-response-len", (*SFT, *EVAL), NOT_SFT),
    (required.engines_have_gpus, "--rollout-num-gpus", (), ("--rollout-num-gpus",)),
    (required.reward_is_given, "--rm-type", (), ("--rm-type",)),
    (required.reward_is_given, "--rm-type", (*SFT, *EVAL), NOT_SFT),
    (required.reward_is_given, "--rm-type, --custom-rm-path", ("--custom-rm-path", "a.b"), ()),
    (
        required.companions_are_given,
        "--custom-loss-function-path",
        ("--loss-type", "custom_loss"),
        (),
    ),
    (required.companions_are_given, "--sglang-router-ip", ("--sglang-router-port", "3000"), ()),
    (required.companions_are_given, "--sglang-router-port", ("--sglang-router-ip", "::1"), ()),
    (required.companions_are_given, "--max-tokens-per-gpu", ("--use-dynamic-batch-size",), ()),
    (required.companions_are_given, "--eval-interval", EVAL[:3], ()),
    (required.companions_are_given, "--lr-wsd-decay-iters", ("--lr-decay-style", "WSD"), ()),
    (
        required.companions_are_given,
        "--generate-execute-tool-function-path",
        ("--custom-generate-function-path", "a.b", "--generate-tool-specs-path", "a.c"),
        (),
    ),
    (ranges.numbers_are_in_range, "--lr", ("--lr", "-1"), ()),
    (
        ranges.token_ids_are_not_negative,
        "--rollout-stop-token-ids",
        ("--rollout-stop-token-ids", "1", "-1"),
        (),
    ),
    *(
        (ranges.environment_is_text, "--train-env-vars", ("--train-env-vars", variables), ())
        for variables in (
            '{"A": 1}',
            '{"": "z"}',
            '{"A=B": "y"}',
            '{"A\\u0000": "y"}',
            '{"A": "y\\u0000"}',
        )
    ),
    (
        ranges.exports_have_their_own_path,
        "--save-hf",
        ("--save", "s", "--save-hf", "hf/{step}"),
        (),
    ),
    (ranges.log_level_is_known, "--sglang-log-level", ("--sglang-log-level", "loud"), ()),
    (flags_given_have_an_effect, "--tis-clip", ("--tis-clip", "3"), ()),
    (
        flags_given_have_an_effect,
        "--offload-rollout-level",
        ("--colocate", "--no-offload-rollout", "--offload-rollout-level", "kv_cache"),
        (),
    ),
    *(
        (flags_given_have_an_effect, flag, (flag, *values), ())
        for flag, *values in (
            ("--offload-train-target", "disk"),
            ("--offload-train-disk-dir", "x"),
            ("--offload-train-disk-chunk-mb", "8"),
            ("--stream-optimizer-state-to-disk",),
            ("--stream-optimizer-state-moment-dtype", "bf16"),
            ("--rematerialize-param-from-master-weight",),
            ("--check-rematerialize-param-from-master-weight",),
            ("--convert-optimizer-state",),
        )
    ),
    (
        flags_given_have_an_effect,
        "--stream-optimizer-state-to-disk",
        ("--colocate", "--stream-optimizer-state-to-disk"),
        (),
    ),
    (
        flags_given_have_an_effect,
        "--offload-train-target",
        ("--colocate", "--no-offload-train", "--offload-train-target", "disk"),
        (),
    ),
    (offload.offload_needs_colocation, "--offload-train", ("--offload-train",), ()),
    (offload.offload_needs_colocation, "--offload-rollout", ("--offload-rollout",), ()),
    (
        offload.parameters_come_back_from_host_memory,
        "--rematerialize-param-from-master-weight, --offload-train-target",
        (*DISK, *REBUILD, "--train-backend", "megatron"),
        (),
    ),
    (
        offload.parameters_come_back_from_host_memory,
        "--rematerialize-param-from-master-weight",
        ("--colocate", *REBUILD, "--train-backend", "fsdp"),
        (),
    ),
    (
        offload.parameters_come_back_from_host_memory,
        "--rematerialize-param-from-master-weight, --fp32",
        ("--colocate", *REBUILD, "--train-backend", "megatron", "--fp32"),
        (),
    ),
    (
        offload.streamed_state_is_fp32,
        "--stream-optimizer-state-to-disk, --no-keep-fp32-master",
        (*STREAM, "--train-backend", "fsdp", "--no-keep-fp32-master"),
        (),
    ),
    (
        offload.state_is_on_the_device,
        "--fsdp-cpu-offload, --offload-train-target",
        (*DISK, "--train-backend", "fsdp", "--fsdp-cpu-offload"),
        (),
    ),
    (
        offload.streamed_state_is_saved_at_rest,
        "--stream-optimizer-state-to-disk, --async-save",
        (*STREAM, "--save", "s", "--async-save"),
        (),
    ),
    (
        conflict.answers_are_not_the_questions,
        "--label-key, --input-key",
        ("--label-key", "input"),
        (),
    ),
    (
        conflict.steps_match_the_batch,
        "--num-steps-per-rollout",
        ("--num-steps-per-rollout", "3"),
        (),
    ),
    (conflict.steps_match_the_batch, "--global-batch-size", ("--global-batch-size", "9"), ()),
    (
        conflict.steps_match_the_batch,
        "--global-batch-size, --num-steps-per-rollout",
        ("--global-batch-size", "4", "--num-steps-per-rollout", "4"),
        (),
    ),
    (
        lengths.samples_fit_the_token_budget,
        "--max-tokens-per-gpu, --rollout-max-context-len",
        (
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
            *("--rollout-max-context-len", "8000"),
        ),
        (),
    ),
    (
        lengths.samples_fit_the_token_budget,
        "--max-tokens-per-gpu, --rollout-max-response-len, --rollout-max-prompt-len",
        (
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
            *("--rollout-max-prompt-len", "4089"),
        ),
        (),
    ),
    (
        lengths.samples_fit_the_token_budget,
        "--max-tokens-per-gpu, --rollout-max-response-len",
        ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8"),
        (),
    ),
    (
        lengths.lengths_fit_the_context,
        "--rollout-max-prompt-len, --rollout-max-context-len",
        ("--rollout-max-prompt-len", "10", "--rollout-max-context-len", "10"),
        (),
    ),
    (
        lengths.lengths_fit_the_context,
        "--rollout-max-context-len, --sglang-context-length",
        ("--sglang-context-length", "9", "--rollout-max-context-len", "10"),
        (),
    ),
    (
        lengths.responses_fit_the_context,
        "--rollout-max-response-len, --rollout-max-context-len",
        ("--rollout-max-context-len", "7"),
        (),
    ),
    (
        lengths.responses_fit_the_context,
        "--eval-max-response-len, --rollout-max-context-len",
        (*EVAL, "--eval-max-response-len", "21", "--rollout-max-context-len", "20"),
        (),
    ),
    (
        lengths.responses_fit_the_context,
        "--rollout-max-prompt-len, --rollout-max-response-len, --rollout-max-context-len",
        ("--rollout-max-prompt-len", "13", "--rollout-max-context-len", "20"),
        (),
    ),
    (
        conflict.engines_fit_their_gpus,
        "--rollout-num-gpus, --rollout-num-gpus-per-engine",
        ("--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"),
        (),
    ),
    (
        conflict.submission_covers_the_batch,
        "--over-sampling-batch-size, --rollout-batch-size",
        ("--over-sampling-batch-size", "3"),
        (),
    ),
    (
        conflict.deterministic_rollouts_race_for_nothing,
        "--deterministic-rollout, --over-sampling-batch-size",
        ("--deterministic-rollout", "--over-sampling-batch-size", "5"),
        (),
    ),
    (
        conflict.deterministic_rollouts_race_for_nothing,
        "--deterministic-rollout, --partial-rollout",
        (
            *("--deterministic-rollout", "--partial-rollout"),
            *("--dynamic-sampling-filter-path", "a.b"),
        ),
        (),
    ),
    (
        conflict.deterministic_rollouts_race_for_nothing,
        "--deterministic-rollout, --rollout-engine",
        ("--deterministic-rollout", "--rollout-engine", "sglang"),
        (),
    ),
    (
        conflict.kl_is_charged_once,
        "--kl-coef, --kl-loss-coef",
        ("--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1"),
        (),
    ),
    (
        conflict.reinforce_whitens_advantages,
        "--advantage-estimator, --normalize-advantages",
        REINFORCE,
        (),
    ),
    (
        conflict.reinforce_whitens_advantages,
        "--advantage-estimator, --normalize-advantages",
        ("--advantage-estimator", "reinforce_plus_plus_baseline"),
        (),
    ),
    (
        conflict.groups_have_something_to_compare,
        "--n-samples-per-prompt",
        (),
        ("--n-samples-per-prompt",),
    ),
    (conflict.supervised_rows_are_single, "--n-samples-per-prompt", SFT, NOT_SFT[::2]),
    (
        conflict.engine_and_trainer_are_corrected_once,
        "--use-rollout-logprobs, --use-tis",
        ("--use-rollout-logprobs", "--use-tis"),
        (),
    ),
    (
        conflict.engine_and_trainer_are_corrected_once,
        "--tis-clip-low, --tis-clip",
        ("--use-tis", "--tis-clip-low", "3"),
        (),
    ),
    (
        conflict.schedule_is_consistent,
        "--min-lr, --lr",
        ("--lr-decay-style", "linear", "--min-lr", "1"),
        (),
    ),
    (
        conflict.schedule_is_consistent,
        "--lr-warmup-init, --lr",
        ("--lr-warmup-iters", "2", "--lr-warmup-init", "1"),
        (),
    ),
    (
        conflict.schedule_is_consistent,
        "--lr-warmup-iters, --lr-warmup-fraction",
        ("--lr-warmup-iters", "2", "--lr-warmup-fraction", "0.1"),
        (),
    ),
    (
        conflict.schedule_is_consistent,
        "--lr-warmup-iters, --lr-decay-iters",
        ("--lr-decay-style", "linear", "--lr-warmup-iters", "2", "--lr-decay-iters", "2"),
        (),
    ),
    (
        conflict.schedule_is_consistent,
        "--lr-wsd-decay-iters, --lr-decay-iters",
        ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3", "--lr-decay-iters", "2"),
        (),
    ),
    (
        conflict.schedule_is_consistent,
        "--lr-wsd-decay-iters, --num-rollout",
        ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "5", "--global-batch-size", "4"),
        (),
    ),
    (
        conflict.run_does_not_start_at_its_end,
        "--start-rollout-id, --num-rollout",
        ("--start-rollout-id", "2"),
        (),
    ),
    (
        conflict.rollouts_are_made_or_loaded,
        "--debug-rollout-only, --load-debug-rollout-data",
        ("--debug-rollout-only", "--load-debug-rollout-data", "x"),
        (),
    ),
    (
        conflict.supervised_runs_train,
        "--debug-rollout-only, --loss-type",
        ("--debug-rollout-only", *SFT),
        NOT_SFT,
    ),
    (conflict.one_half_precision, "--fp16, --fp32", ("--fp16", "--fp32"), ()),
    (
        places.run_directory_is_its_own,
        "--run-dir, --save",
        ("--run-dir", "runs/a", "--save", "runs/b/../a", "--load", "runs/a"),
        (),
    ),
    (places.run_directory_is_its_own, "--run-dir, --load", ("--run-dir", "a", "--load", "./a"), ()),
    (
        places.exports_replace_only_exports,
        "--save-hf, --run-dir",
        ("--save", "s", "--save-hf", "runs/a", "--run-dir", "runs/a"),
        (),
    ),
    (
        places.exports_replace_only_exports,
        "--save-hf, --save",
        ("--save", "runs/a", "--save-hf", "runs/b/../a"),
        (),
    ),
    (
        places.exports_replace_only_exports,
        "--save-hf, --hf-checkpoint",
        ("--save", "s", "--save-hf", "./model"),
        (),
    ),
    (
        places.exports_leave_checkpoints_their_names,
        "--save-hf, --save",
        ("--save", "x", "--save-hf", "./x/iter_{rollout_id:07d}"),
        (),
    ),
    (
        places.exports_leave_checkpoints_their_names,
        "--save-hf, --save",
        ("--save", "x", "--save-hf", "x/release/hf"),
        (),
    ),
    (
        places.reference_is_not_overwritten,
        "--ref-load, --save",
        ("--save", "runs/a", "--ref-load", "runs/b/../a", "--use-kl-loss"),
        (),
    ),
    (external.addresses_are_given, "--rollout-external-engine-addrs", ("--rollout-external",), ()),
    (
        external.addresses_are_complete,
        "--rollout-external-engine-addrs",
        (*EXTERNAL, "http://c:3"),
        (),
    ),
    (
        external.addresses_are_complete,
        "--rollout-external-engine-addrs",
        (*EXTERNAL, "a.b:1"),
        (),
    ),
    *(
        (
            external.router_is_a_host,
            "--sglang-router-ip",
            ("--sglang-router-ip", host, "--sglang-router-port", "3000"),
            (),
        )
        for host in ("http://10.0.0.1", "10.0.0.1:3000", "a b")
    ),
    (
        external.external_engines_keep_their_devices,
        "--rollout-external, --colocate",
        (*EXTERNAL, "--colocate"),
        (),
    ),
    (
        external.external_engines_keep_their_devices,
        "--rollout-external, --offload-rollout",
        (*EXTERNAL, "--offload-rollout"),
        (),
    ),
    (
        conflict.engines_answer_before_ranks_give_up,
        "--update-weight-timeout-s, --distributed-timeout-minutes",
        ("--distributed-timeout-minutes", "5"),
        (),
    ),
]


@pytest.mark.parametrize(
    ("rule", "flag", "argv", "without"), CASES, ids=[f"{c[0].__name__}-{c[1]}" for c in CASES]
)
def test_the_rule_refuses_and_names_the_flags(
    resolved: Resolved,
    rule: Check,
    flag: str,
    argv: tuple[str, ...],
    without: tuple[str, ...],
) -> None:
    problems = rule(*resolved(*argv, without=without))
    assert [problem.flag for problem in problems] == [flag]
    assert problems[0].remedy


def test_a_negative_rate_is_told_once(resolved: Resolved) -> None:
    config, given = resolved("--lr", "-1", "--lr-decay-style", "cosine")
    found = [
        *ranges.numbers_are_in_range(config, given),
        *conflict.schedule_is_consistent(config, given),
    ]
    assert [problem.flag for problem in found] == ["--lr"]


@pytest.mark.parametrize(
    "argv", [EVAL[:3], ("--eval-function-path", "a.b"), (*EVAL[:3], "--eval-function-path", "a.b")]
)
def test_the_interval_is_asked_for_by_the_flag_that_was_given(
    resolved: Resolved, argv: tuple[str, ...]
) -> None:
    (found,) = required.companions_are_given(*resolved(*argv))
    assert found.flag == "--eval-interval"
    assert f"required with {argv[0]}:" in found.remedy


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(CHECK)
    assert len(CHECK) == len(set(CHECK))


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--colocate", "--no-offload-train"),
        ("--colocate", "--offload-rollout-level", "kv_cache", "weight"),
        ("--use-kl-loss", "--kl-loss-coef", "0.001", "--kl-loss-type", "low_var_kl"),
        ("--use-kl-loss",),
        (*REINFORCE, "--normalize-advantages", "--gamma", "0.99", "--kl-coef", "0.1"),
        (*REINFORCE, "--normalize-advantages", "--n-samples-per-prompt", "1"),
        ("--use-tis", "--tis-clip", "3", "--tis-clip-low", "0.5"),
        ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "9"),
        ("--over-sampling-batch-size", "8", "--partial-rollout"),
        ("--partial-rollout", "--dynamic-sampling-filter-path", "a.b", "--buffer-filter-path", "a"),
        ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3", "--lr-decay-iters", "9"),
        ("--lr-warmup-fraction", "0.1", "--lr-decay-iters", "9", "--lr-warmup-init", "1e-8"),
        ("--save", "s", "--save-interval", "1", "--save-trigger-sentinel", "f", "--save-keep", "1"),
        ("--save", "s", "--save-hf", "hf/{rollout_id}", "--async-save", "--no-save-optim"),
        ("--save", "runs/a", "--load", "runs/a", "--save-hf", "runs/a/hf"),
        ("--save", "runs/a", "--save-hf", "runs/b/iter_{rollout_id:07d}"),
        ("--run-dir", "runs/a", "--save", "runs/a/checkpoints", "--load", "runs/a/checkpoints"),
        ("--deterministic-rollout", "--fp32"),
        ("--start-rollout-id", "1"),
        ("--rollout-max-prompt-len", "12", "--rollout-max-context-len", "20"),
        ("--rollout-max-context-len", "9"),
        ("--distributed-timeout-minutes", "1", "--actor-num-gpus-per-node", "1"),
        ("--global-batch-size", "3"),
        (*EVAL, "--eval-temperature", "0", "--log-passrate", "--n-samples-per-eval-prompt", "4"),
        ("--load-debug-rollout-data", "x/{rollout_id}"),
        ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"),
        ("--n-samples-per-prompt", "1", "--disable-rewards-normalization"),
    ],
)
def test_a_sensible_run_has_no_problem(resolved: Resolved, argv: tuple[str, ...]) -> None:
    assert check(*resolved(*argv)) == []


def test_engines_launched_elsewhere_need_no_gpus_of_the_job(resolved: Resolved) -> None:
    config, given = resolved(
        *EXTERNAL, "--rollout-num-gpus-per-engine", "4", without=("--rollout-num-gpus",)
    )
    assert check(config, given) == []
    assert config.cluster.rollout_num_gpus == 8
    assert given >= {"rollout_external", "rollout_external_engine_addrs"}


@pytest.mark.parametrize("host", ["10.0.0.1", "router-0.lan", "::1", "[fe80::1]"])
def test_a_router_may_be_named_in_every_way_of_naming_a_machine(
    resolved: Resolved, host: str
) -> None:
    config, given = resolved("--sglang-router-ip", host, "--sglang-router-port", "3000")
    assert check(config, given) == []


def test_a_supervised_run_needs_neither_engines_nor_rewards(resolved: Resolved) -> None:
    assert check(*resolved(*SFT, without=NOT_SFT)) == []


def test_a_supervised_run_that_evaluates_needs_both(resolved: Resolved) -> None:
    argv = (*SFT, *EVAL, "--rm-type", "math", "--rollout-num-gpus", "1")
    assert check(*resolved(*argv, "--eval-max-response-len", "8", without=NOT_SFT)) == []


WITHOUT_EFFECT_IN_SFT = [
    ("--rm-timeout-s", "9"),
    ("--rm-max-retries", "1"),
    ("--rm-default", "1"),
    ("--deterministic-rollout",),
    ("--pause-generation-mode", "abort"),
    ("--rollout-health-check-timeout", "9"),
    ("--rollout-health-check-first-wait", "9"),
    ("--update-weight-transfer-mode", "broadcast"),
    ("--colocate",),
    ("--offload-rollout",),
]


@pytest.mark.parametrize("argv", WITHOUT_EFFECT_IN_SFT)
def test_what_engines_and_rewards_alone_read_has_no_place_in_supervised_training(
    resolved: Resolved, argv: tuple[str, ...]
) -> None:
    config, given = resolved(*SFT, *argv, without=NOT_SFT)
    assert [p.flag for p in flags_given_have_an_effect(config, given)] == [argv[0]]
    evaluated = (*SFT, *EVAL, "--rm-type", "math", "--rollout-num-gpus", "1", *argv)
    config, given = resolved(*evaluated, "--eval-max-response-len", "8", without=NOT_SFT)
    assert flags_given_have_an_effect(config, given) == []


def test_recorded_rollouts_need_no_engines(resolved: Resolved) -> None:
    without = ("--rollout-num-gpus", "--rm-type", "--rollout-max-response-len", "--prompt-data")
    assert check(*resolved("--load-debug-rollout-data", "x", without=without)) == []


def test_a_context_within_the_budget_is_fine_whatever_the_response_length(
    resolved: Resolved,
) -> None:
    budget = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "100")
    argv = ("--rollout-max-context-len", "100", "--rollout-max-response-len", "100")
    assert check(*resolved(*budget, *argv)) == []


OF_LAUNCHED_ENGINES = next(
    row.dests for row in APPLIES if "sglang_log_level" in row.dests and "rm_type" not in row.dests
)

# What makes the condition of a row of APPLIES false; a valid command line does for the others.
SPOILS: dict[str, tuple[str, ...]] = {
    "micro_batch_size": ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "99"),
    "rollout_health_check_interval": ("--no-use-fault-tolerance",),
    "rollout_health_check_timeout": (
        *("--no-use-fault-tolerance", "--rollout-health-check-interval", "0"),
    ),
    "rollout_health_check_first_wait": (
        *("--no-use-fault-tolerance", "--rollout-health-check-interval", "0"),
    ),
    "grpo_std_normalization": (*REINFORCE, "--normalize-advantages"),
    "rewards_normalization": (*REINFORCE, "--normalize-advantages"),
    "update_weight_transfer_mode": ("--colocate",),
    "rm_url": ("--prompt-data", "reasoning_gym:chain_sum"),
    "custom_megatron_before_log_prob_hook_path": ("--use-rollout-logprobs",),
    **dict.fromkeys(OF_LAUNCHED_ENGINES, EXTERNAL),
}
ROWS = [(number, dest) for number, row in enumerate(APPLIES) for dest in row.dests]


@pytest.mark.parametrize(("number", "dest"), ROWS, ids=[f"{n}-{dest}" for n, dest in ROWS])
def test_a_flag_without_effect_is_refused(resolved: Resolved, number: int, dest: str) -> None:
    row = APPLIES[number]
    config, _ = resolved(*SPOILS.get(dest, ()))
    if row.condition(config):
        config = replace(config, algorithm=replace(config.algorithm, loss_type="sft_loss"))
    assert not row.condition(config)
    problems = flags_given_have_an_effect(config, frozenset({dest}))
    assert flag_name(dest) in {problem.flag for problem in problems}
    assert any(f"applies only {row.to}" in problem.remedy for problem in problems)
    assert flags_given_have_an_effect(config, frozenset()) == []


def test_rows_name_flags_that_exist() -> None:
    assert {dest for _, dest in ROWS} <= {spec.dest for spec in flag_specs(MilesConfig)}


@pytest.mark.parametrize(
    ("dest", "bad", "good"),
    [
        ("rollout_temperature", 0.0, 0.01),
        ("rollout_temperature", -1.0, 2.0),
        ("rollout_top_p", 0.0, 1.0),
        ("rollout_top_p", 1.01, 0.1),
        ("rollout_top_k", 0, -1),
        ("rollout_top_k", -2, 1),
        ("eval_temperature", -0.1, 0.0),
        ("adam_beta1", 1.0, 0.0),
        ("adam_beta2", -0.1, 0.999),
        ("adam_eps", 0.0, 1e-8),
        ("eps_clip", 1.1, 0.0),
        ("eps_clip_c", 1.0, 1.01),
        ("tis_clip", 0.0, 1.0),
        ("tis_clip_low", -0.1, 0.0),
        ("gamma", 1.1, 1.0),
        ("kl_coef", -0.1, 0.0),
        ("lr", -1e-6, 0.0),
        ("lr_warmup_fraction", 1.0, 0.0),
        ("clip_grad", -1.0, 0.0),
        ("seed", -1, 0),
        ("seed", 2**32, 2**32 - 1),
        ("log_probs_chunk_size", 0, -1),
        ("rm_timeout_s", 0.0, 0.1),
        ("rm_max_retries", -1, 0),
        ("start_rollout_id", -1, 0),
        ("rollout_max_context_len", 1, 2),
        ("update_weight_buffer_size", 0, 1),
        ("rollout_health_check_interval", -1.0, 0.0),
        ("actor_num_nodes", 0, 1),
        ("save_keep", 0, 1),
    ],
)
def test_bounds_of_a_number(dest: str, bad: float, good: float) -> None:
    assert not RANGES[dest].holds(bad)
    assert RANGES[dest].holds(good)


def test_greedy_sampling_is_refused_with_the_reason(resolved: Resolved) -> None:
    for value in ("0", "-0.5"):
        (problem,) = check(*resolved("--rollout-temperature", value))
        assert problem.flag == "--rollout-temperature"
        assert "log-probs of greedy decoding (0) are undefined" in problem.remedy


def test_a_number_out_of_range_says_what_is_allowed_instead(resolved: Resolved) -> None:
    says = {
        ("--log-probs-chunk-size", "0"): "must be >= 1, or -1 for a size chosen by the vocabulary",
        ("--rollout-top-k", "0"): "must be >= 1, or -1 for off",
        ("--rollout-max-context-len", "0"): "must be >= 2: a prompt token and a response token; or "
        "leave it out",
        ("--debug-exit-after-rollout", "0"): "must be >= 1; or leave it out",
        ("--micro-batch-size", "0"): "must be >= 1",
    }
    for argv, remedy in says.items():
        problem = next(p for p in check(*resolved(*argv)) if p.flag == argv[0])
        assert problem.remedy.startswith(remedy)


def test_a_flag_that_every_run_needs_is_not_to_be_left_out(resolved: Resolved) -> None:
    (problem,) = check(*resolved("--num-rollout", "0"))
    assert problem.remedy == "must be >= 1"


def test_a_derived_value_is_not_blamed(resolved: Resolved) -> None:
    (problem,) = check(*resolved("--rollout-top-p", "7"))
    assert problem.flag == "--rollout-top-p"


def _is_number(annotation: Any) -> bool:
    return annotation in (int, float) or set(get_args(annotation)) & {int, float} != set()


def test_every_number_has_a_range() -> None:
    numbers = {
        spec.dest
        for spec in flag_specs(MilesConfig)
        if _is_number(spec.annotation) and tuple not in (getattr(spec.annotation, "__origin__", 0),)
    }
    assert set(RANGES) == numbers


def test_defaults_are_in_their_ranges() -> None:
    for spec in flag_specs(MilesConfig):
        if spec.dest in RANGES and not isinstance(spec.default, NoneType):
            assert RANGES[spec.dest].holds(spec.default), spec.dest
