"""The trace of a step: what each rank of a pipeline did when, beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallelism.mesh import Mesh
from parallelism.pipeline.driver import Pipeline
from parallelism.pipeline.schedule.price import Span, Timeline, price
from parallelism.pipeline.trace import SpanRecorder, gather, measured, save_picture, save_trace
from training.config import picture_of


@contextmanager
def traced(pipeline: Pipeline, mesh: Mesh, path: str, keep: Callable[[Timeline, list[Span]], None]) -> Iterator[None]:
    """Give `keep`, on rank 0, what the ranks were predicted to do in this context, and what they have done.

    Write it to `path`, too, and beside it a picture, unless that is empty.  Collective.
    """
    recorder = SpanRecorder(mesh.pp.rank)
    with pipeline.listeners.adding(recorder):
        yield
    spans = gather(mesh.pp, recorder.spans)
    if mesh.comm.rank == 0:
        planned = price(pipeline.schedule, measured(spans))
        keep(planned, spans)
        if path:
            save_trace(path, spans)
            save_picture(picture_of(path), planned, spans)
