"""Which stage follows which. A reader starts in ``distill``."""

from opd_core.quiet import apply_defaults

# For doors other than the command line (a worker, `serve`): what the run starts inherits these.
apply_defaults()
