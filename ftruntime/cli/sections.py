"""A command whose help lists its options under headings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click


class SectionedCommand(click.Command):
    """Options by section, in the order of their names there; others are not listed."""

    def __init__(
        self,
        *args: object,
        sections: Mapping[str, Sequence[str]],
        unlisted: str = "",
        **named: object,
    ) -> None:
        """As a command.

        Args:
            sections: names of parameters by heading.
            unlisted: a sentence on those in none, if there are any, below them.
        """
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self._sections = sections
        self._unlisted = unlisted

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        for heading, names in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([records[name] for name in names])
        if self._unlisted:
            formatter.write_paragraph()
            formatter.write_text(self._unlisted)
