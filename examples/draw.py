"""Print the rounds of a schedule, and prove it for 1 to 33 ranks.

python examples/draw.py
"""

from collectives.algorithms import ring
from collectives.schedule.moves import render
from collectives.schedule.proof import check

print(render(ring.reduce_scatter, 4))
for size in range(1, 34):
    check("reduce_scatter", ring.reduce_scatter, size)
