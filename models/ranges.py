"""What numbers a training run's settings may be: for train.py, the planner and a GPT alike."""

from collectives.settings import Range

COUNT = Range(1, 10**9)
COUNT_OR_NONE = Range(0, 10**9)
SEED = Range(0, 2**63 - 1)
TOKEN = Range(0, 2**16 - 1)
VOCABULARY = Range(1, 2**20, unit="tokens")
LAYERS = Range(1, 1000)
HEADS = Range(1, 2**16)
WIDTH = Range(1, 2**20)
LENGTH = Range(1, 2**24, unit="tokens")
SAMPLES = Range(1, 10**6, unit="samples")
MICRO_BATCHES = Range(1, 10**5)
RANKS = Range(1, 2**17, unit="ranks")
STAGES = Range(1, 1000)
FRACTION = Range(0, 1, open="above below")
DROPOUT = Range(0, 1, open="below")
LEARNING_RATE = Range(0, 100, open="above")
WEIGHT_DECAY = Range(0, 100)
NORM = Range(0, 10**9)
MEBIBYTES = Range(0, 2**16, open="above", unit="MiB")
TFLOPS = Range(0, 10**6, open="above", unit="TFLOP/s")
