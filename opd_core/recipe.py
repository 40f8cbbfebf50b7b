"""Recipes: YAML files that hold an experiment, and the changes made to it on the command line.

A mistake names the file, the key, and what to write instead. Environment variables are defaults
of recipe fields: ``STUDENT_CUDA_VISIBLE_DEVICES``, ``TEACHER_CUDA_VISIBLE_DEVICES``, and of
fields that are left out ``OPD_RUNS`` (``run.root``) and ``MLFLOW_TRACKING_URI``
(``tracking.mlflow_uri``).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from opd_core.config import ExperimentConfig
from opd_core.errors import ConfigError

DEFAULT_CACHE = "~/.cache/opd-lab"
RECIPES = Path(__file__).parents[1] / "deployments" / "recipes"
"""Where the shipped recipes lie."""


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that is written twice is an error; none wins in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # As it is written: before a merge key (<<) brings in the keys of another mapping.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping as a key is refused when it is constructed
            if (key.tag, key.value) in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"line {line}: the key {key.value!r} is written twice; keep one")
            seen.add((key.tag, key.value))
        return node


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where prepared models and environments are kept: ``$OPD_CACHE``, or a folder in the home."""
    return Path(environ.get("OPD_CACHE") or DEFAULT_CACHE).expanduser()


def run_root(environ: Mapping[str, str] = os.environ) -> str:
    """Where runs lie that are named by their id alone: ``$OPD_RUNS``, or ``runs``."""
    return environ.get("OPD_RUNS") or "runs"


def find_recipe(name: str) -> Path:
    """A file as it is named, or a shipped recipe by its name. Raises :class:`ConfigError`."""
    file = Path(name)
    if file.suffix in (".yaml", ".yml") or file.exists():
        return file
    shipped = RECIPES / f"{name}.yaml"
    if not shipped.is_file():
        there = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
        raise ConfigError(f"no recipe {name!r}: expected a YAML file, or one of: {there}")
    return shipped


