"""Scenes for `python -m collectives.page`: pipelines, ring attention, ZeRO."""

from __future__ import annotations

from collectives.page.assemble import Scene
from parallelism.page import attention, pipelines, zero


def scenes() -> list[Scene]:
    return [pipelines.scene(), attention.scene(), zero.scene()]
