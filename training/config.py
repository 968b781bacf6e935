"""What a training run is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives.job.settings import check
from models import presets, ranges
from models.data import Tokens, load_tokens
from models.learning_rate import COURSES, learning_rate
from models.model import Model, make
from parallelism.numerics.non_finite import POLICIES
from parallelism.numerics.precision import DTYPES
from parallelism.pipeline.schedule import registry
from parallelism.sequence.token_shards import MODES, ORDERS
from training.gpt import MODES as RECOMPUTATIONS

SEARCH = "search"  # a schedule that is made for the times measured
AUTO = "auto"  # to resume: the newest whole checkpoint, if there is one
OPTIMIZERS = ("adamw", "sgd", "muon")
TRACED = 3  # the step that `trace` asks for: by then all is warm


def flag(default: Any, text: str, **more: Any) -> Any:
    default = {"default_factory": list} if default is list else {"default": default}
    return field(**default, metadata={"help": text, **more})


@dataclass
class Config:
    """A run's settings, as flags, in a TOML file, or in Python.

    Raises: ValueError for what a setting can't be.
    """

    data: list[str] = flag(
        list,
        "files or folders: text, JSON lines, Parquet, or .bin of tokens (nanoGPT's, llm.c's, training.prepare's); "
        "none: Python's language reference",
    )
    val_data: list[str] = flag(list, "the same, to validate on; none: the end of the data, or its files named val*.bin")
    tokenizer: str = flag("bytes", "of text: bytes, a tokenizer.json, or a .tiktoken file named by its encoding")
    vocab_size: int | None = flag(
        None, "kinds of tokens, if more than the data's or the tokenizer's", range=ranges.VOCABULARY
    )
    text_field: str = flag("text", "the field of JSON lines, or column of Parquet, that has the text")
    val_fraction: float = flag(
        0.1, "part of the data, at its end, that is held back for validation without val_data", range=ranges.FRACTION
    )
    out_dir: str = flag("out", "where metrics.jsonl, loss.png and the weights go; none if empty")
    seed: int = flag(1337, "of the initial weights and of the order of the samples", range=ranges.SEED)
    model: str = flag(
        presets.DEFAULT,
        "shape by name, which the flags below override",
        choices=[*presets.PRESETS],
        sets=presets.SET_BY_MODEL,
    )
    depth: int | None = flag(
        None,
        "blocks, from which n_embd (64 times as many), n_head, lr and the batch follow, before model",
        range=ranges.LAYERS,
        sets=presets.SET_BY_DEPTH,
    )
    n_layer: int = flag(None, "blocks: model's", range=ranges.LAYERS)
    n_head: int = flag(None, "attention heads: model's", range=ranges.HEADS)
    n_kv_head: int | None = flag(
        None, "heads of keys and values, each shared by as many of queries: model's, or n_head", range=ranges.HEADS
    )
    n_embd: int = flag(None, "width: model's", range=ranges.WIDTH)
    n_hidden: int | None = flag(
        None, "width within a llama's MLP: model's, or 8/3 of n_embd, rounded up", range=ranges.WIDTH
    )
    rope_theta: float | None = flag(None, "base of a llama's rotary positions: model's", range=ranges.ROPE_THETA)
    norm_eps: float | None = flag(None, "added within a llama's norms: model's", range=ranges.EPSILON)
    tied: bool | None = flag(None, "a llama's head is its embedding: model's")
    block_size: int = flag(None, "tokens a sample: model's", range=ranges.LENGTH)
    document_end: int | None = flag(
        None, "token that ends a document, whose tokens attend to no other's", range=ranges.TOKEN
    )
    num_experts: int = flag(0, "experts of a mixture in place of each MLP; 0: none", range=ranges.EXPERTS)
    experts_per_token: int = flag(2, "experts that each token goes to", range=ranges.EXPERTS_PER_TOKEN)
    expert_capacity: float | None = flag(
        None,
        "limit of an expert's tokens of a sequence, times the mean; beyond, they are dropped",
        range=ranges.CAPACITY,
    )
    balance_loss: float = flag(0.0, "weight of a loss of uneven choices of experts", range=ranges.LOSS_WEIGHT)
    dropout: float = flag(0.0, "dropout probability", range=ranges.DROPOUT)
    bias: bool | None = flag(None, "biases in linear layers and norms of a GPT-2: model's")
    micro_batch_size: int = flag(8, "samples a rank computes at once", range=ranges.SAMPLES)
    num_micro_batches: int | None = flag(
        None, "micro-batches a rank computes before it updates the weights: depth's, or 1", range=ranges.MICRO_BATCHES
    )
    global_batch_size: int | None = flag(None, "samples a step: sets num_micro_batches", range=ranges.SAMPLES)
    max_iters: int = flag(600, "steps", range=ranges.COUNT)
    eval_interval: int = flag(200, "steps between validations; one follows the last step anyway", range=ranges.COUNT)
    eval_iters: int = flag(
        0, "global batches of a validation, spread over the held-back part; 0: all of it", range=ranges.COUNT_OR_NONE
    )
    eval_only: bool = flag(False, "print the validation loss of resume's or init_from's weights, and write nothing")
    log_interval: int = flag(1, "steps from one that is printed and recorded to the next", range=ranges.COUNT)
    tensorboard: str = flag("", "folder of TensorBoard's files, which get the records, too; none if empty")
    wandb: str = flag("", "project of Weights & Biases, which gets the records, too; none if empty")
    prometheus: str = flag("", "file of the latest record's numbers, *.prom, for node exporter's textfile collector")
    report: str = flag("", "HTML file of charts and tables of the run; some steps are timed for it on every rank")
    optimizer: str = flag("adamw", "muon is of blocks' matrices, beside adamw", choices=OPTIMIZERS)
    lr: float = flag(None, f"learning rate after warm-up: depth's, or {presets.LR}", range=ranges.LEARNING_RATE)
    muon_lr: float = flag(0.02, "that of the matrices that muon updates", range=ranges.LEARNING_RATE)
    lr_schedule: str = flag(
        "cosine", "course of learning rates after warm-up; wsd: stable, then a line down", choices=tuple(COURSES)
    )
    min_lr: float | None = flag(None, "to which lr falls, and muon_lr in proportion: a tenth", range=ranges.LEAST_RATE)
    lr_decay_iters: int | None = flag(
        None, "step at which lr has fallen: max_iters; of wsd the last steps, in which it falls: a fifth",
        range=ranges.COUNT,
    )  # fmt: skip
    warmup_iters: int = flag(50, "steps of linear warm-up", range=ranges.COUNT_OR_NONE)
    weight_decay: float = flag(0.1, "of matrices", range=ranges.WEIGHT_DECAY)
    beta1: float = flag(0.9, "adamw's decay of the gradients' mean", range=ranges.DECAY)
    beta2: float = flag(0.95, "adamw's decay of the squared gradients' mean", range=ranges.DECAY)
    eps: float = flag(1e-8, "what adamw adds to the root of that", range=ranges.EPSILON)
    momentum: float | None = flag(None, "of sgd: 0.9; of muon: 0.95", range=ranges.DECAY)
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0: no limit", range=ranges.NORM)
    dtype: str = flag("float32", "of 16 bits: to compute in, with float32 weights", choices=DTYPES)
    master_weights: bool = flag(False, "parameters are of 16 bits, too, with float32 ones for the optimizer beside")
    grad_dtype: str | None = flag(None, "in which gradients are reduced: float32, or of 16 bits")
    non_finite: str = flag("stop", "what becomes of a step whose loss or gradients are not finite", choices=POLICIES)
    init_from: str = flag("", "folder of a GPT-2 or Llama in Hugging Face's files, whose weights to begin with")
    device: str = flag("cpu", "cpu, cuda (a node's GPUs in turn), or cuda:<index>")
    compile: bool = flag(False, "let torch.compile fuse what a rank computes: of a whole model, or of each block")
    layout: str = flag("given", "by the flags that follow, or as the planner finds best", choices=("given", "auto"))
    dp: int | None = flag(None, "ranks in data parallel: those that the other axes leave", range=ranges.RANKS)
    pp: int = flag(
        1, "ranks in pipeline parallel, which have stages of the model, one after the other", range=ranges.RANKS
    )
    schedule: str = flag(
        "1f1b", f"in which order stages compute: {', '.join(registry.names())}, search, or a file of actions"
    )
    virtual_stages: int | None = flag(None, "stages on each pp rank, in schedules of several: 2", range=ranges.STAGES)
    max_alive: int | None = flag(
        None, "activations alive on a pp rank in a searched schedule: its stages times pp", range=ranges.COUNT
    )
    balance: str = flag("counted", "by what costs stages are made even", choices=("counted", "measured"))
    trace: str = flag(
        "", f"file for what pp ranks do in the run's step {TRACED} (Chrome's trace format), and beside it a PNG"
    )
    recompute: str = flag(
        "none",
        "what blocks compute again in the backward pass: all, or what is large",
        choices=("none", *RECOMPUTATIONS),
    )
    zero_stage: int = flag(
        0, "sharded over dp ranks: 1: the optimizer's states, 2: and gradients, 3: and parameters", choices=(0, 1, 2, 3)
    )
    zero_group: str = flag("all", "ranks over which ZeRO shards: all, each node's, or groups of so many")
    tp: int = flag(1, "ranks in tensor parallel, which split layers", range=ranges.RANKS)
    ep: int = flag(1, "ranks in expert parallel, out of dp, which divide the experts", range=ranges.RANKS)
    sequence_parallel: bool = flag(False, "between split layers, tp ranks have parts of the sequence")
    sp: int = flag(1, "ranks in sequence parallel, which split sequences", range=ranges.RANKS)
    sp_mode: str = flag("ring", "how sp ranks meet in attention; hybrid: heads in groups, rings across", choices=MODES)
    sp_order: str = flag("zigzag", "which tokens of a sequence go to which sp rank", choices=ORDERS)
    sp_heads: int | None = flag(None, "ranks of a group in hybrid mode, which exchange heads: 2", range=ranges.RANKS)
    bucket_mb: float = flag(4.0, "MiB of gradients that are reduced together", range=ranges.MEBIBYTES)
    checkpoint_dir: str = flag("", "where checkpoints go, for any layout to go on from; none if empty")
    checkpoint_interval: int = flag(
        0, "steps from one to the next; one follows the last step, or a signal, anyway", range=ranges.COUNT_OR_NONE
    )
    checkpoints_kept: int = flag(3, "of which the oldest go", range=ranges.COUNT)
    resume: str = flag("", "checkpoint to go on from; auto: the newest whole one in checkpoint_dir, if there is one")
    peak_tflops: float | None = flag(
        None, "of one device, to report model FLOP/s as a share of it (MFU)", range=ranges.TFLOPS
    )
    sample_tokens: int = flag(200, "tokens of text to generate in the end", range=ranges.TEXT)

    def __post_init__(self):
        presets.fill(self)
        check(self)
        presets.refuse_other_family(self)


def tokens_of(config: Config) -> Tokens:
    return load_tokens(config.data, config.val_data, config.tokenizer, config.vocab_size, config.text_field)


def learning_rate_of(config: Config, iteration: int) -> float:
    course = config.lr_schedule, config.min_lr, config.lr_decay_iters
    return learning_rate(iteration, config.lr, config.warmup_iters, config.max_iters, *course)


def zero_group(config: Config) -> str | int:
    return int(config.zero_group) if config.zero_group.isdigit() else config.zero_group


def make_model(config: Config, vocab_size: int) -> Model:
    gpt = make(presets.shape_of(config, vocab_size), config.seed)
    return gpt.double() if config.dtype == "float64" else gpt


def picture_of(trace: str) -> str:
    return str(Path(trace).with_suffix(".png"))
