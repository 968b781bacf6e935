"""Start training: `python -m training`, `collectives-train`, and train.py."""

from training.starting import hold_signals, tell_starting


def main() -> None:
    hold_signals()
    tell_starting()
    from training.loop import main as train  # imports torch, which takes long on many ranks

    train()


if __name__ == "__main__":
    main()
