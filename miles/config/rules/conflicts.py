"""Flags that contradict each other, checked after derivation."""

from miles.config.derived import is_supervised, needs_engines
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem
from miles.config.rules.resolve import samples_per_rollout


def steps_match_the_batch(config: MilesConfig, given: Given) -> list[Problem]:
    """--global-batch-size times --num-steps-per-rollout is the rollout."""
    data, samples = config.data, samples_per_rollout(config)
    if samples is None:
        return []
    batch, steps = data.global_batch_size, data.num_steps_per_rollout
    total = f"--rollout-batch-size x --n-samples-per-prompt = {samples}"
    if batch is None:
        remedy = f"must divide {total}"
        return [problem(config, "num_steps_per_rollout", remedy=remedy)]
    if batch > samples:
        remedy = f"is more than a rollout has: {total}"
        return [problem(config, "global_batch_size", remedy=remedy)]
    both = {"global_batch_size", "num_steps_per_rollout"} <= given
    if both and steps is not None and batch * steps != samples:
        remedy = f"their product {batch * steps} is not {total}; leave one out"
        return [problem(config, "global_batch_size", "num_steps_per_rollout", remedy=remedy)]
    return []


def engines_fit_their_gpus(config: MilesConfig, given: Given) -> list[Problem]:
    """The engines' GPUs divide into engines."""
    cluster = config.cluster
    total, each = cluster.rollout_num_gpus, cluster.rollout_num_gpus_per_engine
    if not needs_engines(config) or each < 1:
        return []
    problems: list[Problem] = []
    if total is not None and total % each != 0:
        remedy = f"{total} GPUs do not divide into engines of {each}"
        if cluster.colocate:
            remedy += " (with --colocate the engines have the trainer's GPUs)"
        dests = ("rollout_num_gpus", "rollout_num_gpus_per_engine")
        problems.append(problem(config, *dests, remedy=remedy))
    return problems


def submission_covers_the_batch(config: MilesConfig, given: Given) -> list[Problem]:
    """Over-sampling means at least the batch."""
    size, batch = config.rollout.over_sampling_batch_size, config.data.rollout_batch_size
    if size is None or batch is None or size >= batch:
        return []
    remedy = "must be at least the second"
    return [problem(config, "over_sampling_batch_size", "rollout_batch_size", remedy=remedy)]


def deterministic_rollouts_race_for_nothing(config: MilesConfig, given: Given) -> list[Problem]:
    """Bit-equal reruns exclude what depends on which response ends first."""
    rollout, batch = config.rollout, config.data.rollout_batch_size
    if not rollout.deterministic_rollout:
        return []
    problems: list[Problem] = []
    size = rollout.over_sampling_batch_size
    if size is not None and batch is not None and size > batch:
        remedy = "over-sampling keeps what ends first, which is not deterministic; leave one out"
        dests = ("deterministic_rollout", "over_sampling_batch_size")
        problems.append(problem(config, *dests, remedy=remedy))
    if rollout.partial_rollout:
        remedy = "which responses are aborted is not deterministic; leave one out"
        problems.append(problem(config, "deterministic_rollout", "partial_rollout", remedy=remedy))
    if rollout.rollout_engine == "sglang":
        remedy = "only the embedded engine is bit-equal; use --rollout-engine embedded"
        problems.append(problem(config, "deterministic_rollout", "rollout_engine", remedy=remedy))
    return problems


def engines_compute_as_the_trainer(config: MilesConfig, given: Given) -> list[Problem]:
    """Engines have the dtype of the weights that the trainer sends, where that matters."""
    dtype = config.rollout.sglang_dtype
    problems: list[Problem] = []
    if config.precision.fp16 and dtype not in ("auto", "float16"):
        remedy = "under --fp16 the trainer sends float16, and engines run in it; leave one out"
        problems.append(problem(config, "sglang_dtype", "fp16", remedy=remedy))
    if config.weight_sync.check_weight_update_equal and dtype != "auto":
        remedy = "an engine of another dtype has other bytes than the trainer; leave one out"
        dests = ("check_weight_update_equal", "sglang_dtype")
        problems.append(problem(config, *dests, remedy=remedy))
    return problems


