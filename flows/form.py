"""What the run forms share: how Prefect draws a request, and texts that may hold no secret.

The server checks a form against the request's JSON schema before it keeps anything, so what must
never be kept is refused there already; the request checks it once more for whoever goes past it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from prefect.runtime import flow_run
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from opd_core.config.values import OPEN_SECRET, without_password


@dataclass(frozen=True)
class Like:
    """A text in which ``pattern`` is found. Whoever refuses another, the server or the request,
    says what was expected in ``words`` and does not repeat the text, which may be a secret."""

    pattern: str
    words: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # A plain pattern's message is the pattern and the text. This one's: "'words' was expected".
        unlike = {"if": {"not": {"pattern": self.pattern}}, "then": {"const": self.words}}
        return {**handler(schema), **unlike}

    def _check(self, text: str) -> str:
        if not re.search(self.pattern, text):
            raise ValueError(f"expected {self.words}")
        return text


NO_SECRET = rf"^(?![\s\S]*(?:{OPEN_SECRET.pattern}))"
REFERENCES = "env:NAME or block:NAME in place of a key or password, which Prefect would show to all"

Written = Annotated[str, Like(NO_SECRET, REFERENCES)]
"""Text of a recipe, which Prefect keeps as it is."""
Override = Annotated[str, Like(NO_SECRET + r"\s*[^\s=]+\s*=", f"KEY.PATH=VALUE; and {REFERENCES}")]
"""One change to a recipe, ``KEY.PATH=VALUE``."""

MlflowUri = Annotated[str, AfterValidator(without_password), Like(NO_SECRET, REFERENCES)]
"""Where an MLflow run id is looked up."""
Margin = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        title="Margin",
        description="A smaller difference is none that matters; empty is 0.02 of shares such as "
        "accuracy, and none of other metrics",
    ),
]
R = TypeVar("R", bound=BaseModel)


def request_of_run(kind: type[R]) -> R:
    """What the present flow run was asked for; its name is made before the flow has it."""
    given = flow_run.parameters["request"]
    return kind.model_validate(given) if isinstance(given, dict) else cast(R, given)


def _as_drawn(schema: dict[str, Any]) -> None:
    """The fields in their order, which a database may lose, and what may be left out as one field
    in place of a choice between it and nothing; the server takes its null."""
    for position, field in enumerate(schema["properties"].values()):
        field["position"] = position
        if field.get("anyOf", ())[1:] == [{"type": "null"}]:
            field |= field.pop("anyOf")[0]
            del field["default"]


FORM = ConfigDict(
    extra="forbid", frozen=True, hide_input_in_errors=True, json_schema_extra=_as_drawn
)
"""The configuration of a request."""
