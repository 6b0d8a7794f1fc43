"""What the FSDP backend demands of the flags."""

import pytest

from miles.backends.fsdp_utils.arguments import check, missing_attention_package, refuse
from miles.backends.megatron_utils import refusals
from miles.config.cluster import ClusterConfig
from miles.config.command_line import Foreign
from miles.config.fsdp import FsdpConfig
from miles.config.megatron_flags import MEGATRON_FLAGS
from miles.config.precision import PrecisionConfig
from miles.config.root import MilesConfig


def config(context_parallel_size: int = 1, fp16: bool = False, **fsdp: object) -> MilesConfig:
    cluster = ClusterConfig(
        actor_num_nodes=3,
        actor_num_gpus_per_node=2,
        context_parallel_size=context_parallel_size,
    )
    return MilesConfig(
        cluster=cluster,
        precision=PrecisionConfig(fp16=fp16),
        fsdp=FsdpConfig(**fsdp),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
def test_replicas_that_divide_the_ranks_are_fine(replicas: int) -> None:
    assert check(config(dp_replicate_size=replicas), frozenset()) == []


@pytest.mark.parametrize("replicas", [4, 5, 12])
def test_replicas_that_do_not_divide_the_ranks_are_refused_with_the_arithmetic(
    replicas: int,
) -> None:
    (problem,) = check(config(dp_replicate_size=replicas), frozenset())
    assert problem.flag == "--dp-replicate-size"
    assert "--actor-num-nodes 3 x --actor-num-gpus-per-node 2 = 6" in problem.remedy


def test_context_parallelism_is_refused_with_the_backend_and_the_remedy() -> None:
    (problem,) = check(config(context_parallel_size=2), frozenset())
    assert problem.flag == "--context-parallel-size"
    assert "fsdp" in problem.remedy
    assert "--train-backend megatron" in problem.remedy


def test_fp16_needs_the_fp32_master() -> None:
    (problem,) = check(config(fp16=True, keep_fp32_master=False), frozenset())
    assert problem.flag == "--fp16, --no-keep-fp32-master"


def test_an_attention_whose_package_is_missing_is_refused() -> None:
    assert missing_attention_package("sdpa") is None
    assert missing_attention_package("eager") is None
    assert missing_attention_package("flash_attention_3") == "flash_attn_interface"
    assert missing_attention_package("kernels-community/flash-attn2") == "kernels"
    (problem,) = check(config(attn_implementation="flash_attention_3"), frozenset())
    assert problem.flag == "--attn-implementation"
    assert "flash_attn_interface" in problem.remedy


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--recompute-granularity", "--gradient-checkpointing"),
        ("--tensor-model-parallel-size", "--train-backend megatron"),
        ("--num-layers", "config.json"),
        ("--optimizer-cpu-offload", "--fsdp-cpu-offload"),
        ("--overlap-cpu-optimizer-d2h-h2d", "leave it out"),
        ("--bf16", "default"),
        ("--use-distributed-optimizer", "--train-backend megatron"),
        ("--lora-rank", "LoRA is not supported by the fsdp backend"),
        ("--use-lora", "LoRA is not supported by the fsdp backend"),
        ("--peft_config", "LoRA is not supported by the fsdp backend"),
        ("--batch-size", "--rollout-batch-size"),
        ("--target-modules", "LoRA is not supported by the fsdp backend"),
    ],
)
def test_flags_of_the_other_backend_are_refused_by_name(flag: str, remedy: str) -> None:
    problem = refuse(Foreign(name=flag, words=("2",)))
    assert problem is not None
    assert problem.flag == flag
    assert "fsdp" in problem.remedy
    assert remedy in problem.remedy


@pytest.mark.parametrize("name", sorted(refusals.REASONS.keys() & MEGATRON_FLAGS))
def test_nobody_is_sent_to_megatron_with_a_flag_that_it_refuses_too(name: str) -> None:
    problem = refuse(Foreign(name=f"--{name}", words=()))
    assert problem is not None
    assert "--train-backend megatron" not in problem.remedy


def test_a_slip_of_the_pen_is_left_to_others() -> None:
    assert refuse(Foreign(name="--rollout-batch", words=("2",))) is None


def test_a_refusal_names_the_file_that_the_flag_stands_in() -> None:
    problem = refuse(Foreign(name="--sequence-parallel", words=(), file="run.yaml"))
    assert problem is not None
    assert problem.remedy.endswith("(in run.yaml)")


def test_an_attention_that_nobody_knows_is_refused_with_the_names() -> None:
    (problem,) = check(config(attn_implementation="flash"), frozenset())
    assert problem.flag == "--attn-implementation"
    assert "sdpa" in problem.remedy