def kl_is_charged_once(config: MilesConfig, given: Given) -> list[Problem]:
    """KL is in the reward or in the loss, not in both."""
    if config.algorithm.kl_coef == 0 or config.algorithm.kl_loss_coef == 0:
        return []
    remedy = "KL would count twice, in the reward and in the loss; leave one out"
    return [problem(config, "kl_coef", "kl_loss_coef", remedy=remedy)]


def reinforce_whitens_advantages(config: MilesConfig, given: Given) -> list[Problem]:
    """REINFORCE++ is defined with whitened advantages."""
    algorithm = config.algorithm
    reinforce = algorithm.advantage_estimator.startswith("reinforce_plus_plus")
    if not reinforce or algorithm.normalize_advantages or is_supervised(config):
        return []
    remedy = "this estimator whitens advantages over the batch; add --normalize-advantages"
    dests = ("advantage_estimator", "normalize_advantages")
    return [problem(config, *dests, remedy=remedy)]


def groups_have_something_to_compare(config: MilesConfig, given: Given) -> list[Problem]:
    """Subtracting the group's mean from a group of one leaves no advantage to learn from."""
    algorithm, hooks = config.algorithm, config.hooks
    replaced = (
        hooks.rollout_function_path,
        hooks.custom_generate_function_path,
        hooks.custom_reward_post_process_path,
    )
    if (
        config.data.n_samples_per_prompt != 1
        or algorithm.loss_type != "policy_loss"
        or algorithm.advantage_estimator == "reinforce_plus_plus"
        or not algorithm.rewards_normalization
        or config.observability.debug_rollout_only
        or any(path is not None for path in replaced)
    ):
        return []
    remedy = (
        "every advantage would be 0: the group's mean is its only reward; raise it, or add "
        "--disable-rewards-normalization"
    )
    return [problem(config, "n_samples_per_prompt", remedy=remedy)]


def supervised_rows_are_single(config: MilesConfig, given: Given) -> list[Problem]:
    """Supervised training takes each row once."""
    if not is_supervised(config) or config.data.n_samples_per_prompt == 1:
        return []
    remedy = "supervised training takes each row once; leave it out"
    return [problem(config, "n_samples_per_prompt", remedy=remedy)]


def engine_and_trainer_are_corrected_once(config: MilesConfig, given: Given) -> list[Problem]:
    """Importance sampling needs the trainer's own log-probs; its weights are an interval."""
    algorithm = config.algorithm
    problems: list[Problem] = []
    if algorithm.use_rollout_logprobs and algorithm.use_tis:
        remedy = (
            "importance sampling compares the trainer's log-probs with the engine's, which the "
            "first takes for both; leave one out"
        )
        problems.append(problem(config, "use_rollout_logprobs", "use_tis", remedy=remedy))
    if algorithm.tis_clip_low > algorithm.tis_clip:
        remedy = "the lower clip is above the upper"
        problems.append(problem(config, "tis_clip_low", "tis_clip", remedy=remedy))
    return problems


def schedule_is_consistent(config: MilesConfig, given: Given) -> list[Problem]:
    """Learning rates are ordered, and warm-up and decay fit into the schedule."""
    opt, data = config.optimizer, config.data
    total = opt.lr_decay_iters
    steps = (data.num_rollout or 0) * (data.num_steps_per_rollout or 0)
    wrong = (
        (
            ("min_lr", "lr"),
            opt.lr_decay_style != "constant" and opt.min_lr > opt.lr >= 0,
            "the schedule decays to the first, so it must not be above the second",
        ),
        (
            ("lr_warmup_init", "lr"),
            opt.lr_warmup_init > opt.lr >= 0,
            "the warm-up starts at the first, so it must not be above the second",
        ),
        (
            ("lr_warmup_iters", "lr_warmup_fraction"),
            opt.lr_warmup_iters > 0 and opt.lr_warmup_fraction is not None,
            "both say how long the warm-up is; leave one out",
        ),
        (
            ("lr_warmup_iters", "lr_decay_iters"),
            total is not None and opt.lr_warmup_iters >= total,
            "the warm-up is part of the schedule and must be shorter",
        ),
        (
            ("lr_wsd_decay_iters", "lr_decay_iters"),
            total is not None and (opt.lr_wsd_decay_iters or 0) > total,
            "the final decay is part of the schedule and must not be longer",
        ),
        (
            ("lr_wsd_decay_iters", "num_rollout"),
            total is None and 0 < steps < (opt.lr_wsd_decay_iters or 0),
            f"the run takes {steps} optimizer steps and would start in the middle of the decay",
        ),
    )
    return [problem(config, *dests, remedy=remedy) for dests, bad, remedy in wrong if bad]


