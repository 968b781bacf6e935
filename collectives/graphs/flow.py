"""A maximum flow, and the cut that bounds it.

Source: Dinic, "Algorithm for solution of a problem of maximum flow in a network with power estimation", 1970.
"""

from collections import deque
from collections.abc import Iterable

TINY = 1e-9  # of the largest capacity: less counts as nothing


class FlowNetwork:
    """Directed edges with capacities between numbered vertices; flows start from nothing each time.

    >>> network = FlowNetwork(4, [(0, 1, 3.0), (0, 2, 1.0), (1, 2, 1.0), (1, 3, 1.0), (2, 3, 5.0)])
    >>> network.flow(0, 3), sorted(network.side)
    (3.0, [0, 1])
    """

    def __init__(self, num_vertices: int, edges: Iterable[tuple[int, int, float]]):
        self.ends: list[int] = []  # edge i leads to ends[i]; i ^ 1 is its reverse
        self.capacity: list[float] = []
        self.edges_of: list[list[int]] = [[] for _ in range(num_vertices)]
        self.side: set[int] = set()  # of the last flow's least cut, with its source
        for source, dest, capacity in edges:
            for tail, head, amount in ((source, dest, capacity), (dest, source, 0.0)):
                self.edges_of[tail].append(len(self.ends))
                self.ends.append(head)
                self.capacity.append(amount)
        self.least = TINY * max(self.capacity, default=0.0)

    def flow(self, source: int, sink: int) -> float:
        """Return the largest flow, and keep the source's side of the least cut."""
        self.residual = list(self.capacity)
        total = 0.0
        while (levels := self._levels(source))[sink] >= 0:
            ahead = [0] * len(self.edges_of)
            while (amount := self._augment(source, sink, levels, ahead)) > 0:
                total += amount
        self.side = {vertex for vertex, level in enumerate(levels) if level >= 0}
        return total

    def _levels(self, source: int) -> list[int]:
        """Return the distance of each vertex over edges that aren't full; -1 where there is no way."""
        levels = [-1] * len(self.edges_of)
        levels[source] = 0
        ahead = deque([source])
        while ahead:
            vertex = ahead.popleft()
            for edge in self.edges_of[vertex]:
                head = self.ends[edge]
                if levels[head] < 0 and self.residual[edge] > self.least:
                    levels[head] = levels[vertex] + 1
                    ahead.append(head)
        return levels

    def _augment(self, source: int, sink: int, levels: list[int], ahead: list[int]) -> float:
        """Send what one path of increasing levels carries; 0 where none is left."""
        path: list[int] = []
        vertex = source
        while vertex != sink:
            edges = self.edges_of[vertex]
            if ahead[vertex] == len(edges):
                if not path:
                    return 0.0
                vertex = self.ends[path.pop() ^ 1]
                ahead[vertex] += 1
                continue
            edge = edges[ahead[vertex]]
            if self.residual[edge] > self.least and levels[self.ends[edge]] == levels[vertex] + 1:
                path.append(edge)
                vertex = self.ends[edge]
            else:
                ahead[vertex] += 1
        amount = min(self.residual[edge] for edge in path)
        for edge in path:
            self.residual[edge] -= amount
            self.residual[edge ^ 1] += amount
        return amount
