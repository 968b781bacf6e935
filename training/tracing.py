"""The trace of a step: what each rank of a pipeline did when, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parallelism.mesh import Mesh
from parallelism.pipeline.driver import Pipeline
from parallelism.pipeline.schedule.price import price
from parallelism.pipeline.trace import SpanRecorder, gather, measured, save_picture, save_trace
from training.config import picture_of


@contextmanager
def traced(pipeline: Pipeline, mesh: Mesh, path: str) -> Iterator[None]:
    """Write to `path` what the ranks do in this context, and beside it a picture.  Collective."""
    recorder = SpanRecorder(mesh.pp.rank)
    with pipeline.listeners.adding(recorder):
        yield
    spans = gather(mesh.pp, recorder.spans)
    if mesh.comm.rank == 0:
        save_trace(path, spans)
        save_picture(picture_of(path), price(pipeline.schedule, measured(spans)), spans)
