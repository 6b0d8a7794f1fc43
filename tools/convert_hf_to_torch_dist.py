"""Hugging Face directory -> torch_dist checkpoint for --load or --ref-load.

    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint DIR --save DIR

Also under torchrun: the layout is Megatron's flags; without them the layers are spread over ranks.
"""

import argparse
import sys
from collections.abc import Sequence

from miles.config.errors import ConfigError
from miles.core.hf import CheckpointDirError


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2 and every problem when the directories or flags do not fit together."""
    parser = argparse.ArgumentParser(
        description="Convert a Hugging Face directory to a torch_dist checkpoint.",
        epilog="All other arguments are Megatron's: the architecture (read from config.json when "
        "none is given) and the layout of ranks.",
        allow_abbrev=False,
    )
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face directory")
    parser.add_argument("--save", required=True, help="directory for the checkpoint")
    options, megatron_flags = parser.parse_known_args(argv)
    # Importing Megatron takes seconds, which --help does not need.
    from miles.backends.megatron_utils.conversion import hf_to_torch_dist

    try:
        hf_to_torch_dist(options.hf_checkpoint, options.save, megatron_flags)
    except (ConfigError, CheckpointDirError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
