"""The scenes of the page: each is a module that computes data, and the script of the same name that shows them."""

from collections.abc import Sequence
from importlib.util import find_spec

from collectives.algorithms import Algorithm
from teaching.page.assemble import Scene
from teaching.page.scenes import collectives, pipelines


def has_torch() -> bool:
    return find_spec("torch") is not None


def scenes(own: Sequence[Algorithm] = ()) -> list[Scene]:
    """Return all scenes in their order, without those of torch code if torch is not installed.

    The collectives' scene also shows schedules from outside the registry.
    """
    every = [collectives.scene(own), pipelines.scene()]
    if has_torch():
        from teaching.page.scenes import attention, zero

        every += [attention.scene(), zero.scene()]
    return every
