"""Hugging Face directory -> torch_dist checkpoint for --load or --ref-load.

    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint DIR --save DIR

Also under torchrun: the layout is Megatron's flags; without them the layers are spread over ranks.
"""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2 and every problem of the arguments, with code 1 when writing fails."""
    parser = argparse.ArgumentParser(
        description="Convert a Hugging Face directory to a torch_dist checkpoint.",
        epilog="All other arguments are Megatron's: the architecture (read from config.json when "
        "none is given) and the layout of ranks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hf-checkpoint", nargs="?", const="", default="", help="Hugging Face directory"
    )
    parser.add_argument(
        "--save", nargs="?", const="", default="", help="new directory for the checkpoint"
    )
    options, megatron_flags = parser.parse_known_args(argv)
    # Importing torch and Megatron takes seconds, which --help does not need.
    from miles.utils.conversion_tools import require_megatron, told

    with told(parser.prog):
        require_megatron()
        from miles.backends.megatron_utils.conversion import hf_to_torch_dist

        hf_to_torch_dist(options.hf_checkpoint, options.save, megatron_flags)


if __name__ == "__main__":
    main()
