"""The demo in a terminal: two panels that fill side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.status import Status
from rich.table import Table
from rich.text import Text

from replayssm.cli.compare import first_difference
from replayssm.cli.screen import NOTE, SIDES, TITLES, describe, heading, table_rows, verdict

if TYPE_CHECKING:
    from replayssm.cli.checkpoint import Checkpoint
    from replayssm.cli.compare import Result

LINES = 14


class PanelScreen:
    """See :class:`replayssm.cli.screen.Screen`."""

    def __init__(self, prompt: str, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._prompt = prompt
        self._live: Live | Status | None = None
        self._title = ""
        self._texts: dict[str, str] = {}
        self._foot: RenderableType = ""
        self._done = False

    def __enter__(self) -> PanelScreen:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def loading(self, name: str) -> None:
        """See :class:`Screen`."""
        self._live = Status(f"loading {TITLES[name]}", console=self._console)
        self._live.start()

    def begin(self, name: str, checkpoint: Checkpoint) -> None:
        """See :class:`Screen`."""
        self._stop()
        self._title = describe(name, checkpoint)
        self._texts = dict.fromkeys(SIDES, "")
        self._foot, self._done = "", False
        self._live = Live(console=self._console, refresh_per_second=12, get_renderable=self._render)
        self._live.start()

    def status(self, text: str) -> None:
        """See :class:`Screen`."""
        self._foot = Text(f"{text} ...", style="dim")

    def write(self, side: str, text: str) -> None:
        """See :class:`Screen`."""
        self._texts[side] += text

    def end(self, result: Result) -> None:
        """See :class:`Screen`."""
        self._foot = Text(verdict(result), style="green" if result.identical else "bold red")
        self._done = True
        self._stop()

    def table(self, results: Sequence[Result]) -> None:
        """See :class:`Screen`."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for i, title in enumerate(heading(results)):
            table.add_column(title, justify="left" if i < 2 else "right", style="dim" if i == 1 else "")
        for row in table_rows(results):
            whose = row[1]
            style = "green" if row[0] == "text" and all(r.identical for r in results) else ""
            table.add_row(*row, style="dim" if whose == "stock" else style, end_section=whose != "ReplaySSM")
        self._console.print(table)
        self._console.print(Text(NOTE.replace("\n", " "), style="dim"))

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group:
        texts = {side: self._wrapped(side) for side in SIDES}
        if not self._done:
            texts = {side: lines[-LINES:] for side, lines in texts.items()}
        height = max(len(lines) for lines in texts.values()) if self._done else LINES
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*(self._panel(side, Text("\n").join(texts[side]), height) for side in SIDES))
        return Group(Text(self._title, style="bold"), grid, Padding(self._foot, (0, 2, 1, 2)))

    def _wrapped(self, side: str) -> list[Text]:
        """Lines of one side's text; of ours, what follows the first difference in red."""
        text = self._texts[side]
        whole = Text.assemble((self._prompt, "dim"), text)
        differs = first_difference(*self._texts.values()) if self._done and side == "replay" else None
        if differs is not None:
            whole.stylize("red", len(self._prompt) + differs)
        return list(whole.wrap(self._console, self._console.width // 2 - 4, tab_size=4))

    def _panel(self, side: str, body: Text, height: int) -> Panel:
        style = "cyan" if side == "replay" else "dim"
        return Panel(body, title=SIDES[side], title_align="left", height=height + 2, border_style=style)
