"""The scenes of the page: each is a module that computes data, and the script of the same name that shows them."""

from importlib.util import find_spec

from teaching.page.assemble import Scene
from teaching.page.scenes import collectives, pipelines


def has_torch() -> bool:
    return find_spec("torch") is not None


def scenes() -> list[Scene]:
    """Return all scenes in their order, without those of torch code if torch is not installed."""
    every = [collectives.scene(), pipelines.scene()]
    if has_torch():
        from teaching.page.scenes import attention, zero

        every += [attention.scene(), zero.scene()]
    return every
