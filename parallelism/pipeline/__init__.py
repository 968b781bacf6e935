"""Pipeline parallelism: layers are cut into stages, whose passes a schedule orders."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.pipeline.driver import Pipeline
    from parallelism.pipeline.pipeline_parallel import PipelineParallel
    from parallelism.pipeline.schedule.actions import Schedule
    from parallelism.pipeline.schedule.registry import make_schedule
    from parallelism.pipeline.stage import Batch, Layer, Stage, cut

__all__ = ["Batch", "Layer", "Pipeline", "PipelineParallel", "Schedule", "Stage", "cut", "make_schedule"]
__getattr__, __dir__ = lazily(__name__)
