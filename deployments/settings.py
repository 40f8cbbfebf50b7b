"""The reference of all settings, written from the configuration itself: ``opd settings``."""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from opd_core.config import ExperimentConfig

HEADER = """# Every setting of a recipe

Written by `opd settings`. Change a setting in a recipe (YAML) or with `--set KEY.PATH=VALUE`.
Unknown keys are errors. A relative path that exists beside the recipe means that file; `$NAME/…`
and `~/…` are expanded (`$OPD_CACHE` is where `opd prepare` puts things).
`STUDENT_CUDA_VISIBLE_DEVICES` and `TEACHER_CUDA_VISIBLE_DEVICES` are defaults of `student.devices`
and of the one `launch.devices`.
"""


def settings_reference() -> str:
    """A markdown page with one table per node of the tree."""
    sections: dict[type[BaseModel], str] = {}
    _collect(ExperimentConfig, "", sections)
    return HEADER + "".join(_section(model, path) for model, path in sections.items())


def _collect(model: type[BaseModel], path: str, found: dict[type[BaseModel], str]) -> None:
    if model in found:
        return
    found[model] = path
    for name, field in model.model_fields.items():
        for inner, is_list in _models(field.annotation):
            _collect(inner, f"{path}{name}{'.0' if is_list else ''}.", found)


def _models(annotation: Any, is_list: bool = False) -> list[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, is_list)]
    is_list = is_list or get_origin(annotation) in (tuple, list)
    return [found for arg in get_args(annotation) for found in _models(arg, is_list)]


def _section(model: type[BaseModel], path: str) -> str:
    lines = [
        f"\n## {f'`{path}`' if path else 'The experiment'}\n",
        f"\n{_plain(model.__doc__)}\n\n",
    ]
    lines += ["| key | type | default | meaning |\n", "| --- | --- | --- | --- |\n"]
    for name, field in model.model_fields.items():
        cells = [f"`{path}{name}`", _type(field.annotation), _default(field)]
        lines.append("| " + " | ".join([*cells, _plain(field.description)]) + " |\n")
    return "".join(lines)


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return " or ".join(f"`{arg}`" for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(arg) for arg in args)
    if origin in (tuple, list):
        return "list of " + _type(args[0])
    if origin is dict:
        return f"map of {_type(args[0])} to {_type(args[1])}"
    if hasattr(annotation, "__metadata__"):
        return _type(args[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "node"
    return "reference" if annotation is SecretStr else str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "`{}`"
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "see there"
    return f"`{json.dumps(field.default, ensure_ascii=False)}`"


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())
