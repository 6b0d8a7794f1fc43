"""Named spans of wall-clock time."""

import time
from collections.abc import Generator
from contextlib import contextmanager


class Timer:
    """Adds up seconds by name; ``take`` returns them and starts anew."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds
