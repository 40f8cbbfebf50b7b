"""What a run would do, told without a GPU and without starting anything.

``shapes``   the size of a model: from its ``config.json``, or of a known public one
``cards``    how much memory a device has
``items``    lines of an estimate, each with its arithmetic
``training``, ``serving``  what each side of a run needs on its devices
``memory``   all of it by device, with the verdict
``tokens``   tokens of a train step, and what they mean for the teachers
``files``    what is written, and how much room it takes
``plan``     the whole: commands from the builders that a run uses, devices, ports, order

The estimates are arithmetic: the sources stand at the formulas. Imports neither torch nor
transformers.
"""

from __future__ import annotations

from opd_core.planning.cards import Cards, read_cards
from opd_core.planning.memory import Device, estimate, smallest_card
from opd_core.planning.plan import Plan, Process, make_plan

__all__ = [
    "make_plan",
    "Plan",
    "Process",
    "estimate",
    "Device",
    "smallest_card",
    "Cards",
    "read_cards",
]
