from pathlib import Path

from miles.backends.training_utils.checkpoint_writer import CheckpointWriter
from miles.config.checkpoint import CheckpointConfig


def test_the_message_of_a_failed_save_survives_a_directory_that_vanished(tmp_path: Path) -> None:
    writer = object.__new__(CheckpointWriter)
    writer._config = CheckpointConfig(save=str(tmp_path / "gone"))
    assert "No such file" in writer._space()
    writer._config = CheckpointConfig(save=str(tmp_path))
    assert "MiB are free" in writer._space()
