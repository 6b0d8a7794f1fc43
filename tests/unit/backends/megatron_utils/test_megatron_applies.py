"""Megatron's flags that mean something only beside others."""

from typing import Any

import pytest

from miles.backends.megatron_utils import applies, package
from miles.config.cluster import ClusterConfig
from miles.config.command_line import Foreign
from miles.config.precision import PrecisionConfig
from miles.config.root import MilesConfig

pytestmark = pytest.mark.megatron

EXPERTS = "--num-experts 4"
PP2 = "--pipeline-model-parallel-size 2"
AWARE = "--use-precision-aware-optimizer"
OFFLOAD = "--optimizer-cpu-offload"
BALANCE = "--moe-router-load-balancing-type"


@pytest.fixture(scope="module")
def parser() -> Any:
    from miles.backends.megatron_utils.namespace import make_parser

    return make_parser()


def refused(parser: Any, line: str, *, context: int = 1, **precision: bool) -> list[str]:
    """The flags of a line of ``--name value ...`` that have no effect in it."""
    cluster = ClusterConfig(context_parallel_size=context)
    config = MilesConfig(cluster=cluster, precision=PrecisionConfig(**precision))
    given = [Foreign(name=word) for word in line.split() if word.startswith("--")]
    return [p.flag for p in applies.check(parser.parse_args(line.split()), config, given)]


@pytest.mark.parametrize(
    ("flag", "beside"),
    [
        ("--moe-z-loss-coeff 0.1", EXPERTS),
        ("--moe-ffn-hidden-size 8", EXPERTS),
        ("--exp-avg-dtype bf16", AWARE),
        ("--main-grads-dtype bf16", AWARE),
        ("--overlap-cpu-optimizer-d2h-h2d", OFFLOAD),
        ("--optimizer-offload-fraction 0.5", OFFLOAD),
        ("--use-torch-optimizer-for-cpu-offload", OFFLOAD),
        ("--no-pin-cpu-grads", OFFLOAD),
        ("--no-pin-cpu-params", OFFLOAD),
        ("--fp8-recipe delayed", "--fp8-format e4m3"),
        ("--fp8-param-gather", "--fp8-format e4m3"),
        ("--fp4-param-gather", "--fp4-format e2m1"),
        ("--first-last-layers-bf16", "--fp8-format e4m3"),
        ("--num-layers-at-start-in-bf16 2", "--first-last-layers-bf16 --fp8-format e4m3"),
        ("--ddp-reduce-scatter-with-fp32-accumulation", "--grad-reduce-in-bf16"),
        ("--ddp-param-name-patterns-for-fp32-local-accumulation all", "--grad-reduce-in-bf16"),
        ("--recompute-method uniform", "--recompute-granularity full"),
        ("--recompute-modules mlp", "--recompute-granularity selective"),
        ("--recompute-modules mlp", "--recompute-activations"),
        ("--decoder-first-pipeline-num-layers 1", PP2),
        ("--num-virtual-stages-per-pipeline-rank 2", PP2),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 2",
            f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
        ),
        ("--ddp-bucket-size 100", "--overlap-grad-reduce"),
        ("--sequence-parallel", "--tensor-model-parallel-size 2"),
        ("--sharp-enabled-group dp", "--use-sharp"),
        ("--disable-symmetric-registration", "--use-nccl-ub"),
    ],
)
def test_a_flag_that_serves_another_is_refused_without_it(
    parser: Any, flag: str, beside: str
) -> None:
    assert refused(parser, flag) == [flag.split()[0]]
    assert refused(parser, f"{flag} {beside}") == []


def test_loss_scales_are_for_fp16_and_change_only_when_they_are_not_fixed(parser: Any) -> None:
    line = "--initial-loss-scale 4 --hysteresis 1"
    assert refused(parser, line) == ["--initial-loss-scale", "--hysteresis"]
    assert refused(parser, line, fp16=True) == []
    assert refused(parser, "--loss-scale 8") == ["--loss-scale"]
    assert refused(parser, "--loss-scale 8", fp16=True) == []
    fixed = refused(parser, f"{line} --loss-scale 8", fp16=True)
    assert fixed == ["--initial-loss-scale", "--hysteresis"]


def test_narrow_gradients_are_for_bf16(parser: Any) -> None:
    line = f"{AWARE} --main-grads-dtype bf16"
    assert refused(parser, line) == []
    assert refused(parser, line, fp16=True) == ["--main-grads-dtype"]
    assert refused(parser, "--grad-reduce-in-bf16", fp32=True) == ["--grad-reduce-in-bf16"]


def test_a_balancing_loss_needs_its_kind_and_its_coefficient(parser: Any) -> None:
    coefficient = "--moe-aux-loss-coeff"
    assert refused(parser, f"{EXPERTS} {BALANCE} aux_loss {coefficient} 0.1") == []
    assert refused(parser, f"{EXPERTS} {coefficient} 0.1") == []
    assert refused(parser, f"{EXPERTS} {BALANCE} none {coefficient} 0") == []
    assert refused(parser, f"{EXPERTS} {BALANCE} aux_loss") == [BALANCE]
    assert refused(parser, f"{EXPERTS} {BALANCE} none {coefficient} 0.1") == [coefficient]


def test_what_transformer_engine_does_is_refused_without_it(
    parser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "--attention-backend flash --fp32-residual-connection"
    monkeypatch.setattr(package, "has_transformer_engine", lambda: False)
    assert refused(parser, line) == ["--attention-backend", "--fp32-residual-connection"]
    assert refused(parser, "--cp-comm-type a2a", context=2) == ["--cp-comm-type"]
    monkeypatch.setattr(package, "has_transformer_engine", lambda: True)
    assert refused(parser, line) == []
    assert refused(parser, "--cp-comm-type a2a", context=2) == []
    assert refused(parser, "--cp-comm-type a2a") == ["--cp-comm-type"]


def test_the_reason_says_beside_what_it_applies(parser: Any) -> None:
    given = [Foreign(name="--recompute-method", words=("uniform",))]
    args = parser.parse_args(["--recompute-method", "uniform"])
    (problem,) = applies.check(args, MilesConfig(), given)
    assert problem.value == "uniform"
    assert problem.remedy == "applies only with --recompute-granularity; leave it out"
