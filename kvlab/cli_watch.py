"""`kvlab demo pool`, `kvlab demo fork`: a live view as one HTML file that needs no network, opened in the browser."""

import tempfile
import webbrowser
from pathlib import Path

from kvlab import cli_labs


def open_view(name: str, scenario: str | None, seed: int, step: int | None, html: Path | None, projector: bool,
              with_: list[str] | None) -> None:  # fmt: skip
    """Write the view to `html`, or to a temporary file and open that. ValueError if there is no such view or frame."""
    from kvlab.watch import views

    parts = cli_labs.parts_of(with_) if with_ else None
    player = views.show(name, scenario, seed, step, parts, projector=projector)
    if html is not None:
        print(player.save(html))
        return
    path = player.save(Path(tempfile.mkdtemp(prefix="kvlab-")) / f"{name}.html")
    print(path if webbrowser.open(path.as_uri()) else f"No browser here. Open this file in one: {path}")
