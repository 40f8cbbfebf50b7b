"""Experiments to plan: a shipped recipe as it lies there, with changes to it."""

from __future__ import annotations

from opd_core.config import ExperimentConfig
from opd_core.planning import Cards
from opd_core.planning.cards import GB
from opd_core.recipe import find_recipe, load_recipe

ENVIRON = {"OPD_CACHE": "/cache"}


def recipe(name: str, *changes: str) -> ExperimentConfig:
    return load_recipe(find_recipe(name), changes, ENVIRON)


def cards_of(gb: float) -> Cards:
    """Every GPU has so much."""
    return Cards(otherwise=round(gb * GB))
