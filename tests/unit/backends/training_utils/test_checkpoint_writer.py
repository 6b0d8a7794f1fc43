from torch.distributed.checkpoint.api import CheckpointException

from miles.backends.training_utils.checkpoint_writer import causes, derived_seed


def test_seeds_of_ranks_and_steps_differ() -> None:
    seeds = {derived_seed(s, i, r) for s in range(3) for i in range(5) for r in range(4)}
    assert len(seeds) == 60
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_writer_that_was_cut_short_is_told_as_what_a_full_disk_does() -> None:
    cut = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    full = OSError(28, "No space left on device")
    told = causes(CheckpointException("save", {0: (cut, []), 1: (full, [])}))
    first, second = told.split("; ")
    assert first.startswith("rank 0: RuntimeError: PyTorch's writer was cut short, as by a full")
    assert "unexpected pos 704" in first
    assert second == "rank 1: OSError: [Errno 28] No space left on device"


def test_a_file_that_cannot_be_read_is_no_full_disk() -> None:
    text = "[enforce fail at inline_container.cc:230] . file not found: data.pkl"
    assert causes(CheckpointException("load", {0: (RuntimeError(text), [])})) == (
        f"rank 0: RuntimeError: {text}"
    )
