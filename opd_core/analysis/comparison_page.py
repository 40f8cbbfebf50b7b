"""A comparison as one self-contained page: the verdict first, then what it rests on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from opd_core.analysis.comparison_charts import NamedChart
from opd_core.analysis.comparison_text import title
from opd_core.analysis.comparison_words import (
    ARM_HEADINGS,
    arm_rows,
    difference_headings,
    difference_rows,
    metric_name,
    nothing_differs,
    place,
    reference_rows,
    run_headings,
    run_rows,
    sentence_case,
    shown_difference,
)
from opd_core.analysis.outcome import (
    BETTER,
    CANNOT_TELL,
    HIGHER,
    LOWER,
    NO_DIFFERENCE,
    WORSE,
    Comparison,
)
from opd_core.analysis.page import render
from opd_core.training.files import REPORT_FILE

BADGES = {
    BETTER: "good",
    WORSE: "bad",
    HIGHER: "note",
    LOWER: "note",
    NO_DIFFERENCE: "note",
    CANNOT_TELL: "warn",
}
TEMPLATE = "comparison.html"


def comparison_page(
    comparison: Comparison,
    charts: Sequence[NamedChart],
    *,
    directories: Mapping[str, Path],
    page_folder: Path,
) -> str:
    """The page's HTML. ``directories`` are those of the runs, by run id: a run that has a report
    there is linked, relative to ``page_folder``."""
    links = {
        run_id: quote(os.path.relpath(directory / REPORT_FILE, page_folder))
        for run_id, directory in directories.items()
        if (directory / REPORT_FILE).is_file()
    }
    rows = difference_rows(comparison)
    metric, margin = comparison.target.metric, comparison.target.margin
    return render(
        TEMPLATE,
        title=title(comparison),
        comparison=comparison,
        place=sentence_case(place(comparison)),
        badges=BADGES,
        headings=ARM_HEADINGS,
        arms=arm_rows(comparison) + reference_rows(comparison),
        charts={
            kind: [chart.figure for chart in charts if chart.kind == kind]
            for kind in ("differences", "target", "training")
        },
        runs=[(row, links.get(row[0])) for row in run_rows(comparison)],
        difference_headings=difference_headings(comparison)[1:],
        differences={
            kind: [cells for of, *cells in rows if of == kind]
            for kind in dict.fromkeys(row[0] for row in rows)
        },
        run_headings=run_headings(comparison),
        nothing_differs=nothing_differs(comparison),
        metric=sentence_case(metric_name(metric)),
        margin="" if margin is None else shown_difference(metric, margin).lstrip("+"),
    )
