"""The table on the terminal, as nccl-tests prints it, with what is known besides."""

from collections.abc import Iterator, Sequence

from collectives.algorithms import ROOTED
from collectives.arguments import REDUCTIONS
from collectives.bench.flags import PEERS
from collectives.bench.measure import Result
from collectives.cost import Link, Network

HEAD = "{:>9} {:>8} {:>8} {:>5} {:>4} {:<20}"
GROUP = "{:>8} {:>6} {:>6} {:>6}"
TAIL = "{:>7} {:>8} {:>3} {:>8} {:>5}"
NAMES = ("size", "count", "type", "redop", "root", "algorithm"), ("min", "p99", "cv", "model", "of")
UNITS = ("(B)", *[""] * 5), ("(us)", "(us)", "%", "(us)", "bound")
PLACE_NAMES, PLACE_UNITS = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
EMPTY = ("-",) * 4


def describe(network: Network, nodes: Sequence[Sequence[int]]) -> list[str]:
    """The measured speeds, in words."""
    size = sum(map(len, nodes))
    links = {"in a node": network.within} if max(map(len, nodes)) > 1 else {}
    links |= {"between nodes": network.between} if len(nodes) > 1 else {}
    messages = [f"{link_words(link)} {where}" for where, link in links.items()]
    rates = f"fold {gbps(network.gamma_s_per_byte)}, copy {gbps(network.copy_s_per_byte)}"
    ranks = f"{size} rank{'s' * (size > 1)} on {len(nodes)} node{'s' * (len(nodes) > 1)}, {network.cores} cores each"
    return [f"# {ranks}; {'; '.join(['a message: ' + ', '.join(messages)] * bool(messages) + [rates])}"]


def link_words(link: Link) -> str:
    return f"{link.alpha_s * 1e6:.1f} us + {gbps(link.beta_s_per_byte)}"


def gbps(seconds_a_byte: float) -> str:
    return f"{1e-9 / seconds_a_byte:.1f} GB/s"


def heading(row: Result) -> list[str]:
    """Above the rows of one collective and kind of memory."""
    setting = row.setting
    where = f"{setting.memory} memory" if setting.device == "cpu" else setting.device
    over = len(HEAD.format(*[""] * 6))
    group = len(GROUP.format(*EMPTY))
    return [
        "#",
        f"# {setting.collective}, {where}; time: the median of {len(row.samples_s)}, of the slowest rank; *: by auto",
        f"#{'':{over}}{'out-of-place':^{group}} {'in-place':^{group}}".rstrip(),
        commented(line(NAMES[0], PLACE_NAMES, PLACE_NAMES, NAMES[1])),
        commented(line(UNITS[0], PLACE_UNITS, PLACE_UNITS, UNITS[1])),
    ]


def commented(text: str) -> str:
    return "#" + text[1:]


def line(head: Sequence[str], apart: Sequence[str], in_place: Sequence[str], tail: Sequence[str]) -> str:
    return " ".join([HEAD.format(*head), GROUP.format(*apart), GROUP.format(*in_place), TAIL.format(*tail)]).rstrip()


def lines(rows: Sequence[Result]) -> Iterator[str]:
    """A line for each contestant; what is after the places is of the first of them."""
    for name in dict.fromkeys(row.name for row in rows):
        of_name = {row.in_place: row for row in rows if row.name == name}
        first = of_name.get(False) or of_name[True]
        yield line(head(first), group(of_name.get(False)), group(of_name.get(True)), tail(first))


def head(row: Result) -> tuple[str, ...]:
    setting = row.setting
    op = setting.op if setting.collective in REDUCTIONS else "none"
    root = str(setting.root) if setting.collective in ROOTED else "-1"
    chosen = row.algorithm + "*" * (row.name == "auto")
    return str(row.nbytes), str(row.count), str(setting.dtype), op, root, chosen


def group(row: Result | None) -> tuple[str, ...]:
    if row is None:
        return EMPTY
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    return micro(row.median_s), f"{row.algbw_gbps:.2f}", f"{row.busbw_gbps:.2f}", wrong


def tail(row: Result) -> tuple[str, ...]:
    model = "-" if row.model_s is None else micro(row.model_s)
    percent = "-" if row.bound_percent is None else f"{row.bound_percent:.0f}%"
    return micro(row.samples_s.min()), micro(row.p99_s), f"{row.cv_percent:.0f}", model, percent


def micro(seconds: float) -> str:
    """Microseconds, in at most four digits before the point that say anything.

    >>> micro(1.234e-6), micro(0.1234567)
    ('1.2', '123457')
    """
    return f"{seconds * 1e6:.{1 if seconds < 0.01 else 0}f}"


def footer(rows: Sequence[Result]) -> list[str]:
    wrong = sum(row.wrong or 0 for row in rows)
    said = "not checked" if all(row.wrong is None for row in rows) else f"{wrong} {'OK' if not wrong else 'FAILED'}"
    return [f"# Wrong elements    : {said}", f"# Avg bus bandwidth : {average_gbps(rows):.4f} GB/s"]


def average_gbps(rows: Sequence[Result]) -> float:
    """Of our algorithms, if any were run, else of their peers; not of barriers, which have no bytes."""
    ours = [row.busbw_gbps for row in rows if row.name not in PEERS and row.nbytes]
    rates = ours or [row.busbw_gbps for row in rows if row.nbytes]
    return sum(rates) / len(rates) if rates else 0.0
