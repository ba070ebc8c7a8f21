"""How a count is told: `1 order`, `2 orders`, `1,234 orders`."""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """The number with its noun, which may be several words; `plural` is for one that takes more than an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
