"""What a person asks for: the fields of Prefect's run form, of which changes to a recipe are made.

Prefect keeps a flow run's parameters as plain text, so nothing here may be a secret: a key is named
by where it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from opd_core.recipe import find_recipe

Recipe = Literal[
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
DEVICES = r"^$|^[\w:-]+( *, *[\w:-]+)*$"
REFERENCE = r"^$|^(env:[A-Za-z_]\w*|block:[a-z0-9][a-z0-9-]*)$"


class DistillRequest(BaseModel):
    """One experiment: a recipe and changes to it. An empty field leaves what the recipe says."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    recipe: Recipe = Field("tiny", description="A shipped recipe")
    recipe_file: str = Field(
        "", description="Another recipe in its place: a YAML file on the machine of the worker"
    )
    steps: int | None = Field(None, ge=1, description="Train steps, one batch each")
    seed: int | None = Field(None, ge=0, description="Of data order, sampling and evaluation")
    learning_rate: float | None = Field(None, gt=0, description="Of AdamW, after the warm-up")
    opd_adv_weight: float | None = Field(None, ge=0, description="Weight of the teacher's term")
    task_adv_weight: float | None = Field(
        None, ge=0, description="Weight of the task reward's advantage; above 0 it needs a judge"
    )
    student_devices: str = Field(
        "", pattern=DEVICES, description="GPU indices or UUIDs, with commas: 0,1,2,3; or cpu"
    )
    teacher_devices: str = Field(
        "", pattern=DEVICES, description="The same, of the server of the recipe's only teacher"
    )
    teacher_endpoint: str = Field(
        "",
        description="http://host:port of a server that runs already: the recipe's only teacher is "
        "then not launched",
    )
    teacher_api_key: str = Field(
        "",
        pattern=REFERENCE,
        description="Where that server's key is kept, never the key: env:NAME, an environment "
        "variable of the worker, or block:NAME, a Prefect Secret block",
    )
    tracking: Tracking = Field("as the recipe says", description="Where the metrics are shown")
    experiment: str = Field("", description="MLflow's experiment")
    overrides: list[str] = Field(
        default_factory=list,
        description="Any other setting, each KEY.PATH=VALUE, the value in YAML",
    )
    settings: str = Field("", description="The same as a piece of a recipe, in YAML")
    resume: str = Field(
        "",
        description="Id or directory of a run to continue where it stopped: checks and train steps "
        "that it has done are not done again. Its own recipe is taken",
    )
    fork: str = Field(
        "", description="Id or directory of a run from whose newest checkpoint a new run begins"
    )

    @field_validator("settings")
    @classmethod
    def _a_piece_of_a_recipe(cls, value: str) -> str:
        try:
            piece = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"not valid YAML: {error}") from None
        if not isinstance(piece, dict | None):
            raise ValueError(f"expected keys as in a recipe, like 'training:', got {piece!r}")
        return value

    @model_validator(mode="after")
    def _goes_on_or_begins_anew(self) -> Self:
        if self.resume and self.fork:
            raise ValueError("expected resume or fork, got both: a run goes on, or begins anew")
        return self

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        """Two places that say the same may differ, and one of them would lose in silence."""
        keys = [change.partition("=")[0].strip() for change in self.changes]
        for number, key in enumerate(keys):
            for other in keys[:number]:
                if key == other or key.startswith(f"{other}.") or other.startswith(f"{key}."):
                    raise ValueError(f"{key} is set twice, as {other} and as {key}: keep one")
        return self

    @property
    def path(self) -> str:
        """The recipe's file. Raises :class:`~opd_core.errors.ConfigError` if it is not there."""
        return str(find_recipe(self.recipe_file or self.recipe))

    @property
    def changes(self) -> list[str]:
        """What the recipe is changed by, each ``KEY.PATH=VALUE``."""
        piece = yaml.safe_load(self.settings) or {}
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
