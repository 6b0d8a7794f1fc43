"""The receiver: what fits is copied bit for bit, what does not is refused before any byte is."""

import json
import multiprocessing as mp
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from miles.backends.embedded.receive import WeightLoadError, WeightReceiver
from miles.core.distributed import join_group, open_store

CPU = torch.device("cpu")


class TinyTied(torch.nn.Module):
    """Two tied weights, one more of another dtype, a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


@pytest.fixture
def model() -> TinyTied:
    return TinyTied()


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    shm = SharedMemory(create=True, size=4096)
    yield shm
    shm.close()
    shm.unlink()


def payload(shm: SharedMemory, entries: list[Any], nbytes: int = 4096) -> str:
    return json.dumps({"shm": shm.name, "nbytes": nbytes, "entries": entries})


def put(shm: SharedMemory, offset: int, tensor: torch.Tensor) -> None:
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    assert shm.buf is not None
    shm.buf[offset : offset + len(raw)] = raw


def test_a_bucket_in_shared_memory_is_copied_bit_for_bit(
    model: TinyTied, segment: SharedMemory
) -> None:
    embed, scale = torch.randn(5, 3), torch.randn(4).bfloat16()
    put(segment, 64, embed)
    put(segment, 0, scale)
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 3)))
    WeightReceiver(model, CPU).load_shm(
        payload(
            segment,
            [
                ["embed.weight", "float32", [5, 3], 64],
                ["scale", "bfloat16", [4], 0],
                # Behind the last byte of the bucket.
                ["nothing", "float32", [0, 3], 4096],
            ],
        )
    )
    assert torch.equal(model.head.weight, embed)
    assert torch.equal(model.scale, scale)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (["nobody", "float32", [2], 0], "no weight 'nobody'"),
        (["cache", "float32", [2], 0], "no weight 'cache'"),
        (["scale", "bfloat16", [5], 0], r"shape \[5\] for a weight of \[4\]"),
        (["scale", "float32", [4], 0], "float32 for a weight of bfloat16"),
        (["scale", "float16", [4], 0], "float16 for a weight of bfloat16"),
        (["scale", "bogus", [4], 0], "unknown dtype"),
        (["scale", "nn", [4], 0], "unknown dtype"),
        (["scale", "bfloat16", [4], -8], "bytes -8..0 of a bucket of 4096"),
        (["scale", "bfloat16", [4], 4090], "bytes 4090..4098 of a bucket of 4096"),
        (["scale", "bfloat16", [4], 2**70], "of a bucket of 4096"),
        (["scale", "bfloat16", [4], 3], "not aligned"),
        (["bias", "float32", [2], 0], "comes twice"),
        (["scale", "bfloat16", [4]], "not a shm_bucket"),
    ],
)
def test_a_bucket_with_one_unfitting_tensor_is_refused_and_nothing_is_written(
    model: TinyTied, segment: SharedMemory, bad: list[Any], says: str
) -> None:
    put(segment, 0, torch.full((64,), 7.0))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(WeightLoadError, match=says):
        WeightReceiver(model, CPU).load_shm(payload(segment, [["bias", "float32", [2], 0], bad]))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "nbytes", "says"),
    [
        ("../etc/passwd", 8, "not a shared-memory name"),
        ("", 8, "not a shared-memory name"),
        ("psm_does_not_exist", 8, "No such file"),
        (None, 1 << 20, "1048576 bytes asked"),
        (None, -1, "of a bucket of -1"),
    ],
)
def test_a_segment_that_is_missing_or_smaller_than_said_is_refused(
    model: TinyTied, segment: SharedMemory, name: str | None, nbytes: int, says: str
) -> None:
    text = json.dumps(
        {
            "shm": segment.name if name is None else name,
            "nbytes": nbytes,
            "entries": [["bias", "float32", [2], 0]],
        }
    )
    with pytest.raises(WeightLoadError, match=says):
        WeightReceiver(model, CPU).load_shm(text)
    assert model.bias.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"shm": 3}', "\x80"])
def test_a_payload_that_is_no_bucket_is_refused(model: TinyTied, text: str) -> None:
    with pytest.raises(WeightLoadError, match="not a shm_bucket"):
        WeightReceiver(model, CPU).load_shm(text)


def test_attaching_neither_unlinks_the_segment_nor_warns_when_the_engine_ends(
    segment: SharedMemory,
) -> None:
    script = (
        "import sys, torch; from miles.backends.embedded.receive import WeightReceiver\n"
        "m = torch.nn.Linear(2, 1, bias=False)\n"
        "WeightReceiver(m, torch.device('cpu')).load_shm(sys.argv[1])\n"
        "print(m.weight.tolist())"
    )
    put(segment, 0, torch.tensor([1.5, -2.0]))
    text = payload(segment, [["weight", "float32", [1, 2], 0]])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, text],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[[1.5, -2.0]]", "")
    SharedMemory(name=segment.name).close()


def test_checksums_name_a_tied_weight_once_by_the_name_it_came_under(
    model: TinyTied, segment: SharedMemory
) -> None:
    receiver = WeightReceiver(model, CPU)
    assert receiver.checksums().keys() == {"embed.weight", "scale", "bias"}
    embed = torch.randn(5, 3)
    put(segment, 0, embed)
    receiver.load_shm(payload(segment, [["head.weight", "float32", [5, 3], 0]]))
    assert receiver.checksums().keys() == {"head.weight", "scale", "bias"}
    raw = bytes(embed.reshape(-1).view(torch.uint8).tolist())
    assert receiver.checksums()["head.weight"] == xxhash.xxh3_128(raw).hexdigest()


def test_an_engine_in_another_dtype_casts_and_reports_the_digest_of_what_it_received(
    model: TinyTied, segment: SharedMemory
) -> None:
    scale = torch.tensor([1.0, 1.00390625, -3.0, 0.1])
    put(segment, 0, scale)
    receiver = WeightReceiver(model, CPU, cast=True)
    receiver.load_shm(payload(segment, [["scale", "float32", [4], 0]]))
    assert torch.equal(model.scale, scale.bfloat16())
    raw = bytes(scale.view(torch.uint8).tolist())
    assert receiver.checksums()["scale"] == xxhash.xxh3_128(raw).hexdigest()
    with pytest.raises(WeightLoadError, match="int32 for a weight"):
        receiver.load_shm(payload(segment, [["scale", "int32", [4], 0]]))


def test_a_directory_of_safetensors_is_loaded(model: TinyTied, tmp_path: Path) -> None:
    embed, scale = torch.randn(5, 3), torch.randn(4).bfloat16()
    save_file({"embed.weight": embed}, tmp_path / "model-1.safetensors")
    save_file({"scale": scale}, tmp_path / "model-2.safetensors")
    WeightReceiver(model, CPU).load_disk(str(tmp_path))
    assert torch.equal(model.embed.weight, embed)
    assert torch.equal(model.scale, scale)


def test_a_directory_with_one_unfitting_tensor_is_refused_and_nothing_is_written(
    model: TinyTied, tmp_path: Path
) -> None:
    before = model.embed.weight.clone()
    save_file({"embed.weight": torch.randn(5, 3)}, tmp_path / "model-1.safetensors")
    save_file({"scale": torch.randn(4)}, tmp_path / "model-2.safetensors")
    with pytest.raises(WeightLoadError, match="scale: float32 for a weight of bfloat16"):
        WeightReceiver(model, CPU).load_disk(str(tmp_path))
    assert torch.equal(model.embed.weight, before)
    with pytest.raises(WeightLoadError, match=r"no \*\.safetensors"):
        WeightReceiver(model, CPU).load_disk(str(tmp_path / "nowhere"))


def _join(receiver: WeightReceiver, port: int, timeout_s: float = 100.0) -> threading.Thread:
    def run() -> None:
        receiver.init_group(
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
            timeout_s=timeout_s,
        )

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _send(connection: Any) -> None:
    """The trainer's end, in its own process: joins, then broadcasts what it is told."""
    store = open_store("127.0.0.1", 100.0)
    connection.send(store.port)
    group = join_group("g", "127.0.0.1", store.port, 0, 2, "gloo", 100.0)
    while (tensors := connection.recv()) is not None:
        try:
            group.broadcast(tensors, watch=lambda: None, timeout_s=100.0)
            connection.send("sent")
        except RuntimeError as error:
            connection.send(f"failed: {error}")