def load_recipe(
    path: str | Path, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> ExperimentConfig:
    """Read a recipe, apply ``key.path=value`` overrides, check everything.

    Raises :class:`ConfigError`; its message is meant for the person who wrote the recipe.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{file}: the recipe cannot be read ({reason})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason}); is it a recipe?") from None
    data = load_yaml(text, str(file))
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected keys like 'student:' and 'data:', got {data!r}")
    data = _unshared(data)
    for override in overrides:
        _apply_override(data, override)
    variables = {**environ, "OPD_CACHE": str(cache_dir(environ))}
    data = _expand_variables(data, variables, str(file), ())
    _default_devices(data, environ, file)
    _default_places(data, environ)
    return parse_config(data, source=str(file), base_dir=file.parent)


def parse_config(data: Any, *, source: str, base_dir: Path | None = None) -> ExperimentConfig:
    """Validate plain data; errors are told for ``source`` with keys and suggestions.

    Plain data has been written somewhere, so a plain API key in it is refused.
    """
    context = {"base_dir": base_dir, "written": True}
    try:
        return ExperimentConfig.model_validate(data, context=context)
    except ValidationError as error:
        items = [dict(item) for item in error.errors() if not _echo(item, error)]
        lines = [_explain(item) for item in items]
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def load_yaml(text: str, where: str) -> Any:
    """YAML as it stands, of ``where``. Raises :class:`ConfigError`, for a key written twice too."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def _unshared(value: Any) -> Any:
    """A copy in which a YAML alias is a copy too, so that an override changes one place only."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def override_key(override: str) -> str:
    """Which setting ``key.path=value`` changes."""
    return override.partition("=")[0].strip()


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override}: expected KEY.PATH=VALUE, e.g. training.steps=20")
    value = load_yaml(raw, f"--set {override}")
    node: Any = data
    *parents, last = key.strip().split(".")
    for depth, part in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(node, dict):
            if not isinstance(node.get(part), dict | list):
                node[part] = {}
            node = node[part]
        else:
            node = node[_list_index(node, part, where, override)]
    if isinstance(node, dict):
        node[last] = value
    else:
        node[_list_index(node, last, key.strip(), override)] = value


def _list_index(node: Any, part: str, where: str, override: str) -> int:
    if not isinstance(node, list):
        raise ConfigError(f"--set {override}: {where.rpartition('.')[0]} holds no keys")
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(f"--set {override}: {where}: expected an index below {len(node)}")
    return int(part)


def _expand_variables(
    value: Any, environ: Mapping[str, str], file: str, keys: tuple[str, ...]
) -> Any:
    """``$NAME``, ``$NAME:-DEFAULT`` (where NAME is not set; an empty one stays empty) and ``~`` at
    the start of a string, so that recipes carry no machine's paths."""
    if isinstance(value, dict):
        return {
            key: _expand_variables(item, environ, file, (*keys, str(key)))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            _expand_variables(item, environ, file, (*keys, str(number)))
            for number, item in enumerate(value)
        ]
    if isinstance(value, str) and value.startswith("$"):
        variable, has_default, default = value[1:].partition(":-")
        if has_default:
            return environ.get(variable, default)
        name, slash, rest = value[1:].partition("/")
        if name not in environ:
            raise ConfigError(
                f"{file}: {'.'.join(keys)}: {value!r}: the environment variable {name} is not set"
            )
        return environ[name].rstrip("/") + slash + rest if slash else environ[name]
    if isinstance(value, str) and value.startswith("~/"):
        return str(Path(value).expanduser())
    return value


def _default_devices(data: dict[str, Any], environ: Mapping[str, str], file: Path) -> None:
    """Fill in the devices that the two environment variables name; refuse what contradicts them."""
    for node in (data.get("student"), *_launched(data.get("opd"))):
        if isinstance(node, dict) and isinstance(node.get("devices"), str):
            node["devices"] = _device_list(node["devices"])
    student = environ.get("STUDENT_CUDA_VISIBLE_DEVICES")
    if student is not None and isinstance(data.get("student"), dict):
        _settle(data["student"], _device_list(student), file, "STUDENT", "student.devices")
    teacher = environ.get("TEACHER_CUDA_VISIBLE_DEVICES")
    launched = _launched(data.get("opd"))
    if teacher is None or not launched:
        return
    if len(launched) == 1:
        _settle(launched[0], _device_list(teacher), file, "TEACHER", "launch.devices")
        return
    # With several servers the variable cannot say which of its devices are whose.
    named = [device for launch in launched for device in _as_text(launch.get("devices")) or ()]
    if sorted(named) != sorted(_device_list(teacher)):
        raise ConfigError(
            f"{file}: TEACHER_CUDA_VISIBLE_DEVICES is {_device_list(teacher)} and the recipe "
            f"launches {len(launched)} servers: write launch.devices at each, and unset it"
        )


def _default_places(data: dict[str, Any], environ: Mapping[str, str]) -> None:
    """A resolved recipe names its run root and its MLflow, even as null, and is left as it is."""
    places = {"run": ("root", "OPD_RUNS"), "tracking": ("mlflow_uri", "MLFLOW_TRACKING_URI")}
    for node, (key, variable) in places.items():
        if environ.get(variable) and isinstance(data.setdefault(node, {}), dict):
            data[node].setdefault(key, environ[variable])


def _settle(node: dict[str, Any], devices: list[str], file: Path, variable: str, key: str) -> None:
    if _as_text(node.setdefault("devices", devices)) != devices:
        raise ConfigError(
            f"{file}: {key} is {node['devices']} in the recipe and {devices} in "
            f"{variable}_CUDA_VISIBLE_DEVICES: remove one of them"
        )


def _device_list(variable: str) -> list[str]:
    return [part.strip() for part in variable.split(",") if part.strip()] or ["cpu"]


def _as_text(devices: Any) -> list[str] | None:
    return [str(device) for device in devices] if isinstance(devices, list) else None


def _launched(opd: Any) -> list[dict[str, Any]]:
    """Every ``launch`` in the raw recipe; what has the wrong shape is refused later."""
    teachers = opd.get("teachers") if isinstance(opd, dict) else None
    places: list[Any] = []
    for teacher in teachers if isinstance(teachers, list) else ():
        replicas = teacher.get("replicas") if isinstance(teacher, dict) else None
        places += replicas if isinstance(replicas, list) and replicas else [teacher]
    launches = [place.get("launch") for place in places if isinstance(place, dict)]
    return [launch for launch in launches if isinstance(launch, dict)]


def _echo(item: Any, error: ValidationError) -> bool:
    """A list is called too short when its items were refused: the items' own errors say it."""
    loc = item["loc"]
    return item["type"] == "too_short" and any(
        other["loc"][: len(loc)] == loc and len(other["loc"]) > len(loc) for other in error.errors()
    )


def _explain(item: dict[str, Any]) -> str:
    loc, kind, message = item["loc"], item["type"], str(item["msg"])
    key = ".".join(str(part) for part in loc) or "the recipe"
    if kind == "extra_forbidden":
        known = _known_keys(loc[:-1])
        close = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{key}: unknown key{hint} (known here: {', '.join(known)})"
    if kind == "missing":
        return f"{key}: required, but not there; add it"
    if kind == "value_error":
        return f"{key}: {message.removeprefix('Value error, ')}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {_shown(item.get('input'), loc)}"


def _shown(value: Any, loc: tuple[Any, ...]) -> str:
    """What came; a mapping or a list by its type only, and a key not at all."""
    hidden = "api_key" in loc or isinstance(value, dict | list)
    return f"a {type(value).__name__}" if hidden else repr(value)


def _known_keys(loc: tuple[Any, ...]) -> list[str]:
    node: Any = ExperimentConfig
    for part in loc:
        if isinstance(part, int):
            continue
        field = node.model_fields.get(part)
        node = _model_in(field.annotation) if field else None
        if node is None:
            return []
    return sorted(node.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
