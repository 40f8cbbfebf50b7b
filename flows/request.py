"""What a person asks for: the fields of Prefect's run form, of which changes to a recipe are made.

Prefect keeps a flow run's parameters as plain text, so nothing here may be a secret: a key is named
by where it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from flows.form import FORM, Like, Override, Written
from opd_core.config.values import DEVICE
from opd_core.errors import ConfigError
from opd_core.recipe import find_recipe, load_yaml, override_key
from opd_core.training.files import CONFIG_FILE
from opd_core.training.lineage import find_run

Recipe = Literal[
    "dapo_math_qwen3_8b",
    "dapo_math_qwen3_8b_80gb",
    "dapo_math_qwen3_8b_lmdeploy",
    "dapo_math_qwen3_8b_mixed",
    "dapo_math_qwen3_8b_two_nodes",
    "smollm2_heal",
    "tiny",
    "tiny_calculator",
    "tiny_grpo",
    "tiny_mixed",
    "tiny_multi_teacher",
    "tiny_sglang",
]
"""The shipped recipes, as `opd recipes` lists them."""
Tracking = Literal["as the recipe says", "MLflow and TensorBoard", "MLflow", "TensorBoard", "none"]
Devices = Annotated[
    str,
    Like(
        rf"^$|^({DEVICE.pattern})( *, *({DEVICE.pattern}))*$",
        "GPU indices or UUIDs with commas between them, or cpu",
    ),
]
Reference = Annotated[
    str,
    Like(
        r"^$|^(env:[A-Za-z_]\w*|block:[a-z0-9][a-z0-9-]*)$",
        "where the key is kept, env:NAME or block:NAME, never the key",
    ),
]
Endpoint = Annotated[
    str,
    Like(r"^$|^https?://[^\s@?#]+$", "http://host:port, with no key or password in it"),
]
RecipeFile = Annotated[str, Like(r"^$|\.(ya?ml|json)$", "the path of a .yaml or .json file")]


class DistillRequest(BaseModel):
    """One experiment: a recipe and what is to be different. A field left empty changes nothing."""

    model_config = FORM

    recipe: Recipe = Field(
        "tiny",
        title="Recipe",
        description="A shipped experiment. tiny: two small models on two CPU cores, a minute or "
        "two; dapo_math_…: Qwen3-8B learns from Qwen3-32B on GPUs",
    )
    recipe_file: RecipeFile = Field(
        "",
        title="Recipe file",
        description="Another recipe in its place: the path of a YAML file, or of a run's "
        "config.json, on the worker's machine",
    )
    steps: int | None = Field(
        None, ge=1, title="Train steps", description="Whole number; each trains one batch"
    )
    seed: int | None = Field(
        None,
        ge=0,
        title="Seed",
        description="Whole number; of data order, sampling and evaluation",
    )
    learning_rate: float | None = Field(
        None, gt=0, title="Learning rate", description="Of AdamW, after the warm-up; 5e-4 in tiny"
    )
    opd_adv_weight: float | None = Field(
        None,
        ge=0,
        title="Weight of the teacher",
        description="opd_adv_weight: factor of the teacher's advantage, which is in nats per "
        "token; 0 learns from the task reward alone",
    )
    task_adv_weight: float | None = Field(
        None,
        ge=0,
        title="Weight of the task reward",
        description="task_adv_weight: factor of the task reward's advantage; above 0 the recipe "
        "needs a judge, and groups of two or more",
    )
    student_devices: Devices = Field(
        "",
        title="Devices of the student",
        description="GPU indices or UUIDs, with commas (0,1,2,3), or cpu",
    )
    teacher_devices: Devices = Field(
        "",
        title="Devices of the teacher",
        description="As the student's, for the server of the recipe's only teacher",
    )
    teacher_endpoint: Endpoint = Field(
        "",
        title="Teacher that already runs",
        description="http://host:port of its server, which is then used in place of one that is "
        "launched for the recipe's only teacher, and is left running",
    )
    teacher_api_key: Reference = Field(
        "",
        title="Where that server's key is kept",
        description="Never the key: env:NAME, an environment variable of the worker, or "
        "block:NAME, a Prefect Secret block",
    )
    tracking: Tracking = Field(
        "as the recipe says",
        title="Tracking",
        description="Where the metrics are shown; the run directory has them always",
    )
    experiment: str = Field("", title="MLflow experiment", description="Its name")
    overrides: list[Override] = Field(
        default_factory=list,
        title="Other settings",
        description="Each KEY.PATH=VALUE, the value in YAML: data.max_prompt_tokens=512. "
        "docs/configuration.md has them all",
    )
    settings: Written = Field(
        "",
        title="Other settings as YAML",
        description="The same as a piece of a recipe, over several lines",
    )
    resume: str = Field(
        "",
        title="Resume a run",
        description="Id or directory of a run that goes on where it stopped: checks and train "
        "steps that it has done are not done again. Its own recipe is taken",
    )
    fork: str = Field(
        "",
        title="Fork a run",
        description="Id or directory of a run from whose newest checkpoint a new one begins",
    )

    @field_validator("settings")
    @classmethod
    def _a_piece_of_a_recipe(cls, value: str) -> str:
        try:
            piece = load_yaml(value, "this piece")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not isinstance(piece, dict | None):
            raise ValueError(
                f"expected keys as in a recipe, like 'training:', got a {type(piece).__name__}"
            )
        return value

    @model_validator(mode="after")
    def _goes_on_or_begins_anew(self) -> Self:
        if self.resume and self.fork:
            raise ValueError("expected resume or fork, got both: a run goes on, or begins anew")
        return self

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        """Two places that say the same may differ, and one of them would lose in silence. Of the
        rows of ``overrides`` the last one counts, as on a command line."""
        keys = [*map(override_key, self._all_changes())]
        for number, key in enumerate(keys):
            for other in keys[: min(number, len(keys) - len(self.overrides))]:
                if key == other or key.startswith(f"{other}.") or other.startswith(f"{key}."):
                    raise ValueError(f"{key} is set twice, as {other} and as {key}: keep one")
        return self

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The request, from another program. Raises :class:`~opd_core.errors.ConfigError`."""
        try:
            return cls(**fields)
        except ValidationError as error:
            told = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
            raise ConfigError(f"the experiment cannot be asked for: {told}") from None

    @property
    def path(self) -> str:
        """The recipe's file. Raises :class:`~opd_core.errors.ConfigError` if it is not there."""
        return str(find_recipe(self.recipe_file or self.recipe))

    @property
    def changes(self) -> list[str]:
        """What the recipe is changed by, each ``KEY.PATH=VALUE``.

        Raises :class:`~opd_core.errors.ConfigError` if fields of the only teacher are filled in and
        the recipe has several.
        """
        self._expect_one_teacher()
        return self._all_changes()

    def _expect_one_teacher(self) -> None:
        fields = ("teacher_devices", "teacher_endpoint", "teacher_api_key")
        if not (given := [field for field in fields if getattr(self, field)]):
            return
        source = Path(self.path)
        if earlier := self.resume or self.fork:
            source = find_run(earlier, self.path, self._all_changes()) / CONFIG_FILE
        servers = _teacher_servers(source)
        if servers is not None and len(servers) != 1:
            found = ", ".join(f"{key} ({name})" for key, name in servers.items()) or "none"
            raise ConfigError(
                f"{', '.join(given)}: meant for a recipe with one teacher on one server, and "
                f"{source} has {found}. Leave the field empty; whose it is can be written in Other "
                "settings, as opd.teachers.0.launch.devices=[…], or opd.teachers.0.endpoint=… and "
                "opd.teachers.0.launch=null, or opd.teachers.0.api_key=env:NAME"
            )

    def _all_changes(self) -> list[str]:
        piece = load_yaml(self.settings, "settings") or {}
        return [*self._of_fields(), *_flat(piece), *self.overrides]

    def _of_fields(self) -> Iterator[str]:
        given: dict[str, Any] = {
            "training.steps": self.steps,
            "seed": self.seed,
            "training.learning_rate": self.learning_rate,
            "opd.opd_adv_weight": self.opd_adv_weight,
            "opd.task_adv_weight": self.task_adv_weight,
            "student.devices": _listed(self.student_devices),
            "opd.teachers.0.launch.devices": _listed(self.teacher_devices),
            "opd.teachers.0.api_key": self.teacher_api_key or None,
            "tracking.experiment": self.experiment or None,
        }
        for key, value in given.items():
            if value is not None:
                yield f"{key}={json.dumps(value)}"
        if self.teacher_endpoint:
            yield f"opd.teachers.0.endpoint={json.dumps(self.teacher_endpoint)}"
            yield "opd.teachers.0.launch=null"
        if self.tracking != "as the recipe says":
            yield f"tracking.mlflow={json.dumps('MLflow' in self.tracking)}"
            yield f"tracking.tensorboard={json.dumps('TensorBoard' in self.tracking)}"


def _listed(devices: str) -> list[str] | None:
    return [part.strip() for part in devices.split(",")] if devices else None


def _flat(piece: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The leaves of a piece of a recipe; lists are replaced as a whole."""
    for key, value in piece.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value, default=str)}"


def _teacher_servers(source: Path) -> dict[str, str] | None:
    """The key of each server that scores, and its teacher's name. None for a recipe that cannot be
    read: that is told when it is loaded."""
    try:
        opd = yaml.safe_load(source.read_text(encoding="utf-8")).get("opd") or {}
        return {
            f"opd.teachers.{number}{place}": str(teacher["name"])
            for number, teacher in enumerate(opd.get("teachers") or ())
            for place in _replicas(teacher)
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return None


def _replicas(teacher: dict[str, Any]) -> list[str]:
    return [f".replicas.{number}" for number in range(len(teacher.get("replicas") or ()))] or [""]
