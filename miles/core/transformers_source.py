"""What transformers knows of models, read from its source as text: importing it takes seconds, and
torch's too, which a command line is not to wait for."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

_JSON_TYPES = {"int", "float", "bool", "str", "None", "list"}


def listed_model_types() -> frozenset[str]:
    """Most names of transformers' table of configs.

    Empty where the table lies elsewhere; what is not listed is left to transformers itself.
    """
    tables = [folder / "models" / "auto" / "auto_mappings.py" for folder in _folders()]
    texts = [table.read_text(encoding="utf-8") for table in tables if table.is_file()]
    return frozenset(re.findall(r'\("([\w.-]+)", "\w+Config"\)', "\n".join(texts)))


def doubtful_keys(values: dict[str, Any]) -> list[str]:
    """Keys of a ``config.json`` whose value is not of a type that the class of its ``model_type``
    declares. transformers has the last word on them: it may take other types too."""
    model_type = values.get("model_type")
    declared = _declared_types(model_type) if isinstance(model_type, str) else {}
    own = [key for key, types in declared.items() if key in values and _differs(values[key], types)]
    nested = [part for part in values.values() if isinstance(part, dict)]
    return [*own, *(key for part in nested for key in doubtful_keys(part))]


def _differs(value: Any, types: frozenset[str]) -> bool:
    name = "None" if value is None else type(value).__name__
    return name not in types and not (name == "int" and "float" in types)


def _folders() -> list[Path]:
    spec = importlib.util.find_spec("transformers")
    return [Path(f) for f in (spec.submodule_search_locations if spec is not None else None) or []]


def _declared_types(model_type: str) -> dict[str, frozenset[str]]:
    """Field -> names of its types; without the fields that have others than those of JSON."""
    base = re.sub(r"_text$", "", model_type.replace("-", "_"))
    if not base.isidentifier():
        return {}
    files = [f / "models" / base / f"configuration_{base}.py" for f in _folders()]
    classes = [
        node
        for file in files
        if file.is_file()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and _model_type_of(node) == model_type
    ]
    found = {
        field.target.id: _type_names(field.annotation)
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    return {name: types for name, types in found.items() if types <= _JSON_TYPES}


def _model_type_of(node: ast.ClassDef) -> object:
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            target = line.targets[0]
            if isinstance(target, ast.Name) and target.id == "model_type":
                return line.value.value
    return None


def _type_names(annotation: ast.expr) -> frozenset[str]:
    if isinstance(annotation, ast.BinOp):
        return _type_names(annotation.left) | _type_names(annotation.right)
    if isinstance(annotation, ast.Subscript):
        return _type_names(annotation.value)
    return frozenset([ast.unparse(annotation)])
