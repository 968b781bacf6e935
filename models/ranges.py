"""Valid ranges of a model's sizes and of its tokens, which hold without any program's settings."""

from collectives.job.settings import Range

TOKEN = Range(0, 2**20 - 1)
VOCABULARY = Range(1, 2**20, unit="tokens")
LENGTH = Range(1, 2**24, unit="tokens")
LAYERS = Range(1, 1000)
HEADS = Range(1, 2**16)
WIDTH = Range(1, 2**20)
EXPERTS = Range(0, 2**14)
EXPERTS_PER_TOKEN = Range(1, 2**14)
CAPACITY = Range(0, 10**6, open="above")
LOSS_WEIGHT = Range(0, 100)
DROPOUT = Range(0, 1, open="below")
ROPE_THETA = Range(1, 10**12)
ROPE_FACTOR = Range(1, 10**6)
EPSILON = Range(0, 1, open="above below")
