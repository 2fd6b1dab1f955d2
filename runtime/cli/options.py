"""`headgate options`: the table of all options."""

from __future__ import annotations

from typing import Annotated

import typer


def options(
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
) -> None:
    """Print every option: key, type, default, meaning."""
    from ..options import OPTIONS
    from ..options import markdown as as_markdown

    if markdown:
        typer.echo(as_markdown(), nl=False)
        return
    for option in OPTIONS:
        typer.secho(option.key, bold=True)
        also = f" (also {', '.join(option.aliases)})" if option.aliases else ""
        typer.echo(f"    {option.type.name}, default {option.default_text()}{also}")
        typer.echo(f"    {option.doc}")
