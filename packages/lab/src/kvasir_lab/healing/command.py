"""``kvasir convert heal``: train a converted model on its source's answers."""

from __future__ import annotations

from pathlib import Path


def heal(
    source: str,
    target: Path,
    teacher: str | None,
    minutes: float | None,
    steps: int | None,
    texts: Path | None,
    resume: bool,
    device: str | None,
) -> None:
    """Train a converted model on its source's answers, and say what came out. Raises ConfigError."""
    import torch

    from kvasir.errors import ConfigError
    from kvasir.models import checkpoint
    from kvasir_lab.healing import data
    from kvasir_lab.healing.heal import Plan
    from kvasir_lab.healing.heal import heal as train

    if teacher is None:
        raise ConfigError("healing needs --teacher MODEL: the model that was converted")
    if minutes is not None and steps is not None:
        raise ConfigError("give --minutes or --steps, not both")
    plan = Plan(steps=steps) if minutes is None else Plan(minutes=minutes)
    folders = checkpoint.resolve(source), checkpoint.resolve(teacher)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    corpus = lambda: (  # noqa: E731
        data.file_corpus(texts, folders[1]) if texts else data.default_corpus(folders[1], plan.seed)
    )
    record = train(folders[0], target, folders[1], plan, corpus, resume=resume, device=where)
    if record is None:
        print(f"stopped; continue with --resume: the state is in {target}")
        return
    first, last = record["held_out"][0], record["held_out"][-1]
    print(
        f"{target}: {record['tokens']:,} tokens in {record['steps']} steps; held-out loss {first['loss']:.4f} -> "
        f"{last['loss']:.4f}, KL {first['kl']:.4f} -> {last['kl']:.4f} nats a token"
    )