def run_does_not_start_at_its_end(config: MilesConfig, given: Given) -> list[Problem]:
    """The first rollout is before the last."""
    start, total = config.data.start_rollout_id, config.data.num_rollout
    if start is None or total is None or start < total:
        return []
    remedy = "nothing is left to run; --num-rollout counts from 0, not from the start"
    return [problem(config, "start_rollout_id", "num_rollout", remedy=remedy)]


def rollouts_are_made_or_loaded(config: MilesConfig, given: Given) -> list[Problem]:
    """A debug run either generates or trains."""
    debug = config.observability
    if not debug.debug_rollout_only or debug.load_debug_rollout_data is None:
        return []
    remedy = "one run cannot only generate and not generate at all; leave one out"
    return [problem(config, "debug_rollout_only", "load_debug_rollout_data", remedy=remedy)]


def supervised_runs_train(config: MilesConfig, given: Given) -> list[Problem]:
    """Supervised samples are not generated, so there is nothing to do without training."""
    if not (config.observability.debug_rollout_only and is_supervised(config)):
        return []
    remedy = "supervised samples are not generated by engines; leave one out"
    return [problem(config, "debug_rollout_only", "loss_type", remedy=remedy)]


def one_half_precision(config: MilesConfig, given: Given) -> list[Problem]:
    """One compute precision."""
    if not (config.precision.fp16 and config.precision.fp32):
        return []
    return [problem(config, "fp16", "fp32", remedy="both say the precision; leave one out")]


def engines_answer_before_ranks_give_up(config: MilesConfig, given: Given) -> list[Problem]:
    """An engine that hangs is named before another rank's collective times out."""
    cluster, timeout_s = config.cluster, config.weight_sync.update_weight_timeout_s
    patient = timeout_s < 60 * cluster.distributed_timeout_minutes
    if patient or cluster.num_train_ranks == 1 or not needs_engines(config):
        return []
    remedy = (
        "the trainer's other ranks wait in a collective while rank 0 waits for an engine, and "
        "would give up first; the first (seconds) must be below the second (minutes)"
    )
    dests = ("update_weight_timeout_s", "distributed_timeout_minutes")
    return [problem(config, *dests, remedy=remedy)]


def answers_are_not_the_questions(config: MilesConfig, given: Given) -> list[Problem]:
    """A response that is compared with its own prompt is never right."""
    if config.data.label_key != config.data.input_key:
        return []
    remedy = "the label is what a response is compared with, not the prompt; name another key"
    return [problem(config, "label_key", "input_key", remedy=remedy)]


CONFLICT_CHECKS: tuple[Check, ...] = (
    steps_match_the_batch,
    engines_fit_their_gpus,
    submission_covers_the_batch,
    deterministic_rollouts_race_for_nothing,
    engines_compute_as_the_trainer,
    kl_is_charged_once,
    reinforce_whitens_advantages,
    groups_have_something_to_compare,
    supervised_rows_are_single,
    engine_and_trainer_are_corrected_once,
    schedule_is_consistent,
    run_does_not_start_at_its_end,
    rollouts_are_made_or_loaded,
    supervised_runs_train,
    one_half_precision,
    engines_answer_before_ranks_give_up,
    answers_are_not_the_questions,
)
