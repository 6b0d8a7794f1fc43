"""Prints a model's architecture flags for Megatron on one line, for ``MODEL_ARGS`` of a shell.

    python3 miles/utils/external_utils/model_args_utils.py qwen3-4B
    python3 miles/utils/external_utils/model_args_utils.py /models/Qwen3-4B

A name is a file of ``scripts/models/`` and needs no package installed; a Hugging Face directory is
read with transformers. Of an architecture that a module of ``miles_plugins/mbridge/`` brings, the
line has the ``--spec`` too. Runs by its path, without the repository on PYTHONPATH.
"""

import difflib
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "scripts" / "models"
BRIDGES = "miles_plugins.mbridge"


def names() -> list[str]:
    """Models that have a file."""
    return sorted(path.stem for path in MODELS.glob("*.py"))


def model_args(model: str) -> list[str]:
    """Flags of a name or a Hugging Face directory. Raises ``ValueError`` for anything else."""
    from miles.backends.megatron_utils.architecture import to_argv

    path = MODELS / f"{model}.py"
    if model in names():
        return to_argv(runpy.run_path(str(path))["MODEL_ARGS"])
    if not (Path(model) / "config.json").is_file():
        close = difflib.get_close_matches(model, names(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"{model!r} is neither a Hugging Face directory (it has no config.json) nor one of: "
            f"{', '.join(names())}{hint}"
        )
    from miles.core import hf

    try:
        return to_argv(_derived(hf.load_config(model)))
    except ModuleNotFoundError as error:
        raise ValueError(f"{model}: reading it needs {error.name} (.venv/bin/python)") from error


def _derived(config: Any) -> dict[str, str | bool]:
    """Of a transformers config: the core's flags, or those of a bridge and the spec it needs.

    Raises ``UnknownArchitecture``.
    """
    from miles.backends.megatron_utils.architecture import FAMILIES, flags_of
    from miles.core import hf

    if config.model_type not in FAMILIES:
        for path in sorted((ROOT / BRIDGES.replace(".", "/")).glob("[!_]*.py")):
            bridge = importlib.import_module(f"{BRIDGES}.{path.stem}").BRIDGE
            if config.model_type in bridge.model_types:
                spec = {} if bridge.spec is None else {"spec": bridge.spec}
                return {**spec, **bridge.flags(hf.text_config(config))}
    return flags_of(config)


def main() -> None:
    """Print the line; on failure only a message to stderr, with exit code 2."""
    if len(sys.argv) != 2:
        print(
            f"usage: {sys.argv[0]} NAME|HF_DIRECTORY; names: {', '.join(names())}", file=sys.stderr
        )
        raise SystemExit(2)
    try:
        line = model_args(sys.argv[1])
    except (OSError, ValueError) as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(" ".join(line))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
