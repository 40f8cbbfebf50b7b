"""Which stage follows which. A reader starts in ``distill``."""

from opd_core.quiet import apply_defaults

# Prefect reads its settings when it is first imported, and a worker imports this package first.
apply_defaults()
