"""What follows from a run's settings: its tokens, its model, the learning rate of a step."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from collectives.job.settings import hints_of, refusal
from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.planner import ModelShape, presets
from parallelism.planner.architecture import ARCHITECTURE, Architecture
from training.data.tokenizer import TOKEN_IDS, differ, saved_tokenizer
from training.data.tokens import Tokens, load_tokens
from training.optim.learning_rate import learning_rate
from training.settings.fields import RunSettings


def tokens_of(settings: RunSettings) -> Tokens:
    """Load the data.

    Raises: ValueError for what cannot be read, or other tokens than those of the initial weights.
    """
    options = settings.tokenizer, settings.vocab_size, settings.text_field, settings.token_dtype
    own = saved_tokenizer(Path(settings.init_from)) if settings.init_from else None
    if own and own.vocab_size > (settings.vocab_size or own.vocab_size):
        raise ValueError(
            f"init_from={settings.init_from}: {own.name} has {own.vocab_size} tokens, but the model only "
            f"{settings.vocab_size}: pass a folder whose files belong together"
        )
    tokens = load_tokens(settings.data, settings.val_data, *options)
    if own and own.name != TOKEN_IDS and differ(own, tokens.tokenizer):
        raise ValueError(
            f"init_from={settings.init_from} has tokens of {own.name}, but the data of {tokens.tokenizer.name}: omit "
            "tokenizer, or use other data"
        )
    return tokens


def model_config(settings: RunSettings, vocab_size: int) -> ModelConfig:
    return ModelConfig(**presets.describe(settings, vocab_size))


def checked(config: ModelConfig) -> ModelConfig:
    """Return a model's configuration.

    Raises: ValueError for values that are invalid as settings of a run, too.
    """
    hints, metadata = hints_of(type(config)), {field.name: field.metadata for field in fields(RunSettings)}
    Architecture(**{name: getattr(config, name) for name in ARCHITECTURE})
    for name in metadata.keys() & vars(config).keys():
        value = getattr(config, name)
        if why := refusal(name, value, hints[name], metadata[name]):
            raise ValueError(why)
    ModelShape.of(config)  # raises for sizes that do not fit together
    return config


def make_model(settings: RunSettings, vocab_size: int) -> Decoder:
    model = Decoder(model_config(settings, vocab_size), settings.seed)
    return model.double() if settings.dtype == "float64" else model


def learning_rate_of(settings: RunSettings, iteration: int) -> float:
    course = settings.lr_schedule, settings.min_lr, settings.lr_decay_iters
    return learning_rate(iteration, settings.lr, settings.warmup_iters, settings.max_iters, *course)


def zero_group(settings: RunSettings) -> str | int:
    return int(settings.zero_group) if settings.zero_group.isdigit() else settings.zero_group


def picture_of(profile: str) -> str:
    return str(Path(profile).with_suffix(".png"))
