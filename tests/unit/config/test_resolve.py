"""Derivations."""

from collections.abc import Callable

from miles.config.command_line import read_command_line
from miles.config.root import MilesConfig
from miles.config.rules import notes, resolve

Resolved = Callable[..., tuple[MilesConfig, frozenset[str]]]


def messages(*argv: str) -> list[str]:
    return resolve(read_command_line(argv).config)[1]


def test_colocated_engines_have_the_trainers_gpus_and_both_sides_take_turns() -> None:
    argv = ["--colocate", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "3"]
    config, said = resolve(read_command_line(argv).config)
    assert config.cluster.rollout_num_gpus == 6
    assert config.offload.offload_train is True
    assert config.offload.offload_rollout is True
    assert not [message for message in said if message.startswith("--rollout-num-gpus")]


def test_another_number_of_engine_gpus_is_reconciled_with_a_message() -> None:
    argv = ["--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "5"]
    said = [m for m in messages(*argv) if m.startswith("--rollout-num-gpus")]
    assert said == [
        "--rollout-num-gpus: 5 becomes 2. With --colocate the engines are on the trainer's GPUs, "
        "so their number is the trainer's."
    ]
    assert not [m for m in messages(*argv[:-1], "2") if m.startswith("--rollout-num-gpus")]


def test_an_explicit_offload_flag_is_kept() -> None:
    config, _ = resolve(read_command_line(["--colocate", "--no-offload-train"]).config)
    assert config.offload.offload_train is False
    assert config.offload.offload_rollout is True


def test_without_colocation_nobody_leaves(resolved: Resolved) -> None:
    config, _ = resolved()
    assert config.offload.offload_train is False
    assert config.offload.offload_rollout is False
    assert config.cluster.rollout_num_gpus == 1


def test_the_upper_clip_is_the_lower_unless_given(resolved: Resolved) -> None:
    assert resolved("--eps-clip", "0.1")[0].algorithm.eps_clip_high == 0.1
    assert resolved("--eps-clip-high", "0.3")[0].algorithm.eps_clip_high == 0.3


def test_the_whole_rollout_is_one_step_by_default(resolved: Resolved) -> None:
    data = resolved()[0].data
    assert (data.global_batch_size, data.num_steps_per_rollout) == (8, 1)


def test_the_batch_follows_from_the_steps(resolved: Resolved) -> None:
    data = resolved("--num-steps-per-rollout", "4")[0].data
    assert (data.global_batch_size, data.num_steps_per_rollout) == (2, 4)


def test_the_steps_follow_from_the_batch_and_the_last_takes_the_remainder(
    resolved: Resolved,
) -> None:
    data = resolved("--global-batch-size", "3")[0].data
    assert (data.global_batch_size, data.num_steps_per_rollout) == (3, 3)


def test_one_batch_of_prompts_is_submitted_at_a_time_unless_more_is_asked(
    resolved: Resolved,
) -> None:
    assert resolved()[0].rollout.over_sampling_batch_size == 4
    config, _ = resolved("--over-sampling-batch-size", "6")
    assert config.rollout.over_sampling_batch_size == 6


def test_a_prompt_leaves_room_for_one_token_of_the_context(resolved: Resolved) -> None:
    assert resolved()[0].rollout.rollout_max_prompt_len is None
    config, _ = resolved("--rollout-max-context-len", "100")
    assert config.rollout.rollout_max_prompt_len == 99
    config, _ = resolved("--rollout-max-context-len", "100", "--rollout-max-prompt-len", "9")
    assert config.rollout.rollout_max_prompt_len == 9


def test_evaluation_samples_as_the_rollout_unless_told_otherwise(resolved: Resolved) -> None:
    config, _ = resolved(
        *("--rollout-temperature", "0.7", "--rollout-top-p", "0.9", "--rollout-top-k", "5"),
        *("--input-key", "question", "--label-key", "answer", "--reward-key", "score"),
        *("--eval-temperature", "0", "--eval-prompt-data", "a", "a.jsonl", "--eval-interval", "1"),
    )
    evaluation = config.evaluation
    assert evaluation.eval_temperature == 0
    assert evaluation.eval_top_p == 0.9
    assert evaluation.eval_top_k == 5
    assert evaluation.eval_max_response_len == 8
    assert evaluation.eval_input_key == "question"
    assert evaluation.eval_label_key == "answer"
    assert config.reward.eval_reward_key == "score"


def test_the_reference_is_the_initial_model_where_one_is_needed(resolved: Resolved) -> None:
    assert resolved()[0].algorithm.ref_load is None
    assert resolved("--use-kl-loss")[0].algorithm.ref_load == "model"
    assert resolved("--kl-coef", "0.1")[0].algorithm.ref_load == "model"
    config, _ = resolved("--kl-coef", "0.1", "--ref-load", "other")
    assert config.algorithm.ref_load == "other"


def test_a_group_of_one_is_not_divided_by_its_deviation(resolved: Resolved) -> None:
    config, _ = resolved("--n-samples-per-prompt", "1")
    assert config.algorithm.grpo_std_normalization is False
    said = messages("--n-samples-per-prompt", "1")
    assert [m.partition(".")[0] for m in said] == ["--grpo-std-normalization: True becomes False"]
    assert resolved()[0].algorithm.grpo_std_normalization is True


def test_an_explicit_start_is_kept(resolved: Resolved) -> None:
    assert resolved("--start-rollout-id", "5")[0].data.start_rollout_id == 5
    assert resolved()[0].data.start_rollout_id is None


def test_resolving_twice_changes_nothing_more(resolved: Resolved) -> None:
    config, _ = resolved("--colocate", "--num-steps-per-rollout", "2", "--use-kl-loss")
    assert resolve(config) == (config, [])


def test_nonsense_is_left_for_the_checks() -> None:
    argv = ["--rollout-batch-size", "-4", "--num-steps-per-rollout", "0", "--global-batch-size"]
    config, _ = resolve(read_command_line([*argv, "0"]).config)
    assert isinstance(config, MilesConfig)
    assert config.data.global_batch_size == 0


def test_a_last_step_that_is_smaller_is_said_with_the_sizes(resolved: Resolved) -> None:
    (message,) = notes(resolved("--global-batch-size", "3")[0])
    assert "2 steps of 3 samples, and a last one of 2" in message.text
    (message,) = notes(resolved("--global-batch-size", "5")[0])
    assert "1 step of 5 samples, and a last one of 3" in message.text
    for flags in ((), ("--global-batch-size", "4"), ("--num-steps-per-rollout", "8")):
        assert notes(resolved(*flags)[0]) == []


def test_that_sleep_frees_little_of_shards_in_host_memory_is_said(resolved: Resolved) -> None:
    (message,) = notes(resolved("--fsdp-cpu-offload", "--colocate")[0])
    assert "--fsdp-cpu-offload" in message.text
    assert "--offload-train" in message.text
    for flags in (("--colocate",), ("--fsdp-cpu-offload",)):
        assert notes(resolved(*flags)[0]) == []
    awake = resolved("--fsdp-cpu-offload", "--colocate", "--no-offload-train")[0]
    assert notes(awake) == []
    assert resolved("--fsdp-cpu-offload", "--colocate")[0].offload.offload_train is True
