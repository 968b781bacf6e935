from collectives.algorithms import ring
from collectives.contract import check
from collectives.schedule import render

print(render(ring.reduce_scatter, 4))
for size in range(1, 34):
    check("reduce_scatter", ring.reduce_scatter, size)
