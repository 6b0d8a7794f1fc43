"""torch_dist checkpoint -> Hugging Face directory.

    python tools/convert_torch_dist_to_hf.py ${MODEL_ARGS[@]} --load DIR --hf-checkpoint DIR \
        --save DIR

The step that the checkpoint's tracker names is converted. Also under torchrun.
"""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2 and every problem of the arguments, with code 1 when writing fails."""
    parser = argparse.ArgumentParser(
        description="Convert a torch_dist checkpoint to a Hugging Face directory.",
        epilog="All other arguments are Megatron's: the architecture (read from config.json when "
        "none is given) and the layout of ranks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--load", nargs="?", const="", default="", help="checkpoint: the parent of iter_*"
    )
    parser.add_argument(
        "--hf-checkpoint",
        nargs="?",
        const="",
        default="",
        help="Hugging Face directory of the model: gives names, dtypes, config and tokenizer",
    )
    parser.add_argument(
        "--save", nargs="?", const="", default="", help="new Hugging Face directory to write"
    )
    options, megatron_flags = parser.parse_known_args(argv)
    # Importing torch and Megatron takes seconds, which --help does not need.
    from miles.utils.conversion_tools import require_megatron, told

    with told(parser.prog):
        require_megatron()
        from miles.backends.megatron_utils.conversion import torch_dist_to_hf

        torch_dist_to_hf(options.load, options.hf_checkpoint, options.save, megatron_flags)


if __name__ == "__main__":
    main()
