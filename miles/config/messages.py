"""What there is to say about a command line that is valid."""

import logging
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One line for the log when a run starts."""

    level: int
    """Of Python's ``logging``."""
    text: str


def note(text: str) -> Message:
    """What was derived: nothing is wrong."""
    return Message(logging.INFO, text)


def warning(text: str) -> Message:
    """What was replaced, or works but was probably not meant."""
    return Message(logging.WARNING, text)
