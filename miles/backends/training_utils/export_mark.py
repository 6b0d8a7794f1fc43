"""What tells an export of ours from a model of someone else, which is not to be replaced.

Reads headers alone, without torch: also when a command line is parsed.
"""

import json
import struct
from itertools import islice
from pathlib import Path

from miles.backends.training_utils.checkpoints import first_rollout_id
from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.core.places import reason_against_reading

METADATA = {"format": "pt", "written_by": "miles"}
"""In the header of an export's every safetensors file; ``format`` is what transformers asks for."""

_PARSED_ROLLOUTS = 10_000
"""So many places of ``--save-hf`` are looked at beforehand; each is again when it is written."""

_OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth")


def reason_against_replacing(directory: str | Path) -> str | None:
    """Why an export must not take the place of what is there; ``None``: nothing is, or another
    export."""
    folder = Path(directory)
    reason = reason_against_reading(folder)
    if reason is not None or not folder.exists():
        return reason
    if not folder.is_dir():
        return "is a file; give a directory"
    if folder.is_mount():
        return "is where a file system is mounted, which cannot be replaced; give a directory in it"
    if not any(folder.iterdir()):
        return None
    remedy = "is not replaced; give another directory, or remove it yourself"
    if not (folder / "config.json").is_file():
        return f"is not empty and no Hugging Face directory: it {remedy}"
    files = sorted(folder.glob("*.safetensors"))
    foreign = any(any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS)
    if foreign or not files or not all(map(_is_marked, files)):
        return f"holds a model that is no export of this program: it {remedy}"
    return None


def check_save_hf(config: MilesConfig) -> list[Problem]:
    """Nothing but exports lies where this run is to export."""
    template = config.checkpoint.save_hf
    if template is None:
        return []
    try:
        first = first_rollout_id(config.checkpoint.load)
        last = max(first + 1, config.data.num_rollout or 0)
        ids = islice(range(first, last), _PARSED_ROLLOUTS)
        places = dict.fromkeys(template.format(rollout_id=rollout_id) for rollout_id in ids)
    except (ConfigError, KeyError, IndexError, ValueError):
        return []  # Rules of --load and of the template have it.
    for place in places:
        reason = reason_against_replacing(place)
        if reason is not None:
            what = reason if place == template else f"{place} {reason}"
            return [Problem("--save-hf", template, what)]
    return []


def _is_marked(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, file.stat().st_size)))
    except (struct.error, ValueError):  # damaged, and so none that was completed here
        return False
    return isinstance(header, dict) and header.get("__metadata__") == METADATA
