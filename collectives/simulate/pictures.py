"""Pictures of predictions: times by size, and a schedule as it is planned."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from collectives import draw
from collectives.algorithms import Algorithm
from collectives.cost import Network, Nodes
from collectives.draw import Bar, Diagram, Line
from collectives.simulate.exact import Outcome, simulate
from collectives.sizes import size_in_words


def save_times(path: str, title: str, sizes: Sequence[int], times: Mapping[str, Sequence[float]]) -> None:
    """Draw each algorithm's seconds by bytes as a PNG."""
    from matplotlib.figure import Figure  # as in draw.py

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="bytes", ylabel="predicted time (us)", yscale="log")
    axes.set_xscale("log", base=2)
    for name, seconds in times.items():
        axes.plot(sizes, [1e6 * s for s in seconds], marker=".", label=name)
    axes.grid(alpha=0.3)
    axes.legend()
    draw.save(figure, path)


def save_space_time(path: str, row: Algorithm, nbytes: int, nodes: Nodes, network: Network, root: int = 0) -> None:
    draw.save(draw.figure([planned(row, nbytes, nodes, network, root)]), path)


def planned(row: Algorithm, nbytes: int, nodes: Nodes, network: Network, root: int = 0) -> Diagram:
    """What a simulation says happens."""
    outcome = simulate(row, nbytes, nodes, network, root, record=True)
    lines = [Line(int(source), int(dest), begin, end) for source, dest, _, begin, end in outcome.messages]
    title = f"{row.collective} {row.name}, {size_in_words(nbytes)}: planned, {outcome.seconds * 1e6:.0f} us"
    return Diagram(title, len(outcome.ends), bars(outcome), lines)


def bars(outcome: Outcome) -> list[Bar]:
    """What each rank does in each round: first its messages, if it has any, then its folds."""
    come: dict[tuple[int, int], float] = defaultdict(float)  # a rank's last message of a round
    for source, dest, number, _, end in outcome.messages.tolist():
        for rank in (source, dest):
            come[rank, number] = max(come[rank, number], end)
    made = []
    for rank, number, begin, end in outcome.rounds.tolist():
        if (rank, number) in come:
            made.append(Bar(int(rank), begin, come[rank, number], "wait"))
            made.append(Bar(int(rank), come[rank, number], end, "fold"))
        else:
            made.append(Bar(int(rank), begin, end, "work"))
    return [bar for bar in made if bar.end > bar.begin]
