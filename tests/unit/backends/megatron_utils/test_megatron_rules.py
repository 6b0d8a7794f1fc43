"""What must hold between Megatron's flags, the ranks and the model."""

from typing import Any

import pytest

from miles.backends.megatron_utils import offload_rules, rules
from miles.config.cluster import ClusterConfig
from miles.config.offload import OffloadConfig
from miles.config.precision import PrecisionConfig
from miles.config.root import MilesConfig

pytestmark = pytest.mark.megatron

DENSE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --ffn-hidden-size 96 --attention-dropout 0 --hidden-dropout 0 "
    "--transformer-impl local"
)
MIXTURE = f"{DENSE} --num-experts 6 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall"


@pytest.fixture(scope="module")
def parser() -> Any:
    from miles.backends.megatron_utils.namespace import make_parser

    return make_parser()


def found(
    parser: Any, line: str, *, ranks: int = 8, context: int = 1, **precision: bool
) -> list[tuple[str, str]]:
    cluster = ClusterConfig(
        actor_num_nodes=2, actor_num_gpus_per_node=ranks // 2, context_parallel_size=context
    )
    config = MilesConfig(cluster=cluster, precision=PrecisionConfig(**precision))
    return [(p.flag, p.remedy) for p in rules.check(parser.parse_args(line.split()), config)]


def flags(*args: Any, **kwargs: Any) -> list[str]:
    return [flag for flag, _ in found(*args, **kwargs)]


TP, PP, EP, ETP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
CP = "--context-parallel-size"


@pytest.mark.parametrize(
    ("line", "context"),
    [
        (DENSE, 1),
        (f"{DENSE} {TP} 2 {PP} 4", 1),
        (f"{DENSE} {TP} 4 {PP} 2", 1),
        (f"{DENSE} {TP} 2 {PP} 2", 2),
        (f"{MIXTURE} {EP} 2 {PP} 4", 1),
        (f"{MIXTURE} {EP} 2 {TP} 2 --sequence-parallel {ETP} 1 {PP} 2", 2),
    ],
)
def test_layouts_that_fit_have_no_problem(parser: Any, line: str, context: int) -> None:
    assert found(parser, line, context=context) == []


def test_a_copy_of_the_model_divides_the_ranks_and_the_arithmetic_is_shown(parser: Any) -> None:
    ((flag, remedy),) = found(parser, f"{DENSE} {TP} 2 {PP} 2", context=3)
    assert flag == f"{TP}, {PP}, {CP}"
    assert f"{TP} 2 x {PP} 2 x {CP} 3 = 12 does not divide" in remedy
    assert "--actor-num-nodes 2 x --actor-num-gpus-per-node 4 = 8" in remedy


def test_a_copy_of_the_experts_divides_the_ranks(parser: Any) -> None:
    """12 ranks hold TP 2 x PP 2 three times; EP 3 x ETP 2 x PP 2 once; EP 3 x ETP 4 not."""
    line = f"{MIXTURE} {TP} 2 --sequence-parallel {PP} 2 {EP} 3"
    assert found(parser, line, ranks=12) == []
    ((flag, remedy),) = found(parser, f"{line} {ETP} 4", ranks=12)
    assert flag == f"{EP}, {ETP}, {PP}"
    assert f"{EP} 3 x {ETP} 4 x {PP} 2 = 24" in remedy


def test_expert_parallelism_is_refused_for_a_dense_model(parser: Any) -> None:
    assert flags(parser, f"{DENSE} {EP} 2 {ETP} 2") == [EP, ETP]


def test_heads_groups_and_columns_divide_by_tensor_parallelism(parser: Any) -> None:
    problems = found(parser, f"{DENSE} {TP} 8")
    assert [flag for flag, _ in problems] == [TP]
    assert "4 query groups" in problems[0][1]
    odd = DENSE.replace("--ffn-hidden-size 96", "--ffn-hidden-size 97")
    assert "97 MLP columns" in found(parser, f"{odd} {TP} 2")[0][1]


