"""The shell of a page: one self-contained file that asks nothing of the network."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, *, title: str, **context: Any) -> str:
    """A page from ``templates/<template>``, which extends ``base.html``.

    Everything in ``context`` is escaped, unless it is :class:`~markupsafe.Markup`. A name that the
    template uses and nobody gave raises :class:`jinja2.UndefinedError`.
    """
    return _environment().get_template(template).render(title=title, **context)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from opd_core.analysis.charts import shown_number

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = shown_number
    return environment
