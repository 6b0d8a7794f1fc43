"""A flag that nothing reads is a promise that nobody keeps."""

import re
from pathlib import Path

from miles.config.flags import flag_specs
from miles.config.root import MilesConfig

ROOT = Path(__file__).parents[2]


def unread_fields() -> list[str]:
    """Config fields whose name no module outside ``config/`` takes as an attribute, nor
    ``derived.py``, whose functions others call."""
    modules = [
        ROOT / "miles/config/derived.py",
        *(
            path
            for path in [*(ROOT / "miles").rglob("*.py"), ROOT / "train.py"]
            if ROOT / "miles/config" not in path.parents
            and path != ROOT / "miles/utils/arguments.py"
        ),
    ]
    source = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    used = set(re.findall(r"\.(\w+)", source)) | set(re.findall(r'load_hook\(\s*"(\w+)"', source))
    return [spec.dest for spec in flag_specs(MilesConfig) if spec.dest not in used]


def test_every_flag_is_read_where_its_effect_is() -> None:
    assert unread_fields() == []
