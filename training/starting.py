"""The first line of a job, ahead of all that takes long to import."""

from collectives.job import environment


def tell_starting() -> None:
    """Say on rank 0 how many ranks are starting, where there are several."""
    if environment.launched_size() > 1 and environment.launched_rank() == 0:
        print(f"{environment.launched_size()} ranks are starting", flush=True)
