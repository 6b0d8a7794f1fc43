"""How the conversion tools end: their errors as a user of a command line reads them."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from miles.backends.megatron_utils import package
from miles.config.errors import ConfigError, Problem
from miles.core.distributed import FailedElsewhereError
from miles.core.hf import CheckpointDirError
from miles.utils.arguments import refusal


@contextmanager
def told(program: str) -> Generator[None]:
    """Exit with code 2 and every problem of the arguments, or with code 1 and one line for what the
    machine could not do, such as writing to a full disk. Under torchrun the problems are told once
    on each machine."""
    try:
        yield
    except ConfigError as error:
        raise _refusal(error, program) from None
    except CheckpointDirError as error:
        # The only such directory of a conversion; the text says which it is.
        raise _refusal(ConfigError([Problem("--hf-checkpoint", "", str(error))]), program) from None
    except (OSError, FailedElsewhereError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print(f"{program}: interrupted; run it again for the whole", file=sys.stderr)
        raise SystemExit(130) from None


def _refusal(error: ConfigError, program: str) -> SystemExit:
    return refusal(error, program) if os.environ.get("LOCAL_RANK", "0") == "0" else SystemExit(2)


def require_megatron() -> None:
    """Raise ``ConfigError`` where Megatron cannot be used. Imports nothing of it."""
    missing = package.problem()
    if missing is not None:
        raise ConfigError([missing])
