"""Draw the ring all-reduce over time, as the simulator predicts it.

python examples/draw_ring.py docs/ring.png
"""

import sys

from collectives.algorithms import find
from collectives.schedule import draw, events
from collectives.schedule.network import Network

node = (0, 1, 2, 3)
planned = events.simulate(find("all_reduce", "ring"), nbytes=1 << 20, nodes=(node,), network=Network())
diagram = draw.Diagram("All-reduce of 1 MiB by the ring: planned", len(node), planned.bars, planned.lines)
draw.save(draw.figure([diagram]), sys.argv[1])
