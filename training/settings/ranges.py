"""Valid ranges of a run's settings: those of the planner, and those that do not affect a plan."""

from collectives.job.settings import Range
from parallelism.planner.ranges import *  # noqa: F403

COUNT = Range(1, 10**9)
COUNT_OR_NONE = Range(0, 10**9)
TEXT = Range(0, 10**6, unit="tokens")
SEED = Range(0, 2**63 - 1)
TOKEN = Range(0, 2**20 - 1)
ROPE_THETA = Range(1, 10**12)
ROPE_FACTOR = Range(1, 10**6)
EPSILON = Range(0, 1, open="above below")
FRACTION = Range(0, 1, open="above below")
LEARNING_RATE = Range(0, 100, open="above")
LEAST_RATE = Range(0, 100)
DECAY = Range(0, 1, open="below")
WEIGHT_DECAY = Range(0, 100)
NORM = Range(0, 10**9)
LORA_ALPHA = Range(0, 10**6, open="above")
