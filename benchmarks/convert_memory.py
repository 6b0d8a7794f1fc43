"""Peak host memory of the conversion tools: what each rank holds beyond an empty conversion.

The promise is one copy of the model divided by the ranks, plus one layer. A model is made, and
converted to torch_dist and back, by one process and by several; the same with a model of a few
kilobytes gives what Python and its libraries need.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import tyro
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.made_models import make_qwen3  # noqa: E402

MIB = 2**20
TIMEOUT_S = 1800.0
SAMPLE_S = 0.01


@dataclass(frozen=True)
class ConvertMemory:
    """Measure the converters' peak memory per rank."""

    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes to convert with."""
    hidden_size: int = 1024
    num_layers: int = 16
    folder: Path = ROOT / "runs/benchmark/convert"
    """Models and checkpoints; removed at the end."""


def make_model(path: Path, hidden_size: int, num_layers: int) -> int:
    """bf16, with an embedding as large as a layer. Returns the bytes of its weights."""
    alphabet = "".join(map(chr, range(0x4E00, 0x4E00 + 8 * hidden_size)))
    make_qwen3(
        path,
        alphabet=alphabet,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        num_kv_heads=hidden_size // 128,
        head_dim=64,
        tied=False,
        dtype=torch.bfloat16,
    )
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def peak_mib(tool: str, num_ranks: int, *arguments: str) -> float:
    """The most memory of its own that any rank held, sampled; mapped files, which the system can
    drop at will, are left out."""
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*start, str(ROOT / "tools" / tool), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    deadline = time.monotonic() + TIMEOUT_S
    peak = 0
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"{tool} took more than {TIMEOUT_S:g} s")
            peak = max(peak, *map(own_bytes, [process, *process.children(recursive=True)]))
            time.sleep(SAMPLE_S)
        if process.returncode != 0:
            output.seek(0)
            raise RuntimeError(f"{shlex.join(command)}:\n{output.read().decode()}")
    return peak / MIB


def own_bytes(process: psutil.Process) -> int:
    """Resident bytes that no file backs; 0 for a process that has just ended."""
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return memory.rss - memory.shared


def same_weights(one: Path, other: Path) -> bool:
    """Whether the same tensors are in both files, bit for bit. Who wrote a file is in its header
    too, and differs."""
    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        names = set(first.keys())
        if names != set(second.keys()):
            return False
        pairs = ((first.get_tensor(name), second.get_tensor(name)) for name in names)
        return all(
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
            for a, b in pairs
        )


def both_ways(model: Path, folder: Path, num_ranks: int) -> tuple[float, float]:
    """Peaks of converting there and back. Raises ``RuntimeError`` when the weights differ."""
    shutil.rmtree(folder, ignore_errors=True)
    there, back = folder / "torch_dist", folder / "hf"
    hf = ("--hf-checkpoint", str(model))
    peaks = (
        peak_mib("convert_hf_to_torch_dist.py", num_ranks, *hf, "--save", str(there)),
        peak_mib(
            "convert_torch_dist_to_hf.py", num_ranks, *hf, "--load", str(there), "--save", str(back)
        ),
    )
    name = "model.safetensors"
    if not same_weights(model / name, back / name):
        raise RuntimeError(f"{back / name} is not {model / name}")
    shutil.rmtree(folder)
    return peaks


def main(options: ConvertMemory) -> None:
    folder = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    num_bytes = make_model(folder / "model", options.hidden_size, options.num_layers)
    make_qwen3(folder / "empty", num_layers=options.num_layers)
    size = num_bytes / MIB
    columns = ("ranks", "copy / ranks MiB", "to torch_dist", "and back", "empty there", "back")
    table = Table(*columns, title=f"a model of {size:,.0f} MiB: peak MiB of a rank beyond empty")
    for num_ranks in options.ranks:
        empty = both_ways(folder / "empty", folder / "out", num_ranks)
        full = both_ways(folder / "model", folder / "out", num_ranks)
        beyond = [f"{a - b:,.0f}" for a, b in zip(full, empty, strict=True)]
        table.add_row(
            str(num_ranks), f"{size / num_ranks:,.0f}", *beyond, *(f"{x:,.0f}" for x in empty)
        )
    Console().print(table)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(ConvertMemory))
