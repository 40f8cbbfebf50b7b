"""Where a run can be looked at: ``links.json`` of its directory."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from opd_core.training.files import LINKS_FILE
from opd_core.whole_file import write_whole


@dataclass(frozen=True, slots=True)
class Links:
    """Pages of one run, without user or password in them; empty where there is none.

    ``prefect`` is its flow run, ``mlflow`` its run and ``experiment`` that of MLflow, ``report``
    the run's report as MLflow shows it. ``mlflow_run_id`` is known also where no server shows it.
    """

    prefect: str = ""
    mlflow: str = ""
    experiment: str = ""
    report: str = ""
    mlflow_run_id: str = ""

    def write(self, run_dir: Path) -> None:
        """Write ``links.json``. Raises OSError."""
        write_whole(run_dir / LINKS_FILE, _LINKS.dump_json(self, indent=2) + b"\n")

    @property
    def pages(self) -> dict[str, str]:
        """The pages that there are, by what a person calls them."""
        named = {
            "Prefect run": self.prefect,
            "MLflow run": self.mlflow,
            "MLflow experiment": self.experiment,
            "report in MLflow": self.report,
        }
        return {name: url for name, url in named.items() if url}


_LINKS = TypeAdapter(Links)


def read_links(run_dir: Path) -> Links:
    """What :meth:`Links.write` wrote; without pages where nobody has, or where it cannot be
    read."""
    try:
        return _LINKS.validate_json((run_dir / LINKS_FILE).read_bytes())
    except (OSError, ValueError):
        return Links()
