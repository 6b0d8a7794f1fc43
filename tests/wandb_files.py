"""What an offline run of Weights & Biases has written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(file: Path) -> Iterator[Any]:
    """The records of an offline run: after seven bytes of header, LevelDB's log format. A chunk
    has a checksum (4 bytes), its length (2), its kind (1: whole, 4: last part) and the content."""
    from wandb.proto.wandb_internal_pb2 import (
        Record,  # pyright: ignore[reportAttributeAccessIssue]
    )

    content, position, parts = file.read_bytes(), 7, b""
    while position < len(content):
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        parts += content[position + 7 : position + 7 + length]
        if content[position + 6] in (1, 4):
            record: Any = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
        position += 7 + length


def only(kind: str, found: list[Any]) -> list[Any]:
    return [getattr(r, kind) for r in found if r.WhichOneof("record_type") == kind]


def history(found: list[Any]) -> list[dict[str, Any]]:
    """Metrics line by line, without W&B's own."""
    rows = [
        {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item}
        for row in only("history", found)
    ]
    return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