@pytest.fixture
def sender() -> Iterator[Any]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs,))
    process.start()
    yield ours
    process.kill()
    process.join()


def test_tensors_arrive_by_broadcast_and_a_refusal_ends_the_group_at_once(
    model: TinyTied, sender: Any
) -> None:
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 3)))
    receiver = WeightReceiver(model, CPU)
    _join(receiver, sender.recv()).join(60)
    embed, scale = torch.randn(5, 3), torch.randn(4).bfloat16()
    sender.send([embed, torch.zeros(0, 3), scale])
    receiver.load_group(
        names=["head.weight", "nothing", "scale"],
        dtypes=["float32", "float32", "bfloat16"],
        shapes=[[5, 3], [0, 3], [4]],
        group_name="g",
    )
    assert sender.recv() == "sent"
    assert torch.equal(model.embed.weight, embed)
    assert torch.equal(model.scale, scale)

    with pytest.raises(WeightLoadError, match="no weight 'nobody'"):
        receiver.load_group(names=["nobody"], dtypes=["float32"], shapes=[[2]], group_name="g")
    sender.send([torch.zeros(1 << 20)])
    assert sender.poll(60), "the sender still waits for an engine that refused"
    assert sender.recv().startswith("failed")
    with pytest.raises(WeightLoadError, match="no weight group 'g'"):
        receiver.load_group(names=["bias"], dtypes=["float32"], shapes=[[2]], group_name="g")


def test_leaving_the_group_frees_a_load_that_waits_for_a_sender(
    model: TinyTied, sender: Any
) -> None:
    receiver = WeightReceiver(model, CPU)
    _join(receiver, sender.recv()).join(60)
    threading.Timer(2, receiver.destroy_group, ["g"]).start()
    with pytest.raises(WeightLoadError, match="destroyed while loading"):
        receiver.load_group(names=["bias"], dtypes=["float32"], shapes=[[2]], group_name="g")
    assert model.bias.tolist() == [0.0, 0.0]
