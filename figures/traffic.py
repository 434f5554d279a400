"""azure_conv.svg, azure_code.svg, mooncake.svg: an hour of real traffic. Run: python figures/traffic.py

They are drawn from kvlab/lab/data. The results there are committed, the traces are not: real_traffic.py computes them.
"""

from pathlib import Path

import matplotlib

from kvlab.lab.scenes.traffic import NAMES, draw


def main(folder: Path) -> None:
    """Write the SVGs; from the same results, the same bytes."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvlab"
    for name in NAMES:
        draw(name).savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(__file__).parent)
