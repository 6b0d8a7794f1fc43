"""One logger format, which names the process that speaks."""

import logging
import sys

_FORMAT = "%(asctime)s %(levelname).1s {role} %(message)s"


def setup(role: str, level: int = logging.INFO) -> None:
    """Log to standard error with ``role`` (such as ``trainer 0``) in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(role=f"[{role}]"), "%H:%M:%S"))
    root = logging.getLogger("miles")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


INFO = logging.INFO
WARNING = logging.WARNING
ERROR = logging.ERROR


def get(name: str) -> logging.Logger:
    """The logger of a module: ``get(__name__)``."""
    return logging.getLogger(name)
