"""The settings of a training run: their names, defaults, valid values and help."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from parallelism.checkpoint.folders import MEMORY
from parallelism.numerics.non_finite import POLICIES
from parallelism.pipeline.schedule import registry
from parallelism.planner import presets
from parallelism.planner.flags import Settings, flag
from training.data.token_files import TOKEN_DTYPES
from training.data.tokens import TEXT_FIELD
from training.optim.learning_rate import COURSES
from training.parallel.decoder import MODES as RECOMPUTATIONS
from training.settings import ranges

SEARCH = "search"  # a schedule searched for the measured times
STOP, REDO, LEAVE_OUT = "stop", "redo", "leave_out"  # what a run does about wrong numbers
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"  # resume from the newest complete checkpoint, if there is one
PLANNED = {field.name: field for field in fields(Settings)}
TRACED, NUMBER_TRACED = 3, 2  # the first step that `profile` records, after warm-up, and how many


def planned(name: str) -> Any:
    """Return a field that the planner has, too, with its default, help and valid values."""
    return field(default=PLANNED[name].default, metadata=PLANNED[name].metadata)


@dataclass
class RunSettings:
    """A run's settings; `Config` fills and checks them."""

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "training data: files or folders of text, JSON, Parquet, or .bin tokens (nanoGPT, llm.c, prepare); "
            "by default Python's language reference"
        },
    )
    val_data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "validation data, likewise; by default the end of the training data, or its files named val*.bin"
        },
    )
    tokenizer: str | None = flag(
        None,
        "tokenizer of text: bytes, a tokenizer.json, a .tiktoken file named by its encoding, or nanoGPT's meta.pkl; "
        "by default init_from's, or bytes",
    )
    vocab_size: int | None = flag(
        None,
        "vocabulary size, at least the tokenizer's; by default init_from's or the tokenizer's, or for .bin tokens "
        "without one at least GPT-2's 50257",
        ranges.VOCABULARY,
    )
    token_dtype: str | None = flag(
        None,
        "dtype of .bin tokens in files without a header; by default that of meta.json or meta.pkl beside them, or "
        "else the only one that the numbers and the vocabulary allow",
        tuple(TOKEN_DTYPES),
    )
    text_field: str = flag(TEXT_FIELD, "field of JSON, or column of Parquet, with the text")
    val_fraction: float = flag(
        0.1, "fraction of the data, at its end, reserved for validation if val_data is not set", ranges.FRACTION
    )
    out_dir: str = flag("out", "output folder of metrics.jsonl, loss.png and the weights; nothing is written if empty")
    seed: int = flag(1337, "random seed of the initial weights and of the order of samples", ranges.SEED)
    model: str = flag(
        None,
        f"model shape by name, which the flags below override; by default init_from's, or {presets.DEFAULT}",
        [*presets.PRESETS],
        sets=presets.SET_BY_MODEL,
    )
    depth: int | None = planned("depth")
    n_layer: int = planned("n_layer")
    n_head: int = planned("n_head")
    n_kv_head: int | None = planned("n_kv_head")
    n_embd: int = planned("n_embd")
    n_hidden: int | None = planned("n_hidden")
    rope_theta: float | None = flag(
        None, "base of a llama's rotary embedding; by default the model's", ranges.ROPE_THETA
    )
    rope_factor: float | None = flag(
        None,
        "factor that stretches a llama's slow rotations for longer contexts; by default the model's",
        ranges.ROPE_FACTOR,
    )
    rope_original_length: int | None = flag(
        None,
        "context length in tokens before stretching; rotations that turn at most once in it are slow",
        ranges.LENGTH,
    )
    norm_eps: float | None = flag(None, "epsilon of a llama's norms; by default the model's", ranges.EPSILON)
    tied: bool | None = planned("tied")
    architecture: str | None = planned("architecture")
    block_size: int = planned("block_size")
    document_end: int | None = flag(
        None, "token that ends a document; tokens attend only within their document", ranges.TOKEN
    )
    num_experts: int = planned("num_experts")
    experts_per_token: int = planned("experts_per_token")
    expert_capacity: float | None = planned("expert_capacity")
    balance_loss: float = planned("balance_loss")
    dropout: float = planned("dropout")
    bias: bool | None = planned("bias")
    micro_batch_size: int = flag(8, "samples in a rank's micro-batch", ranges.SAMPLES)
    num_micro_batches: int | None = flag(
        None,
        "micro-batches of a rank in each step (gradient accumulation); by default set by depth, or 1",
        ranges.MICRO_BATCHES,
        sets=("global_batch_size",),
    )
    global_batch_size: int | None = flag(
        None,
        "samples in a step, dp x micro_batch_size x num_micro_batches, of which the last follows and is omitted",
        ranges.SAMPLES,
        sets=("num_micro_batches",),
    )
    max_iters: int = flag(600, "number of training steps", ranges.COUNT)
    eval_interval: int = flag(200, "steps between validations; the last step is always followed by one", ranges.COUNT)
    eval_iters: int = flag(
        0, "global batches in a validation, spread over the validation data; 0 for all of it", ranges.COUNT_OR_NONE
    )
    eval_only: bool = flag(False, "print the validation loss of the weights of resume or init_from, and write nothing")
    log_interval: int = flag(1, "steps between records, which are printed and logged", ranges.COUNT)
    times_interval: int = flag(
        0,
        "steps between tables of the time by kind of the last steps, in which a GPU is waited for; 0: on CPUs at the "
        "end, on GPUs none",
        ranges.COUNT_OR_NONE,
    )
    hash_interval: int = flag(
        0,
        "steps between hashes of the weights and optimizer states, equal in any layout with the same bits; 0 for none",
        ranges.COUNT_OR_NONE,
    )
    check_interval: int = flag(
        0,
        "steps between checks for numbers that memory, a core or a message has changed; 0 for none",
        ranges.COUNT_OR_NONE,
    )
    on_corruption: str = flag(
        STOP,
        "action on wrong numbers: the run stops, computes the step again, or continues without the rank that has them",
        (STOP, REDO, LEAVE_OUT),
    )
    tensorboard: str = flag("", "folder for TensorBoard logs; disabled if empty")
    wandb: str = flag("", "Weights & Biases project to log to; disabled if empty")
    prometheus: str = flag(
        "", "*.prom file of the latest record for node exporter's textfile collector; disabled if empty"
    )
    report: str = flag(
        "", "HTML report of the run with charts and tables, for which every rank times some steps; disabled if empty"
    )
    profile: str = flag(
        "",
        f"trace file of {NUMBER_TRACED} steps from step {TRACED} on (Chrome's trace format, for Perfetto), with each "
        "rank's passes, rounds of collectives, torch's operations and memory; with pp, a PNG of the pipeline is beside "
        "it; disabled if empty",
    )
    optimizer: str = planned("optimizer")
    lr: float = flag(
        None, f"learning rate after warm-up; by default set by depth, or {presets.LR}", ranges.LEARNING_RATE
    )
    muon_lr: float = flag(0.02, "learning rate of the matrices that muon updates", ranges.LEARNING_RATE)
    lr_schedule: str = flag(
        "cosine", "learning-rate schedule after warm-up; wsd: stable, then linear decay", tuple(COURSES)
    )
    min_lr: float | None = flag(
        None, "final learning rate of the decay, muon_lr in proportion; by default a tenth of lr", ranges.LEAST_RATE
    )
    lr_decay_iters: int | None = flag(
        None,
        "step at which the decay ends: max_iters by default; for wsd the number of decay steps: a fifth by default",
        ranges.COUNT,
    )
    warmup_iters: int = flag(50, "steps of linear learning-rate warm-up", ranges.COUNT_OR_NONE)
    weight_decay: float = flag(0.1, "weight decay of matrices", ranges.WEIGHT_DECAY)
    beta1: float = flag(0.9, "adamw's decay of the mean gradient", ranges.DECAY)
    beta2: float = flag(0.95, "adamw's decay of the mean squared gradient", ranges.DECAY)
    eps: float = flag(1e-8, "adamw's epsilon, added to the root of the mean squared gradient", ranges.EPSILON)
    momentum: float | None = flag(None, "momentum; by default 0.9 for sgd and 0.95 for muon", ranges.DECAY)
    grad_clip: float = flag(1.0, "largest norm of the gradient, by which it is clipped; 0 for no clipping", ranges.NORM)
    dtype: str = planned("dtype")
    master_weights: bool = planned("master_weights")
    grad_dtype: str | None = planned("grad_dtype")
    reproducible: bool = flag(
        False, "the same bits on any number of ranks of dp, pp and sp, with any schedule, zero_stage and resume"
    )
    balance_load: bool = flag(
        False, "give dp ranks numbers of micro-batches by their measured speed, with the same bits; needs reproducible"
    )
    sequence_parts: int | None = flag(
        None,
        "parts of a sequence, computed one by one for the same bits on any number of sp ranks that divides them",
        ranges.COUNT,
    )
    tiles: int | None = flag(
        None,
        "number of parts of each sum that tp splits, for the same bits with each tp that divides it; a power of two",
        ranges.COUNT,
    )
    non_finite: str = flag("stop", "action on a step whose loss or gradients are not finite", POLICIES)
    max_skips: int = flag(10, "number of steps that non_finite=skip skips in a row before the run ends", ranges.COUNT)
    init_from: str = flag(
        "",
        "folder of a Hugging Face model with the initial weights, the model's shape, and its tokenizer",
        sets=presets.SET_BY_WEIGHTS,
    )
    export_dtype: str | None = flag(
        None, "dtype of the weights written to out_dir; by default that of the master weights", EXPORT_DTYPES
    )
    lora_rank: int | None = flag(
        None,
        "rank of adapters (LoRA) beside the linear layers, which alone are trained; by default all weights are",
        ranges.COUNT,
        sets=("lora_alpha",),
    )
    lora_alpha: float | None = flag(
        None, "adapters' results count lora_alpha / lora_rank times; by default twice the rank", ranges.LORA_ALPHA
    )
    lora_targets: list[str] = field(
        default_factory=list,
        metadata={
            "help": "linear layers that have adapters, by names such as c_attn, c_proj, q_proj, mlp.c_proj; by default "
            "all of the blocks"
        },
    )
    lora_from: str = flag(
        "",
        "folder of an adapter of PEFT to go on with; its rank, alpha and targets are the run's",
        sets=("lora_rank", "lora_alpha", "lora_targets"),
    )
    device: str = flag("cpu", "device: cpu, cuda (ranks take the node's GPUs in turn), or cuda:<index>")
    compile: bool = flag(
        False, "compile the model by torch.compile: whole where one rank computes it, else block by block"
    )
    layout: str = flag(
        "given",
        "parallel layout: as set by the following flags, or chosen by the planner, which keeps what they set",
        ("given", "auto"),
    )
    dp: int | None = flag(None, "data-parallel ranks; by default all that the other axes leave", ranges.RANKS)
    pp: int = flag(1, "pipeline-parallel ranks, which hold consecutive stages of the model", ranges.RANKS)
    schedule: str = flag("1f1b", f"pipeline schedule: {', '.join(registry.names())}, search, or a file of actions")
    virtual_stages: int | None = flag(
        None, "stages on each pp rank; by default 2 in schedules with several", ranges.STAGES
    )
    max_alive: int | None = flag(
        None,
        "largest number of live activations on a pp rank in a searched schedule; by default its stages times pp",
        ranges.COUNT,
    )
    balance: str = planned("balance")
    recompute: str = flag(
        "none",
        "activations to recompute in the backward pass: none, all (full), or large ones (selective)",
        ("none", *RECOMPUTATIONS),
    )
    zero_stage: int = flag(
        0, "ZeRO over dp ranks: 1 shards optimizer states, 2 also gradients, 3 also parameters", (0, 1, 2, 3)
    )
    zero_group: str = flag(
        "all", "ranks over which ZeRO shards: all, node (within each node), or a number of ranks in a group"
    )
    tp: int = flag(1, "tensor-parallel ranks, which split layers", ranges.RANKS)
    ep: int = flag(1, "expert-parallel ranks within dp, which divide the experts", ranges.RANKS)
    sequence_parallel: bool = flag(False, "shard the sequence over tp ranks between split layers")
    sp: int = flag(1, "sequence-parallel ranks, which split sequences", ranges.RANKS)
    sp_mode: str = planned("sp_mode")
    sp_order: str = planned("sp_order")
    sp_heads: int | None = planned("sp_heads")
    bucket_mb: float = planned("bucket_mb")
    checkpoint_dir: str = flag("", "folder for checkpoints, from which any layout can resume; disabled if empty")
    checkpoint_interval: int = flag(
        0, "steps between checkpoints; the last step, or a signal, is always followed by one", ranges.COUNT_OR_NONE
    )
    checkpoints_kept: int = flag(3, "number of checkpoints to keep", ranges.COUNT)
    snapshot_interval: int = flag(
        0, "steps between checkpoints in the memory of the hosts, which a restart resumes from", ranges.COUNT_OR_NONE
    )
    snapshot_dir: str = flag(MEMORY, "folder in the memory of each host, for a folder of this run's snapshots")
    resume: str = flag(
        "", "checkpoint to resume from; auto: the newest complete one, of checkpoint_dir or in memory, if any"
    )
    peak_tflops: float | None = flag(
        None,
        "peak TFLOP/s of a device, or of a rank on CPUs, of which model FLOP/s utilization (MFU) is the fraction; by "
        "default that of a known GPU's data sheet, else of matrix products, measured at the start",
        ranges.TFLOPS,
    )
    sample_tokens: int = flag(200, "tokens of text to generate at the end", ranges.TEXT)