def test_experts_divide_among_their_ranks(parser: Any) -> None:
    problems = found(parser, f"{MIXTURE} {EP} 4")
    assert problems == [(EP, "must divide the model's 6 experts")]
    narrow = MIXTURE.replace("--moe-ffn-hidden-size 24", "--moe-ffn-hidden-size 25")
    assert flags(parser, f"{narrow} {ETP} 2 {EP} 2") == [ETP]


def test_layers_divide_into_stages_unless_split_unevenly(parser: Any) -> None:
    seven = DENSE.replace("--num-layers 8", "--num-layers 7")
    assert flags(parser, f"{seven} {PP} 2") == [PP]
    assert found(parser, f"{seven} {PP} 2 --decoder-first-pipeline-num-layers 3") == []
    assert found(parser, f"{seven} {PP} 2 --account-for-loss-in-pipeline-split") == []


@pytest.mark.parametrize(
    ("stages", "ends", "flag"),
    [
        (2, "--decoder-first-pipeline-num-layers 9", "--decoder-first-pipeline-num-layers"),
        (2, "--decoder-last-pipeline-num-layers 8", "--decoder-last-pipeline-num-layers"),
        (2, "--decoder-last-pipeline-num-layers -3", "--decoder-last-pipeline-num-layers"),
        (4, "--decoder-first-pipeline-num-layers 1", "--decoder-first-pipeline-num-layers"),
        (1, "--decoder-first-pipeline-num-layers 2", "--decoder-first-pipeline-num-layers"),
        (
            2,
            "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers",
        ),
        (
            2,
            "--decoder-first-pipeline-num-layers 3 --num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank",
        ),
        (2, "--pipeline-model-parallel-layout Et*3|t*4L", "--pipeline-model-parallel-layout"),
        (4, "--pipeline-model-parallel-layout Et*4|t*4L", "--pipeline-model-parallel-layout"),
        (2, "--pipeline-model-parallel-layout |", "--pipeline-model-parallel-layout"),
        (2, "--pipeline-model-parallel-layout banana", "--pipeline-model-parallel-layout"),
    ],
)
def test_uneven_stages_hold_every_layer(parser: Any, stages: int, ends: str, flag: str) -> None:
    assert flags(parser, f"{DENSE} {PP} {stages} {ends}") == [flag]


def test_stages_are_split_in_one_way(parser: Any) -> None:
    first, loss = "--decoder-first-pipeline-num-layers", "--account-for-loss-in-pipeline-split"
    layout = "--pipeline-model-parallel-layout"
    line = f"{DENSE} {PP} 2"
    assert flags(parser, f"{line} {first} 3 {loss}") == [f"{loss}, {first}"]
    assert flags(parser, f"{line} {first} 3 {layout} Et*3|t*5L") == [f"{first}, {layout}"]


@pytest.mark.parametrize(
    ("stages", "ends"),
    [
        (2, "--decoder-first-pipeline-num-layers 3"),
        (2, "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5"),
        (4, "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3"),
        (2, "--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2"),
        (2, "--pipeline-model-parallel-layout Et*3|t*5L"),
    ],
)
def test_uneven_stages_that_hold_every_layer_pass(parser: Any, stages: int, ends: str) -> None:
    assert found(parser, f"{DENSE} {PP} {stages} {ends}") == []


def test_virtual_stages_divide_a_stage_and_overlap(parser: Any) -> None:
    line = f"{DENSE} {PP} 2 --num-layers-per-virtual-pipeline-stage"
    assert found(parser, f"{line} 2") == []
    assert flags(parser, f"{line} 3") == ["--num-layers-per-virtual-pipeline-stage"]
    assert flags(parser, f"{line} 2 --no-overlap-p2p-communication") == [
        "--no-overlap-p2p-communication"
    ]
    assert found(parser, f"{DENSE} {PP} 2 --no-overlap-p2p-communication") == []


