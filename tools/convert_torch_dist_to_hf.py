"""torch_dist checkpoint -> Hugging Face directory.

    python tools/convert_torch_dist_to_hf.py ${MODEL_ARGS[@]} --load DIR --hf-checkpoint DIR \
        --save DIR

The step that the checkpoint's tracker names is converted. Also under torchrun.
"""

import argparse
import sys
from collections.abc import Sequence

from miles.config.errors import ConfigError
from miles.core.hf import CheckpointDirError


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2 and every problem when the directories or flags do not fit together."""
    parser = argparse.ArgumentParser(
        description="Convert a torch_dist checkpoint to a Hugging Face directory.",
        epilog="All other arguments are Megatron's: the architecture (read from config.json when "
        "none is given) and the layout of ranks.",
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, help="checkpoint: the parent of iter_*")
    parser.add_argument(
        "--hf-checkpoint",
        required=True,
        help="Hugging Face directory of the model: gives names, dtypes, config and tokenizer",
    )
    parser.add_argument("--save", required=True, help="Hugging Face directory to write")
    options, megatron_flags = parser.parse_known_args(argv)
    # Importing Megatron takes seconds, which --help does not need.
    from miles.backends.megatron_utils.conversion import torch_dist_to_hf

    try:
        torch_dist_to_hf(options.load, options.hf_checkpoint, options.save, megatron_flags)
    except (ConfigError, CheckpointDirError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
