"""What a launcher such as torchrun says of its ranks in the environment."""

from collections.abc import Iterator, Mapping


def launched_ranks(environment: Mapping[str, str]) -> int | None:
    """How many ranks there are (WORLD_SIZE); None where no launcher says so, and of what is no number."""
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) >= 1 else None


def launcher_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """A number of ranks that is none."""
    text = environment.get("WORLD_SIZE")
    if text is not None and launched_ranks(environment) is None:
        yield f"The environment variable WORLD_SIZE is {text!r}; expected the number of ranks"
