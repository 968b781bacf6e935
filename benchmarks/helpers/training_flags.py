"""Flags of the benchmarks that time training steps."""

from helpers.result_files import output

from collectives.job.settings import Parser, positive


def training_parser(description: str) -> Parser:
    """Return a parser with the flags of the model, of its batches and of the output file, described by a first line."""
    parser = Parser(description=description.splitlines()[0])
    parser.add_argument("--model", default="gpt2-tiny", help="model shape by name")
    parser.add_argument("--block_size", type=positive, default=128, help="tokens of a sequence")
    parser.add_argument("--micro_batch_size", type=positive, default=4)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    return parser