def test_a_mixture_under_tensor_parallelism_needs_sequence_parallelism(parser: Any) -> None:
    assert flags(parser, f"{MIXTURE} {TP} 2") == [TP]


def test_tokens_are_gathered_only_among_ranks_with_the_same_samples(parser: Any) -> None:
    gather, scatter = (f"--moe-token-dispatcher-type {kind}" for kind in ("allgather", "alltoall"))
    among_two = f"{MIXTURE} {TP} 2 --sequence-parallel {EP} 2 {ETP} 1"
    assert found(parser, f"{among_two} {gather}") == []
    assert found(parser, f"{MIXTURE} {EP} 2 {gather}", context=2) == []
    assert flags(parser, f"{MIXTURE} {EP} 2 {gather}") == ["--moe-token-dispatcher-type"]
    assert found(parser, f"{MIXTURE} {EP} 2 {scatter}") == []
    assert found(parser, f"{MIXTURE} {gather}") == []


def test_tensor_without_sequence_parallelism_warns(parser: Any) -> None:
    (message,) = rules.warnings(parser.parse_args(f"{DENSE} {TP} 2".split()))
    assert "--sequence-parallel" in message.text
    assert rules.warnings(parser.parse_args(f"{DENSE} {TP} 2 --sequence-parallel".split())) == []
    assert rules.warnings(parser.parse_args(DENSE.split())) == []


def test_dropout_another_optimizer_and_another_format_are_refused(parser: Any) -> None:
    line = f"{DENSE} --hidden-dropout 0.1 --optimizer sgd --ckpt-format torch"
    assert flags(parser, line) == ["--hidden-dropout", "--optimizer", "--ckpt-format"]


def test_the_precision_is_said_once(parser: Any) -> None:
    assert found(parser, f"{DENSE} --bf16") == []
    assert flags(parser, f"{DENSE} --bf16", fp32=True) == ["--bf16, --fp32"]
    assert flags(parser, f"{DENSE} --bf16", fp16=True) == ["--bf16, --fp16"]


def test_sizes_below_one_are_the_only_problem(parser: Any) -> None:
    assert flags(parser, f"{DENSE} {TP} 0 {PP} -2") == [TP, PP]


def test_what_only_transformer_engine_can_do_is_refused_without_it(parser: Any) -> None:
    if rules.package.has_transformer_engine():
        pytest.skip("Transformer Engine is installed")
    line = DENSE.replace("--transformer-impl local", "--transformer-impl transformer_engine")
    line += " --fp8-format e4m3 --use-precision-aware-optimizer --exp-avg-dtype fp8"
    assert flags(parser, line) == ["--transformer-impl", "--fp8-format", "--exp-avg-dtype"]
    assert found(parser, f"{DENSE} --use-precision-aware-optimizer --exp-avg-dtype bf16") == []


