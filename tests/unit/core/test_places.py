from pathlib import Path

from miles.core.places import reason_against


def test_a_directory_that_is_there_or_can_be_made_is_fine(tmp_path: Path) -> None:
    assert reason_against(str(tmp_path)) is None
    assert reason_against(str(tmp_path / "a" / "b")) is None
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert reason_against(str(file)) == "is a file; give a directory"
    below = reason_against(str(file / "run"))
    assert below is not None
    assert f"lies in {file}, which is a file" in below
