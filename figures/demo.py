"""demo.svg: what `kvlab demo` shows of the three pools after one step. Run: python figures/demo.py

The terminal's picture, letters and colours as they are; Rich draws it. Its web fonts are taken out.
"""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvlab.demo import PICTURED_STEP
from kvlab.demo.race import make_lanes
from kvlab.demo.view import picture

FONTS = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def main(path: Path, model: str = "tiny") -> None:
    """Run the three engines to the step and write the SVG to `path`."""
    lanes = make_lanes(model)
    for lane in lanes:
        while len(lane.frames) < PICTURED_STEP:
            lane.step()
    console = Console(file=io.StringIO(), width=110, record=True, force_terminal=True, color_system="truecolor")
    console.print(Text(f"24 requests, the same in each engine, after step {PICTURED_STEP}", "bold"))
    console.print(picture(lanes, [lane.frames[PICTURED_STEP - 1] for lane in lanes], console))
    svg = console.export_svg(title="kvlab demo", unique_id="demo")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", FONTS)
    path.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).with_suffix(".svg"))