@pytest.mark.parametrize(
    ("flag", "argument"),
    [
        ("--exp-avg-dtype", "exp_avg_dtype"),
        ("--exp-avg-sq-dtype", "exp_avg_sq_dtype"),
        ("--main-params-dtype", "master_weight_dtype"),
    ],
)
def test_a_dtype_that_our_adam_cannot_store_is_refused_when_flags_are_parsed(
    parser: Any, flag: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Transformer Engine, whose Adam stores all that Megatron's flags offer."""
    import torch
    from torch import nn

    from miles.backends.megatron_utils.fused_adam import FusedAdam

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtypes["fp8"] = torch.uint8
    monkeypatch.setattr(rules.package, "has_transformer_engine", lambda: False)
    option = parser._option_string_actions[flag]
    for choice in option.choices:
        try:
            FusedAdam([nn.Parameter(torch.ones(1))], **{argument: dtypes[choice]})
            expected: list[str] = []
        except ValueError:
            expected = [flag]
        line = f"{DENSE} --use-precision-aware-optimizer {flag} {choice}"
        assert flags(parser, line) == expected, choice


def test_an_adam_in_host_memory_stores_what_ours_does_and_some_of_the_parameters(
    parser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules.package, "has_transformer_engine", lambda: True)
    line = f"{DENSE} --use-precision-aware-optimizer --optimizer-cpu-offload"
    assert found(parser, f"{line} --exp-avg-dtype bf16") == []
    ((flag, remedy),) = found(parser, f"{line} --exp-avg-sq-dtype fp8")
    assert flag == "--exp-avg-sq-dtype"
    assert "--optimizer-cpu-offload" in remedy
    assert "use fp32 or bf16" in remedy
    fraction = "--optimizer-offload-fraction"
    for good in ("0.01", "1"):
        assert found(parser, f"{line} {fraction} {good}") == []
    for bad in ("0", "-0.5", "1.01", "nan"):
        assert flags(parser, f"{line} {fraction} {bad}") == [fraction]


def test_experts_are_chosen_by_their_scores_and_balanced_within_a_micro_batch(parser: Any) -> None:
    kind = "--moe-router-load-balancing-type"
    for passes in ("none", "aux_loss"):
        assert found(parser, f"{MIXTURE} {kind} {passes}") == []
    ((flag, remedy),) = found(parser, f"{MIXTURE} {kind} sinkhorn")
    assert flag == kind
    assert "the engines choose" in remedy
    refused = found(parser, f"{MIXTURE} {kind} seq_aux_loss global_aux_loss")
    assert [flag for flag, _ in refused] == [kind, kind]
    assert all("packed" in remedy for _, remedy in refused)
    assert found(parser, f"{DENSE} {kind} sinkhorn") == []


PRECISION_AWARE = "--use-precision-aware-optimizer"
SHARDED = "--use-distributed-optimizer"
ON_HOST = "--optimizer-cpu-offload"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (SHARDED, None),
        ("", "without --use-distributed-optimizer: every rank would write the whole state"),
        (f"{SHARDED} {PRECISION_AWARE}", f"{PRECISION_AWARE}: holds master weights and moments"),
        (f"{SHARDED} {ON_HOST}", f"{ON_HOST}: holds the state in host memory"),
    ],
)
def test_streamed_state_is_that_of_shards_on_the_device(
    parser: Any, line: str, reason: str | None
) -> None:
    config = MilesConfig(offload=OffloadConfig(stream_optimizer_state_to_disk=True))
    problems = offload_rules.streamed_state_is_sharded(parser.parse_args(line.split()), config)
    assert [p.flag for p in problems] == ["--stream-optimizer-state-to-disk"] * bool(reason)
    assert all(reason in p.remedy for p in problems if reason)


@pytest.mark.parametrize(
    ("line", "sleeps", "refused"),
    [("--use-nccl-ub", True, True), ("--use-nccl-ub", False, False), ("", True, False)],
)
def test_a_trainer_that_sleeps_has_no_buffers_that_stay(
    parser: Any, line: str, sleeps: bool, refused: bool
) -> None:
    config = MilesConfig(offload=OffloadConfig(offload_train=sleeps))
    problems = offload_rules.buffers_can_leave(parser.parse_args(line.split()), config)
    assert [p.flag for p in problems] == ["--use-nccl-ub"] * refused


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("", False),
        (PRECISION_AWARE, True),
        (f"{PRECISION_AWARE} {ON_HOST}", False),
        (ON_HOST, False),
    ],
)
def test_parameters_are_made_from_masters_that_stand_alone(
    parser: Any, line: str, refused: bool
) -> None:
    config = MilesConfig(offload=OffloadConfig(rematerialize_param_from_master_weight=True))
    problems = offload_rules.master_weights_stand_alone(parser.parse_args(line.split()), config)
    assert len(problems) == refused
    assert all("16-bit remainders" in p.remedy for p in problems)
