"""The environment variables by which a launcher such as torchrun describes its ranks."""

from collections.abc import Iterator, Mapping


def launched_ranks(environment: Mapping[str, str]) -> int | None:
    """The number of ranks (WORLD_SIZE); None without a launcher, or if it is not a number."""
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) >= 1 else None


def launcher_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """The problem if WORLD_SIZE is not a number of ranks."""
    text = environment.get("WORLD_SIZE")
    if text is not None and launched_ranks(environment) is None:
        yield f"The environment variable WORLD_SIZE is {text!r}; expected the number of ranks"


def world_problems(environment: Mapping[str, str], world_size: int | None, rehearsal: str | None) -> Iterator[str]:
    """Contradictions within the launcher's environment, or with ``--world-size``: ranks would wait for missing ones.

    ``rehearsal``: the flag that only checks, for messages; None if it is given, because then nothing is launched.
    """
    launched = environment.get("WORLD_SIZE")
    given = [name for name in ("WORLD_SIZE", "RANK") if name in environment]
    if rehearsal is not None:
        if len(given) == 1 and (given[0] == "RANK" or launched != "1"):
            missing = "RANK" if given[0] == "WORLD_SIZE" else "WORLD_SIZE"
            yield (f"The environment variable {given[0]} is set, but {missing} is not; start the ranks with torchrun, "
                   f"which sets both, or unset {given[0]} to run on one rank")
        if not given and world_size not in (None, 1):
            yield (f"--world-size is {world_size}, but no launcher started these ranks (WORLD_SIZE is not set); start "
                   f"them with torchrun, or add {rehearsal}")
    yield from launcher_problems(environment)
    if launched_ranks(environment) is not None and world_size not in (None, launched_ranks(environment)):
        yield (f"--world-size is {world_size}, but the launcher started {launched} (WORLD_SIZE); remove the "
               f"flag, or unset the variable to check beforehand")


def named_in_script(flag: str, path: str | None, environment: Mapping[str, str]) -> str:
    """``flag``, after the variable of the scripts that gave it ``path``: their users set that, and see no flag."""
    return f"LOAD_PATH ({flag})" if path and environment.get("LOAD_PATH") == path else flag
