"""All exercises, in their order."""

from collectives.algorithms import bruck, hierarchical, pairwise, recursive, ring, tree
from teaching.exercise.exercise import Exercise
from teaching.exercise.message_exercise import MessageExercise
from teaching.exercise.pipeline_exercise import PipelineExercise
from teaching.exercise.zero_exercise import ZeroExercise

EXERCISES: tuple[Exercise, ...] = (
    MessageExercise(
        "ring",
        "all-gather round a ring",
        "Send the own chunk to the rank on the right; then, round by round, pass on the chunk from the left.",
        "all_gather",
        ring.all_gather,
        "the ring",
    ),
    MessageExercise(
        "ring_reduce_scatter",
        "reduce-scatter round a ring",
        "Each chunk goes once round the ring, and grows by the contribution of every rank that it passes: where must "
        "chunk r start, so that it ends complete on rank r?",
        "reduce_scatter",
        ring.reduce_scatter,
        "the ring",
    ),
    MessageExercise(
        "ring_all_reduce",
        "all-reduce round a ring",
        "A reduce-scatter, then an all-gather: a rank sends 2(p-1)/p of the vector, however many ranks there are.",
        "all_reduce",
        ring.all_reduce,
        "the ring",
    ),
    MessageExercise(
        "broadcast",
        "broadcast down a binomial tree",
        "In every round, each rank that has the vector sends all of it to one that has not: the number of ranks that "
        "have it doubles.",
        "broadcast",
        tree.broadcast,
        "the binomial tree",
    ),
    MessageExercise(
        "reduce",
        "reduce up a binomial tree",
        "A broadcast, backwards: in every round, half of the ranks that still take part send their partial sums "
        "to the other half.",
        "reduce",
        tree.reduce,
        "the binomial tree",
    ),
    MessageExercise(
        "doubling",
        "all-reduce by recursive doubling",
        "In round k, exchange the whole vector with the rank whose number differs in bit k, and add the one received.",
        "all_reduce",
        recursive.all_reduce,
        "recursive doubling",
        powers=True,
    ),
    MessageExercise(
        "halving_doubling",
        "all-reduce by recursive halving and doubling (Rabenseifner)",
        "A reduce-scatter in which each exchange is half as long as the one before, then the same backwards, as an "
        "all-gather: as few bytes as a ring, in far fewer rounds.",
        "all_reduce",
        recursive.rabenseifner,
        "halving-doubling",
        powers=True,
    ),
    MessageExercise(
        "bruck",
        "all-gather by Bruck's algorithm",
        "In round k, send all that you hold to the rank 2^k to the left; the last round sends what is still missing. "
        "It takes ceil(log2 p) rounds on any number of ranks.  What wraps round the end of the vector is two runs.",
        "all_gather",
        bruck.all_gather,
        "Bruck's algorithm",
    ),
    MessageExercise(
        "pairwise",
        "all-to-all by pairwise exchange",
        "Chunk d of rank s becomes chunk p+s of rank d: a vector is p chunks out, then p chunks in.  In round k, send "
        "to the rank k to the right, and receive from the rank k to the left.  The own chunk is copied.",
        "all_to_all",
        pairwise.all_to_all,
        "pairwise exchange",
    ),
    MessageExercise(
        "two_level",
        "all-reduce inside nodes and across them",
        "Links between nodes are slow.  Reduce-scatter inside each node, all-reduce each part among the ranks of all "
        "nodes that hold it, all-gather inside each node.  `nodes` are tuples of ranks, as ((0, 1), (2, 3)), of one "
        "length.",
        "all_reduce",
        hierarchical.all_reduce,
        "the hierarchy",
        nodes=True,
    ),
    PipelineExercise(),
    ZeroExercise(),
)
