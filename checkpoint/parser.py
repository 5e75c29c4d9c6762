"""The parser of ``mm-convert``: the order of its help, the flags that it takes, and hints for misspelt ones."""

from argparse import Action, _ArgumentGroup
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser

from mm.config.misspelt import misspelt
from mm.console import COMPLETION, NEEDED, NEGATIVE, SHELLS, STATUSES, Completed, completed_parser
from mm.errors import UserError, refuse

_FIRST = ("source_dir", "lora_dir", "dir", "mm_dir", "hf_config.hf_dir", "save_hf_dir", "target_dir", "llm_pp_layers",
          "vit_pp_layers", "tp_size")  # fmt: skip
"""Fields that stand first in the help, in this order."""
_LAST = "cfg.common_model_config."
"""Fields that are seldom needed: facts that the files state themselves."""


class ConvertParser(ArgumentParser):
    """Ends each help with the exit statuses, and begins it with the flags that the command needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"epilog": STATUSES, **kwargs})
        self._negative_number_matcher = NEGATIVE

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help; only while it is written are the groups in another order.

        A directory in a section of its own is then explained by the section's title, which says what it is for.
        """
        groups = self._action_groups
        sections = [(action, action.help, group.title) for group in groups for action in group._group_actions
                    if action.dest.endswith(".hf_dir")]
        self._action_groups = [*self._arranged(groups)]
        for action, _, title in sections:
            action.help = f"{title}."
        try:
            return super().format_help(*args, **kwargs)
        finally:
            self._action_groups = groups
            for action, usual, _ in sections:
                action.help = usual

    def _arranged(self, groups: Sequence[_ArgumentGroup]) -> Iterator[Any]:
        actions = [action for group in groups for action in group._group_actions]
        first = [action for name in _FIRST for action in actions if action.dest.endswith(f".{name}")]
        if not first:
            yield from groups
            return
        positionals, *others = groups
        yield positionals
        yield self._group(NEEDED, first)
        for group in sorted(others, key=lambda one: any(map(_is_seldom, one._group_actions))):
            yield self._group(group.title, [action for action in group._group_actions if action not in first])

    def _group(self, title: str | None, actions: Sequence[Action]) -> _ArgumentGroup:
        group = _ArgumentGroup(self, title)
        group._group_actions = [*actions]
        return group


def _is_seldom(action: Action) -> bool:
    return action.dest.startswith(_LAST)


def completed_commands(parser: ArgumentParser, commands: Mapping[str, Callable[..., Any]]) -> Completed:
    """What may follow ``mm-convert``: also the fields of optional sections, which the help does not show."""
    found = completed_parser(parser)
    return Completed({**found.flags, "--version": (), COMPLETION: SHELLS}, {
        converter: replace(one, commands={
            name: replace(command, flags={**dict.fromkeys(_flags(get_type_hints(commands[name])["cfg"]), ()),
                                          **command.flags})
            for name, command in one.commands.items()})
        for converter, one in found.commands.items()})


def _flags(cls: type, start: str = "--cfg") -> Iterator[str]:
    """The flag of each field of the dataclass ``cls``, and of the fields of its sections."""
    hints = get_type_hints(cls)
    for one in fields(cls):
        flag, hint = f"{start}.{one.name}", hints[one.name]
        sections = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
        yield from _flags(sections[0], flag) if sections else (flag,)


def refuse_misspelt(words: Sequence[str], completed: Completed) -> None:
    """Raise UserError for converters, commands and flags that do not exist."""
    named = next((word for word in words if not word.startswith("-")), None)
    for converter, one in completed.commands.items():
        if named in one.commands:
            raise UserError(f"{named!r} is a command of a converter, whose name must stand before it: mm-convert "
                            f"{converter} {named}")
    refuse(misspelt(words, "mm-convert", completed))
