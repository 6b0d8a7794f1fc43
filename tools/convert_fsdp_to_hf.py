"""Checkpoint of the FSDP backend -> Hugging Face directory.

    python tools/convert_fsdp_to_hf.py --load DIR --hf-checkpoint DIR --save DIR

The step that the checkpoint's tracker names is converted.
"""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2 and every problem of the arguments, with code 1 when writing fails."""
    parser = argparse.ArgumentParser(
        description="Convert a checkpoint of the FSDP backend to a Hugging Face directory.",
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
        help="Hugging Face directory of the model: gives names, config and tokenizer",
    )
    parser.add_argument(
        "--save", nargs="?", const="", default="", help="new Hugging Face directory to write"
    )
    options, unknown = parser.parse_known_args(argv)
    # Importing transformers takes seconds, which --help does not need.
    from miles.backends.fsdp_utils.conversion import fsdp_to_hf
    from miles.utils.conversion_tools import told

    with told(parser.prog):
        fsdp_to_hf(options.load, options.hf_checkpoint, options.save, unknown)
    print(f"wrote {options.save}")


if __name__ == "__main__":
    main()
