"""The command line of a server process that has an owner."""

from miles.backends.sglang_utils.server import parse_args


def test_what_is_not_ours_is_sglangs() -> None:
    ours, theirs = parse_args(
        ["--ready-file", "r", "--parent-pid", "7", "--tp-size", "2", "--sleep-on-idle"]
    )
    assert (str(ours.ready_file), ours.parent_pid, ours.host) == ("r", 7, "127.0.0.1")
    assert theirs == ["--tp-size", "2", "--sleep-on-idle"]
