"""Trace of a step: the measured timeline of each pipeline rank, beside the predicted one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallelism.mesh import Mesh
from parallelism.pipeline.driver import Pipeline
from parallelism.pipeline.schedule.price import Span, Timeline, price
from parallelism.pipeline.trace import SpanRecorder, gather, measured, save_picture, save_trace
from training.settings.derived import picture_of


@contextmanager
def traced(pipeline: Pipeline, mesh: Mesh, path: str, keep: Callable[[Timeline, list[Span]], None]) -> Iterator[None]:
    """Pass the predicted timeline and the measured spans of this context to `keep`, on rank 0.

    Also write the trace to `path`, and a picture beside it, unless that is empty.  Collective.
    """
    recorder = SpanRecorder(mesh.pp.rank)
    with pipeline.notifying(recorder):
        yield
    spans = gather(mesh.pp, recorder.spans)
    if mesh.comm.rank == 0:
        planned = price(pipeline.schedule, measured(spans))
        keep(planned, spans)
        if path:
            save_trace(path, spans)
            save_picture(picture_of(path), planned, spans)
