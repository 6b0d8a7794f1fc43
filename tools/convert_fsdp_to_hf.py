"""Checkpoint of the FSDP backend -> Hugging Face directory.

    python tools/convert_fsdp_to_hf.py --load DIR --hf-checkpoint DIR --save DIR

The step that the checkpoint's tracker names is converted.
"""

import argparse
import sys
from collections.abc import Sequence

from miles.config.errors import ConfigError
from miles.core.hf import CheckpointDirError


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2 and every problem when the directories do not fit together."""
    parser = argparse.ArgumentParser(
        description="Convert a checkpoint of the FSDP backend to a Hugging Face directory.",
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, help="checkpoint: the parent of iter_*")
    parser.add_argument(
        "--hf-checkpoint",
        required=True,
        help="Hugging Face directory of the model: gives names, config and tokenizer",
    )
    parser.add_argument("--save", required=True, help="Hugging Face directory to write")
    options = parser.parse_args(argv)
    # Importing transformers takes seconds, which --help does not need.
    from miles.backends.fsdp_utils.conversion import fsdp_to_hf

    try:
        fsdp_to_hf(options.load, options.hf_checkpoint, options.save)
    except (ConfigError, CheckpointDirError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"wrote {options.save}")


if __name__ == "__main__":
    main()
