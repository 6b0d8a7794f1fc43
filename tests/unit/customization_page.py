"""The examples of docs/customization.md as the module that the page says they are."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "customization.md"
MODULE = "my_hooks"


def write_examples(folder: Path) -> None:
    """Into ``my_hooks.py``."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (folder / f"{MODULE}.py").write_text("\n\n".join(blocks))
