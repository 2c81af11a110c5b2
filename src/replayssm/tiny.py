"""Where the three tiny trained models lie, in a wheel and in a source checkout alike."""

from __future__ import annotations

from pathlib import Path

TINY = ("mamba2", "gdn", "kda")
"""Their names: one model for each recurrence."""


def tiny_model(name: str) -> Path:
    """Directory of the tiny model ``name``: a checkpoint that ``AutoModelForCausalLM.from_pretrained`` loads.

    A wheel carries them as ``replayssm/models``; in a checkout they are in ``models`` beside ``src``. Raises ValueError
    with the valid names, or FileNotFoundError with the places looked at.
    """
    if name not in TINY:
        raise ValueError(f"unknown tiny model {name!r}; valid: {', '.join(TINY)}")
    package = Path(__file__).parent
    places = [package / "models" / name, package.parent.parent / "models" / name]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(f"tiny model {name!r} is not installed: not at {places[0]}, nor at {places[1]}")
