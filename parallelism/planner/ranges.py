"""Valid ranges of a model's and a layout's settings, common to the planner and train.py."""

from collectives.job.settings import Range

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
SAMPLES = Range(1, 10**6, unit="samples")
MICRO_BATCHES = Range(1, 10**5)
RANKS = Range(1, 2**17, unit="ranks")
STAGES = Range(1, 1000)
MEBIBYTES = Range(0, 2**16, open="above", unit="MiB")
TFLOPS = Range(0, 10**6, open="above", unit="TFLOP/s")
