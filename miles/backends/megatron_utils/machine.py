"""What Megatron must be told on a machine without Transformer Engine, Apex or an accelerator.

A user should not have to know these flags, nor a command line change between machines: each trainer
process adds them to its own arguments, in front of what the user gave.
"""

from miles.backends.megatron_utils import package

_NO_TRANSFORMER_ENGINE = (
    *("--transformer-impl", "local"),
    "--no-persist-layer-norm",
    "--no-rope-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
)
_NO_ACCELERATOR = ("--distributed-backend", "gloo", "--use-cpu-initialization")


def flags() -> tuple[str, ...]:
    """Megatron's flags for this machine; empty where everything is there."""
    found: list[str] = []
    if not package.has_transformer_engine():
        found += _NO_TRANSFORMER_ENGINE
    if not package.has_fused_weight_gradients():
        found.append("--no-gradient-accumulation-fusion")
    if not _has_accelerator():
        found += _NO_ACCELERATOR
    return tuple(found)


def reason() -> str:
    """Why ``flags`` are set, for the log."""
    missing = [
        name
        for name, there in (
            ("Transformer Engine", package.has_transformer_engine()),
            ("Apex's fused weight gradients", package.has_fused_weight_gradients()),
            ("accelerator", _has_accelerator()),
        )
        if not there
    ]
    return f"no {', no '.join(missing)} on this machine; Megatron runs with"


def _has_accelerator() -> bool:
    # torch.cuda stays as it is where the shim replaces parts of it.
    from miles.core import device

    return device.has_accelerator()
