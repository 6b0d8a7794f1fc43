from pathlib import Path

import pytest

from miles.backends.training_utils.hf_export import check_target
from miles.config.errors import ConfigError


def test_a_target_that_cannot_be_written_or_is_the_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "file").touch()
    check_target(str(tmp_path / "new"), str(source))
    with pytest.raises(ConfigError, match=r"--save = .*is a file"):
        check_target(str(tmp_path / "file"), str(source))
    with pytest.raises(ConfigError, match=r"--save = .*that is converted"):
        check_target(str(source / ".." / "source"), str(source))
