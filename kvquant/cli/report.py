"""The command `kvquant report`: a plan as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import CheckpointError, KVQuantError
from .console import FILE, HTML, NEW_FILE, check_output, enough_memory


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("plan", type=FILE)
@click.option("-o", "--output", type=NEW_FILE, required=True, help="HTML file to write.")
@enough_memory("plan")
def report(plan: Path, output: Path) -> None:
    """Show what a plan decided and what it costs, as one HTML page.

    PLAN is a file of kvquant calibrate. The page needs no other files and no network. matplotlib
    draws it: install the report extra.

    \b
    Example:
      kvquant report plan.safetensors -o report.html
    """
    check_output(output, plan, endings=HTML)
    from ..calibration.report import render
    from ..calibration.verdict import verdict
    from ..io.atomic import save_text
    from ..io.plan import CachePlan
    from ..report.page import check_libraries
    from ..text import paragraph

    check_libraries("kvquant report")
    found = CachePlan.load(plan)
    try:
        page, said = render(found, plan.name), verdict(found)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        if isinstance(error, KVQuantError):
            raise
        raise CheckpointError(
            f"{plan} holds facts that cannot be shown ({type(error).__name__}: {error}): "
            "calibrate again"
        ) from error
    save_text(output, page)
    click.echo(paragraph(f"{said.mark} {said.sentence}"))
    click.echo(f"{output}: {len(page.encode()) / 1e3:.0f} kB")
