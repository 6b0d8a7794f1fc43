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
    return frozenset(_listed_configs())


def lacks_causal_class(model_type: str) -> bool:
    """Whether ``AutoModelForCausalLM`` has no class for models of that type.

    False for what is not listed, or where the tables lie elsewhere: transformers has the last word.
    """
    configs = _listed_configs()
    table = re.search(
        r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\n(.*?)^\)",
        _text_of("modeling_auto.py"),
        re.DOTALL | re.MULTILINE,
    )
    if table is None or model_type not in configs:
        return False
    causal = set(re.findall(r'\("([\w.-]+)", "\w+"\)', table[1]))
    # Its key is the class of the config, which several model types may have.
    return not any(configs[name] == configs[model_type] for name in causal & configs.keys())


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


def _listed_configs() -> dict[str, str]:
    """Model type -> name of its config's class."""
    return dict(re.findall(r'\("([\w.-]+)", "(\w+Config)"\)', _text_of("auto_mappings.py")))


def _text_of(name: str) -> str:
    """A module of the auto classes; empty where there is none."""
    files = [folder / "models" / "auto" / name for folder in _folders()]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


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
